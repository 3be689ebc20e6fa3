"""Finding operators that this release of torch may lack."""

from __future__ import annotations

from typing import Any

import torch


def packets(*names: str, library: str = "aten") -> list[Any]:
    """The packets of ``library`` with these names; names that this torch lacks are left out.

    ``packets("mm", "addmm")`` is ``[torch.ops.aten.mm, torch.ops.aten.addmm]``. A library that
    is not loaded has no packets.
    """
    namespace = getattr(torch.ops, library)
    found = (getattr(namespace, name, None) for name in names)
    return [packet for packet in found if packet is not None]


def overloads(*names: str, library: str = "aten") -> list[Any]:
    """The overloads named ``"op.overload"``; names that this torch lacks are left out."""
    found = []
    for name in names:
        packet_name, overload = name.split(".")
        for packet in packets(packet_name, library=library):
            if overload in packet.overloads():
                found.append(getattr(packet, overload))
    return found


def higher_order(*names: str) -> list[Any]:
    """The higher-order operators with these names; names that this torch lacks are left out."""
    return packets(*names, library="higher_order")
