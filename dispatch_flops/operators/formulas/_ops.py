"""Names of operators, as the registry's keys. The installed release of torch may lack some."""

from __future__ import annotations

from typing import Any

from dispatch_flops.operators.operator_keys import find_loaded


def packets(*names: str, library: str = "aten") -> list[str]:
    """Return the full names of operators: of ``"mm"``, ``"aten::mm"``, which is all overloads."""
    return [f"{library}::{name}" for name in names]


def overloads(*names: str, library: str = "aten") -> list[str]:
    """Return the full names of overloads: of ``"add.Tensor"``, ``"aten::add.Tensor"``."""
    return packets(*names, library=library)


def higher_order(*names: str) -> list[Any]:
    """Return the higher-order operators with these names, without those that this torch lacks."""
    found = (find_loaded(f"higher_order::{name}") for name in names)
    return [operator for operator in found if operator is not None]
