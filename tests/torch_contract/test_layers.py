"""Layers of ``torch.nn``: what their forward reads, and what keeps dispatch modes out of a call.

dispatch_flops runs a call that is like an earlier one without its mode
(counting/known_layers.py). It compares the input, the parameters and the attributes named here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from dispatch_flops import _torch
from dispatch_flops.counting.known_layers import LAYERS
from tests.helpers.modes import OperatorNames

_FUNCTIONS = {"F", "pad", "dim", "float", "add_", "_single", "_pair", "_triple", "ValueError"}
# They change no operator, or only where those that are compared differ.
_WITHOUT_EFFECT = {
    nn.Conv1d: {"groups", "_reversed_padding_repeated_twice"},
    nn.Conv2d: {"groups", "_reversed_padding_repeated_twice"},
    nn.Conv3d: {"groups", "_reversed_padding_repeated_twice"},
    nn.Embedding: {"padding_idx", "norm_type", "scale_grad_by_freq", "sparse"},
    nn.LayerNorm: {"eps"},
    nn.RMSNorm: {"eps"},
    nn.GroupNorm: {"eps"},
    nn.BatchNorm2d: {"eps", "momentum", "num_batches_tracked"},
}
_COMPARED = {
    nn.Linear: {"weight", "bias"},
    nn.Conv1d: {"weight", "bias", "stride", "padding", "dilation", "padding_mode"},
    nn.Conv2d: {"weight", "bias", "stride", "padding", "dilation", "padding_mode"},
    nn.Conv3d: {"weight", "bias", "stride", "padding", "dilation", "padding_mode"},
    nn.Embedding: {"weight", "max_norm"},
    nn.LayerNorm: {"weight", "bias", "normalized_shape"},
    nn.RMSNorm: {"weight", "normalized_shape"},
    nn.GroupNorm: {"weight", "bias", "num_groups"},
    nn.BatchNorm2d: {
        "weight", "bias", "running_mean", "running_var", "training", "track_running_stats",
    },
    nn.GELU: {"approximate"},
    nn.ReLU: {"inplace"},
    nn.SiLU: {"inplace"},
}  # fmt: skip


@pytest.mark.parametrize("cls", LAYERS, ids=lambda cls: cls.__name__)
def test_forward_of_a_layer_takes_one_tensor_and_reads_the_known_attributes(
    cls: type[nn.Module],
) -> None:
    layer = LAYERS[cls]
    assert cls.forward.__code__.co_argcount == 2
    codes = [cls.forward.__code__, *(method.__code__ for method in layer.methods.values())]
    read = {name for code in codes for name in code.co_names}
    read -= _FUNCTIONS | {layer.name, *layer.methods}
    assert read - _WITHOUT_EFFECT.get(cls, set()) == _COMPARED[cls]


def test_global_pre_hooks_run_before_those_of_the_module() -> None:
    order: list[str] = []
    module = nn.Identity()
    module.register_forward_pre_hook(lambda module, args: order.append("own"))
    handle = register_module_forward_pre_hook(lambda module, args: order.append("global"))
    try:
        module(torch.ones(1))
    finally:
        handle.remove()
    assert order == ["global", "own"]


def test_keep_modes_out_hides_operators_from_modes_for_as_long_as_it_lives() -> None:
    x = torch.ones(2)
    with OperatorNames() as names:
        keeping_out = _torch.keep_modes_out()
        x + x
        assert names.seen == []
        assert _torch.modes_in_force() == [names]
        del keeping_out
        x + x
    assert names.seen == ["aten.add.Tensor"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_any_autocast_is_seen(device: str) -> None:
    before = torch.is_autocast_enabled(device)
    assert not _torch.is_any_autocast_enabled()
    torch.set_autocast_enabled(device, True)
    try:
        assert _torch.is_any_autocast_enabled()
    finally:
        torch.set_autocast_enabled(device, before)


_SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu"),
    "inference mode": torch.inference_mode,
}


@pytest.mark.parametrize("setting", _SETTINGS)
def test_comparison_of_tensors_tells_apart_the_dispatch_keys_in_force(setting: str) -> None:
    x = torch.ones(2, 3)
    is_same = _torch.tensor_comparison((x,))
    assert is_same(x)
    with _SETTINGS[setting]():
        assert not is_same(x)
    found: list[bool] = []
    torch.vmap(lambda row: found.extend((is_same(x), is_same(row))) or row)(x)
    assert found == [False, False]


def test_comparison_of_tensors_does_not_tell_apart_forward_mode_and_modes() -> None:
    """dispatch_flops asks for these besides."""
    x = torch.ones(2, 3)
    is_same = _torch.tensor_comparison((x,))
    with torch.autograd.forward_ad.dual_level():
        assert is_same(torch.autograd.forward_ad.make_dual(x, x))
    with torch.no_grad():
        assert is_same(x)
