"""What TorchScript fuses is not seen, and said not to be."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops.errors import UncountedWarning
from tests.helpers.interpreters import run_python
from tests.helpers.profiling import profile_of

ROWS, WIDE = 3, 5

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated")  # torch.jit, since 2.13


def new_activation() -> Any:
    """Return a function that no test has scripted: torch keeps one compiled form of each."""

    def activation(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * y + x) * y

    return activation


@pytest.fixture
def fuses_on_cpu() -> Iterator[None]:
    """Fuse on the CPU as on CUDA, with an interpreter of torch's in place of LLVM."""
    can_fuse = torch._C._jit_can_fuse_on_cpu()
    needs_llvm = torch._C._jit_get_te_must_use_llvm_cpu()
    torch._C._jit_override_can_fuse_on_cpu(True)
    torch._C._jit_set_te_must_use_llvm_cpu(False)
    yield
    torch._C._jit_override_can_fuse_on_cpu(can_fuse)
    torch._C._jit_set_te_must_use_llvm_cpu(needs_llvm)


@pytest.fixture
def run() -> Callable[[], Any]:
    scripted = torch.jit.script(new_activation())
    x, y = torch.ones(ROWS, WIDE), torch.ones(ROWS, WIDE)
    return lambda: scripted(x, y)


def differentiated(runs_backward: bool) -> Callable[[], Any]:
    scripted, y = torch.jit.script(new_activation()), torch.ones(ROWS, WIDE)
    x = torch.ones(ROWS, WIDE, requires_grad=True)

    def run() -> None:
        out = scripted(x, y).sum()
        if runs_backward:
            out.backward()

    return run


def notes(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [note for note in profile_of(run).notes if "TorchScript" in note]
    warned = [str(w.message) for w in caught if w.category is UncountedWarning]
    assert warned == found
    return found


def test_fused_kernels_are_noted_and_warned_of(fuses_on_cpu: None, run: Callable[[], Any]) -> None:
    for _ in range(3):
        run()
    with pytest.warns(UncountedWarning, match="PYTORCH_JIT=0"):
        assert profile_of(run).total().flops == 0
    assert len(notes(run)) == 1


@pytest.mark.parametrize("runs_backward", [False, True])
def test_fused_kernels_of_differentiated_functions_are_noted(
    fuses_on_cpu: None, runs_backward: bool
) -> None:
    run = differentiated(runs_backward)
    for _ in range(3):
        run()
    assert len(notes(run)) == 1


def test_fused_kernels_that_ran_before_the_block_are_not_noted(
    fuses_on_cpu: None, run: Callable[[], Any]
) -> None:
    for _ in range(3):
        run()
    assert notes(lambda: torch.empty_strided((ROWS, WIDE), (WIDE, 1)).sin()) == []


def test_torchscript_that_does_not_fuse_counts_as_eager(run: Callable[[], Any]) -> None:
    for _ in range(3):
        run()
    assert profile_of(run).total().flops == 4 * ROWS * WIDE
    assert notes(lambda: (run(), torch.empty_strided((ROWS, WIDE), (WIDE, 1)))) == []


@pytest.mark.parametrize("runs_backward", [False, True])
def test_differentiated_functions_that_do_not_fuse_are_not_noted(runs_backward: bool) -> None:
    run = differentiated(runs_backward)
    for _ in range(3):
        run()
    assert notes(run) == []


ONEDNN_FUSION = """
import torch
from dispatch_flops import FlopCounterMode
torch.jit.enable_onednn_fusion(True)
double = torch.jit.CompilationUnit("def double(x):\\n    return x * 2\\n").double
double(torch.ones(3))
for _ in range(4):
    with FlopCounterMode(display=False) as counter:
        torch.ones(3) * 2
    assert counter.profile.total().flops == 3 and counter.profile.notes == ()
"""


@pytest.mark.slow
def test_counters_of_a_program_with_onednns_fusion_leave_it_alive() -> None:
    done = run_python("-c", ONEDNN_FUSION)
    assert done.returncode == 0, done.stderr


def optimized_for_inference(model: nn.Module, image: torch.Tensor) -> Any:
    return torch.jit.optimize_for_inference(torch.jit.script(model))


def fused_by_onednn(model: nn.Module, image: torch.Tensor) -> Any:
    was_enabled = torch.jit.onednn_fusion_enabled()
    torch.jit.enable_onednn_fusion(True)
    try:
        frozen = torch.jit.freeze(torch.jit.trace(model, image))
        for _ in range(3):  # it fuses in the second run, or the third
            frozen(image)
    finally:
        torch.jit.enable_onednn_fusion(was_enabled)
    return frozen


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.filterwarnings("ignore:TorchScript ran:UserWarning")
@pytest.mark.parametrize("make", [optimized_for_inference, fused_by_onednn])
@torch.no_grad()
def test_convolutions_that_onednn_computes_for_torchscript_are_noted(
    make: Callable[[nn.Module, torch.Tensor], Any],
) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU()).eval()
    image = torch.ones(1, 2, 7, 11)
    assert profile_of(lambda: model(image)).total().macs == (3 * 5 * 9) * (2 * 3 * 3)
    own = make(model, image)
    assert profile_of(lambda: own(image)).total().macs == 0
    assert len(notes(lambda: own(image))) == 1
