"""Names of operators, as the registry's keys. The installed release of torch may lack some."""

from __future__ import annotations

from typing import Any

from dispatch_flops.operators.operator_keys import find_loaded


def ops(*names: str, library: str = "aten") -> list[str]:
    """Return full names: ``"aten::mm"`` for ``"mm"``, all overloads, or ``"aten::add.Tensor"``."""
    return [f"{library}::{name}" for name in names]


def higher_order(*names: str) -> list[Any]:
    """Return the higher-order operators with these names, without those that this torch lacks."""
    found = (find_loaded(f"higher_order::{name}") for name in names)
    return [operator for operator in found if operator is not None]
