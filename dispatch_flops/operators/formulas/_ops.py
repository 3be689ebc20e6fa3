"""Lookup of operators that the installed release of torch may lack."""

from __future__ import annotations

from typing import Any

import torch


def packets(*names: str, library: str = "aten") -> list[Any]:
    """Return the packets of ``library`` with these names, without those that this torch lacks.

    ``packets("mm", "addmm")`` is ``[torch.ops.aten.mm, torch.ops.aten.addmm]``. A library that
    is not loaded has no packets.
    """
    namespace = getattr(torch.ops, library)
    found = (getattr(namespace, name, None) for name in names)
    return [packet for packet in found if packet is not None]


def overloads(*names: str, library: str = "aten") -> list[Any]:
    """Return the overloads named ``"op.overload"``, without those that this torch lacks."""
    found = []
    for name in names:
        packet_name, overload = name.split(".")
        for packet in packets(packet_name, library=library):
            if overload in packet.overloads():
                found.append(getattr(packet, overload))
    return found


def higher_order(*names: str) -> list[Any]:
    """Return the higher-order operators with these names, without those that this torch lacks."""
    return packets(*names, library="higher_order")
