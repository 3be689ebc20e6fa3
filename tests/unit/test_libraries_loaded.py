"""What tells that operators were added since the last question."""

from __future__ import annotations

from itertools import pairwise

import torch

from dispatch_flops import _torch


def test_libraries_loaded_is_the_same_object_while_nothing_is_added() -> None:
    assert _torch.libraries_loaded() is _torch.libraries_loaded()


def test_libraries_loaded_changes_with_each_definition_and_kernel() -> None:
    library = torch.library.Library("loaded_here", "DEF")
    found = [_torch.libraries_loaded()]
    library.define("twice(Tensor x) -> Tensor")
    found.append(_torch.libraries_loaded())
    library.impl("twice", lambda x: x + x, "CPU")
    found.append(_torch.libraries_loaded())
    library._destroy()
    found.append(_torch.libraries_loaded())
    assert all(a != b for a, b in pairwise(found))


def test_libraries_loaded_changes_where_one_library_replaces_another() -> None:
    first = torch.library.Library("aten", "IMPL")
    first.impl("mish_backward", lambda grad, x: grad, "CUDA")
    before = _torch.libraries_loaded()
    first._destroy()
    second = torch.library.Library("aten", "IMPL")
    second.impl("silu_backward", lambda grad, x: grad, "CUDA")
    assert _torch.libraries_loaded() != before
    second._destroy()


def test_libraries_loaded_is_unchanged_by_kernels_of_the_package() -> None:
    before = _torch.libraries_loaded()
    kernels = _torch.Kernels("aten")
    kernels.register(torch.ops.aten.mish_backward.default, lambda keyset, *args: args[0], "CUDA")
    assert _torch.libraries_loaded() is before
    kernels.remove()
    assert _torch.libraries_loaded() is before
