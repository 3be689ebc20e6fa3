"""``torch.compile``'s wrappers."""

from __future__ import annotations

import torch
from torch import nn

from dispatch_flops.counting.wrappers import find_submodule, unwrap


def wrap(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def test_unwrap_returns_the_module_inside_a_wrapper() -> None:
    module = nn.Linear(3, 5)
    assert unwrap(wrap(module)) is unwrap(module) is module


def test_find_submodule_skips_wrappers_on_the_way() -> None:
    inner = nn.Linear(3, 5)
    model = wrap(nn.Sequential(wrap(nn.Sequential(wrap(inner)))))
    assert find_submodule(model, "0.0") is inner
    assert find_submodule(model, "") is unwrap(model)
    assert find_submodule(model, "0.1") is None


def test_find_submodule_of_a_torchscript_model_returns_its_child() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(3, 5)))
    assert find_submodule(model, "0") is not None
    assert find_submodule(model, "1") is None
