"""Reports of the CPU's allocator (memory/kernel_allocations.py)."""

from __future__ import annotations

import pytest
import torch

from dispatch_flops import _torch


def test_reports_have_allocations_and_their_releases_in_order() -> None:
    before = torch.empty(7)
    _torch.start_reporting_allocations()
    kept = torch.empty(11)
    released = torch.empty(13)
    del before, released
    sizes = _torch.stop_reporting_allocations()
    assert sizes == ([11 * 4, 13 * 4, -13 * 4], [])
    assert kept.shape == (11,)
    assert _torch.stop_reporting_allocations() == ([], [])


def test_reports_and_profilers_exclude_each_other() -> None:
    assert not _torch.is_profiling()
    with torch.profiler.profile():
        assert _torch.is_profiling()
        with pytest.raises(RuntimeError, match="already enabled"):
            _torch.start_reporting_allocations()
    assert not _torch.is_profiling()
    _torch.start_reporting_allocations()
    assert _torch.is_profiling()
    _torch.stop_reporting_allocations()


def test_block_that_was_reported_is_remembered_by_its_address() -> None:
    """benchmarks/limits.md states this."""
    sizes = torch.arange(1, 200).mul(1000).tolist()
    _torch.start_reporting_allocations()
    blocks = [torch.empty(size) for size in sizes]
    _torch.stop_reporting_allocations()
    known = {block.data_ptr(): size for block, size in zip(blocks, sizes, strict=True)}
    blocks.clear()
    again = [torch.empty(size - 1) for size in sizes]
    stale = {-4 * known[block.data_ptr()] for block in again if block.data_ptr() in known}
    assert stale
    _torch.start_reporting_allocations()
    again.clear()
    reported, _ = _torch.stop_reporting_allocations()
    assert stale <= set(reported)


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
def test_settings_of_kernels_on_cuda_change_with_what_the_program_sets() -> None:
    before = _torch.cuda_kernel_settings()
    for setting in ({"enabled": False}, {"deterministic": True}, {"benchmark": True}):
        with torch.backends.cudnn.flags(**{"enabled": True, "allow_tf32": True, **setting}):
            assert _torch.cuda_kernel_settings() != before
    with torch.no_grad():
        assert _torch.cuda_kernel_settings() != before
    layers = torch.backends.cudnn.conv, torch.backends.cudnn.rnn
    precisions = [layer.fp32_precision for layer in layers]
    found = {before}
    try:
        for precision in ("ieee", "tf32"):
            for layer in layers:  # of the four combinations, torch's first function knows two
                layer.fp32_precision = precision
                found.add(_torch.cuda_kernel_settings())
    finally:
        for layer, precision in zip(layers, precisions, strict=True):
            layer.fp32_precision = precision
    assert len(found) == 4
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        assert _torch.cuda_kernel_settings() is None
    assert _torch.cuda_kernel_settings() == before


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
def test_settings_of_kernels_change_with_what_the_program_sets() -> None:
    before = _torch.cpu_kernel_settings()
    with torch.backends.mkldnn.flags(enabled=False):
        assert _torch.cpu_kernel_settings() != before
    with torch.backends.mkldnn.flags(deterministic=True):
        assert _torch.cpu_kernel_settings() != before
    with torch.no_grad():
        assert _torch.cpu_kernel_settings() != before
    with torch.backends.nnpack.flags(enabled=False):
        assert _torch.cpu_kernel_settings() != before
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert _torch.cpu_kernel_settings() != before
    finally:
        torch.set_num_threads(threads)
    precision = torch.backends.mkldnn.conv.fp32_precision
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    try:
        assert _torch.cpu_kernel_settings() != before
    finally:
        torch.backends.mkldnn.conv.fp32_precision = precision
    assert _torch.cpu_kernel_settings() == before


@pytest.mark.parametrize("read", [_torch.cpu_kernel_settings, _torch.cuda_kernel_settings])
def test_settings_of_kernels_have_whether_these_are_to_be_deterministic(
    read: _torch.SettingsReader,
) -> None:
    before = read()
    torch.use_deterministic_algorithms(True)
    try:
        assert read() != before
    finally:
        torch.use_deterministic_algorithms(False)
    assert read() == before
