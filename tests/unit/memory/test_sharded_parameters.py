"""Memory of FSDP2: sharded parameters, and those that it gathers for a layer."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

from dispatch_flops import Profile
from dispatch_flops.distributed import simulate
from tests.models.parallel import BATCH, EVEN, EVEN_LAYERS, fsdp_even, fsdp_steady

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")

F32, RANKS = 4, 4
LAYER = EVEN * EVEN * F32


@pytest.fixture(scope="module")
def profile() -> Profile:
    return simulate(fsdp_even, {"dp": RANKS}, [1], memory="timeline").ranks[1].check()


def test_peak_of_forward_has_the_closed_form(profile: Profile) -> None:
    memory = profile.memory
    assert memory is not None
    # When the last layer is gathered there are its parameters, the buffer that they were gathered
    # in, and the buffer of the layer before, which FSDP2 keeps until then. Since torch 2.15 it does
    # not, and there is most when the last layer has returned its result.
    keeps_buffer = TorchVersion(torch.__version__) < (2, 15)
    assert memory.by_role("forward") == {
        "parameters": EVEN_LAYERS * LAYER // RANKS,
        "unsharded parameters": (3 if keeps_buffer else 2) * LAYER,
        "inputs": BATCH * EVEN * F32,
        "activations": (EVEN_LAYERS - keeps_buffer) * BATCH * EVEN * F32,
    }


def test_gathered_parameters_are_not_kept(profile: Profile) -> None:
    memory = profile.memory
    assert memory is not None
    last = memory.timeline[-1].bytes_by_role
    assert last["parameters"] == last["gradients"] == EVEN_LAYERS * LAYER // RANKS
    assert "unsharded parameters" not in last


def test_later_step_has_the_peaks_of_the_first_and_the_optimizers_state(profile: Profile) -> None:
    steady = simulate(fsdp_steady, {"dp": RANKS}, [1], memory=True).ranks[1].check()
    assert profile.memory is not None and steady.memory is not None
    shard, number = EVEN * EVEN // RANKS, F32  # AdamW counts the steps of each parameter
    state = EVEN_LAYERS * (2 * shard * F32 + number)
    for phase in ("forward", "backward"):
        truth = {**profile.memory.by_role(phase), "optimizer state": state}  # type: ignore[arg-type]
        assert steady.memory.by_role(phase) == truth  # type: ignore[arg-type]
    held = steady.memory.by_role("optimizer")
    temporaries = held.pop("temporaries")
    assert 0 < temporaries <= 4 * shard * F32
    assert held == {
        "parameters": EVEN_LAYERS * LAYER // RANKS,
        "gradients": EVEN_LAYERS * LAYER // RANKS,
        "optimizer state": state,
        "inputs": BATCH * EVEN * F32,
    }


def test_module_holds_its_shards_and_their_gradients(profile: Profile) -> None:
    for child in profile.root.children:
        assert child.memory is not None
        assert child.memory.own.parameters == child.memory.own.gradients == LAYER // RANKS
    assert profile.root.memory is not None
    assert profile.root.memory.total.gradients == EVEN_LAYERS * LAYER // RANKS
