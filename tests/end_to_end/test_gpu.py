"""Behaviour that needs a CUDA device: run with ``pytest -m gpu`` on a machine that has one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from dispatch_flops import FlopCounterMode, profile_model
from dispatch_flops.timing.peaks import measure_machine
from tests.helpers.allocator import peak_bytes_on_cuda
from tests.helpers.profiling import profile_of
from tests.helpers.training_steps import ON_CUDA, step_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

B, H, S, D = 2, 8, 128, 64


@pytest.mark.parametrize(
    "backend",
    [
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.MATH,
    ],
)
def test_attention_on_every_backend_counts_the_same(backend: SDPBackend) -> None:
    q, k, v = (
        torch.randn(B, H, S, D, device="cuda", dtype=torch.float16, requires_grad=True)
        for _ in range(3)
    )
    with sdpa_kernel(backend):
        profile = profile_of(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward())
    assert profile.total("forward").macs == 2 * B * H * S * S * D
    assert profile.total("backward").macs == 2 * 2 * B * H * S * S * D
    assert not profile.uncounted_ops()


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_rnn_on_cudnn_counts_as_on_cpu(make: Callable[..., nn.Module]) -> None:
    model = make(10, 20, num_layers=2, bidirectional=True)
    x = torch.randn(5, 3, 10)
    on_cpu = profile_of(lambda: model(x), model=model).total("forward").macs
    model.cuda()
    assert profile_of(lambda: model(x.cuda()), model=model).total("forward").macs == on_cpu


@pytest.mark.parametrize("reentrant", [False, True])
def test_counter_in_the_backward_thread_attributes_operators(reentrant: bool) -> None:
    inner = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    model = nn.ModuleDict({"inner": inner, "head": nn.Linear(3, 2)}).cuda()
    x = torch.randn(4, 5, device="cuda", requires_grad=True)

    def step() -> None:
        hidden = checkpoint(model["inner"], x, use_reentrant=reentrant)
        model["head"](hidden).sum().backward()

    profile = profile_of(step, model=model)
    for fqn, macs in (("inner.0", 4 * 5 * 7), ("inner.2", 4 * 7 * 3)):
        assert profile.node(fqn).total("forward").macs == macs
        assert profile.node(fqn).total("backward").macs == 2 * macs
    assert profile.node("inner.0").total("recompute").macs == 4 * 5 * 7
    assert profile.node("head").total("backward").macs == 2 * 4 * 3 * 2


def test_counter_under_autocast_records_bfloat16() -> None:
    model = nn.Linear(64, 32).cuda()
    with FlopCounterMode(model, display=False) as counter, torch.autocast("cuda", torch.bfloat16):
        model(torch.randn(8, 64, device="cuda"))
    ops = (op for node in counter.profile.nodes() for op in node.ops)
    dtypes = {op.dtype for op in ops if op.cost is not None and op.cost.macs}
    assert dtypes == {"bfloat16"}


def test_counter_with_latency_times_by_events_on_the_device() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    with FlopCounterMode(model, display=False, latency=True) as counter:
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        optimizer.step()
    profile = counter.profile
    assert profile.run.device == "cuda"
    assert profile.timing.method is not None and "events on the device" in profile.timing.method
    for op in profile.op_totals():  # some of the free ones give the device nothing to do
        assert op.kind == "free" if op.latency_s is None else op.latency_s >= 0
    for node in profile.root.walk():
        own = sum(op.latency_s or 0.0 for op in node.ops if op.phase == "forward")
        below = sum(child.latency_s or 0.0 for child in node.children)
        assert node.latency_s == pytest.approx(own + below)
    for seconds in (profile.timing.latency("backward"), profile.timing.latency("optimizer")):
        assert seconds is not None and seconds > 0


def test_profile_model_with_a_latency_pass_times_by_events() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).cuda()
    x = torch.randn(8, 64, device="cuda")
    profile = profile_model(model, args=[x], backward=True, repeats=3, operator_latency=True)
    whole = profile.root.latency_s
    assert whole is not None and whole > 0
    assert sum(child.latency_s or 0.0 for child in profile.root.children) <= whole * (1 + 1e-9)


def test_captured_graph_when_replayed_counts_once() -> None:
    model = nn.Linear(64, 32).cuda()
    x = torch.randn(8, 64, device="cuda")
    with torch.no_grad():
        model(x)  # libraries are set up outside the capture
        graph = torch.cuda.CUDAGraph()
        with FlopCounterMode(model, display=False, latency=True) as counter:
            with torch.cuda.graph(graph):
                model(x)
            for _ in range(3):
                graph.replay()
    assert counter.profile.total().macs == 8 * 64 * 32


@pytest.mark.parametrize("name", ON_CUDA)
def test_peak_of_a_training_step_is_that_of_the_allocator(name: str) -> None:
    """Of the second step and of the third, whose kernels' own memory is remembered."""
    with torch.device("cuda"):
        model, x, loss = ON_CUDA[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    step, before = step_of(model, x, loss, lambda _: optimizer)
    truth = peak_bytes_on_cuda(step, before)
    for _ in range(2):
        with FlopCounterMode(model, display=False, memory=True, optimizers=[optimizer]) as counter:
            step()
        memory = counter.profile.memory
        assert memory is not None and memory.devices[0].device == "cuda:0"
        assert memory.peak_bytes == pytest.approx(truth, rel=1e-3)
        assert not memory.is_lower_bound and not memory.is_approximate
        assert sum(use.bytes for use in memory.at_peak) == memory.peak_bytes


def test_run_on_meta_for_cuda_is_the_one_on_the_device() -> None:
    """Dropout, attention by the math path, softmax's gradients, and an optimizer over lists."""
    profiles = []
    for device in ("cuda", "meta"):
        with torch.device(device):
            model: nn.Module = nn.Sequential(
                nn.Linear(61, 64), nn.TransformerEncoderLayer(64, 4, 97, 0.1), nn.Linear(64, 37)
            )
            x = torch.ones(3, 51, 61)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        with sdpa_kernel(SDPBackend.MATH):
            for _ in range(2):
                with FlopCounterMode(
                    model, display=False, memory=True, target="cuda", optimizers=[optimizer]
                ) as counter:
                    model(x).logsumexp(-1).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        profiles.append(counter.profile)
    on_cuda, on_meta = profiles
    assert on_meta.total() == on_cuda.total()
    found = [profile.memory.devices[0].peak_bytes for profile in profiles if profile.memory]
    assert found[1] == pytest.approx(found[0], rel=1e-3)


def test_peak_with_rounding_is_what_the_allocator_gives() -> None:
    """Of operators whose kernels allocate nothing for themselves."""
    rows, columns, layers = 37, 101, 3

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(rows, columns))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).tanh()

    model = nn.Sequential(*(Scaled() for _ in range(layers))).cuda()
    x = torch.ones(rows, columns, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with FlopCounterMode(model, display=False, memory=True, memory_rounding=512) as counter:
        y = model(x)
        y.backward(torch.ones_like(y))
    held = (layers + 1) * -(-rows * columns * 4 // 512) * 512  # parameters and the input
    memory = counter.profile.memory
    assert memory is not None
    assert memory.peak_bytes - held == torch.cuda.max_memory_allocated() - before


def test_kernel_allocations_leave_the_programs_statistics() -> None:
    """The allocator is asked what kernels take; its peak is the program's to reset."""
    x = torch.randn(1000, 1000, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    most = torch.ones(10**7, device="cuda")
    del most
    peak = torch.cuda.max_memory_allocated()
    with FlopCounterMode(display=False, memory=True):
        x.sort()
    assert torch.cuda.max_memory_allocated() == peak


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_device_name_of_a_model_on_the_second_device_is_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the one of {device}")
    model, x = nn.Linear(5, 7, device="cuda:1"), torch.randn(3, 5, device="cuda:1")
    assert profile_model(model, args=[x]).run.device_name == "the one of cuda:1"


@pytest.mark.parametrize("model", [nn.Linear(1, 2), nn.Identity()], ids=["cpu", "empty"])
@pytest.mark.parametrize("device", range(torch.cuda.device_count()))
def test_profile_model_of_a_random_model_keeps_the_random_state(
    model: nn.Module, device: int
) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand_like(x)

    x = torch.ones(3, device=torch.device("cuda", device))
    before = torch.cuda.get_rng_state(device)
    torch.rand_like(x)
    after_a_draw = torch.cuda.get_rng_state(device)
    assert not torch.equal(before, after_a_draw)
    profile_model(Noisy(), args=[x])
    assert torch.equal(torch.cuda.get_rng_state(device), after_a_draw)


def test_measure_machine_under_another_name_measures_the_same_device() -> None:
    by_index, by_type = (
        measure_machine(name, [torch.bfloat16], repeats=1) for name in ("cuda:0", "cuda")
    )
    assert by_index.name == by_type.name == torch.cuda.get_device_name(0)
    assert by_index.source == by_type.source
