"""What kernels on the CPU allocate for themselves, against the events of torch's allocator."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from dispatch_flops import FlopCounterMode, _torch, register_workspace
from dispatch_flops.counting.known_calls import KnownCall
from dispatch_flops.counting.plans import SHARED_PLANS
from dispatch_flops.memory import found_workspaces, kernel_allocations
from dispatch_flops.memory.kernel_allocations import ReportedOperator, last_kernel
from dispatch_flops.operators import workspaces
from dispatch_flops.operators.costing import CallCost
from dispatch_flops.operators.numbers import BY_TYPE, BY_VALUE, NumberKeys
from dispatch_flops.operators.tensors import tensors_in
from dispatch_flops.operators.workspaces import WorkspaceRule
from dispatch_flops.profile import MemoryProfile
from tests.helpers.allocator import allocations


def memory_of(run: Callable[[], object], *held: Any) -> MemoryProfile:
    with FlopCounterMode(display=False, memory=True) as counter:
        for tensor in tensors_in(held):
            tensor.detach()  # is met, and counts as there before
        run()
    assert counter.profile.memory is not None
    return counter.profile.memory


def assert_equals_the_allocators(run: Callable[[], object], *held: Any) -> None:
    """Compare the peak of one operator, on tensors that are there before, to the byte."""
    run()  # what torch keeps from the first call on is there before
    before = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in(held)}
    truth = max(accumulate(allocations(run), initial=0))
    for memory in (memory_of(run, *held), memory_of(run, *held)):  # reported, and remembered
        assert not memory.is_lower_bound
        assert memory.peak_bytes == sum(before.values()) + truth


def convolution(seed: int) -> tuple[nn.Module, torch.Tensor]:
    """Return a layer and an input of random sizes, padding, dilation, groups, layout and dtype."""
    draw = random.Random(seed)
    dims = draw.choice([1, 2, 2, 2, 3])
    groups = draw.choice([1, 1, 2, 3])
    ins, outs = groups * draw.randint(1, 19), groups * draw.randint(1, 19)
    dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16])
    cls: Any = getattr(nn, f"Conv{draw.choice(['', 'Transpose'])}{dims}d")
    layer = cls(
        ins, outs, draw.choice([1, 2, 3, 5]), stride=draw.choice([1, 1, 2]), dtype=dtype,
        dilation=draw.choice([1, 1, 2]), groups=groups, padding=draw.choice([0, 1]),
        bias=draw.random() < 0.5,
    )  # fmt: skip
    x = torch.randn(draw.randint(1, 3), ins, *draw.sample([11, 13, 17], dims), dtype=dtype)
    if dims == 2 and draw.random() < 0.4:
        x = x.to(memory_format=torch.channels_last)
    return layer, x.requires_grad_()


@pytest.mark.parametrize("seed", range(40))
def test_workspace_of_a_convolution_is_the_allocators(seed: int) -> None:
    layer, x = convolution(seed)

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    assert_equals_the_allocators(forward, x, *layer.parameters())
    out = layer(x)
    gradient = torch.randn_like(out)
    wanted = [x, *layer.parameters()]

    def backward() -> None:
        torch.autograd.grad(out, wanted, gradient, retain_graph=True)

    assert_equals_the_allocators(backward, x, out, gradient, *layer.parameters())


@pytest.mark.parametrize("is_bidirectional", [False, True])
@pytest.mark.parametrize("sizes", [(7, 3, 5, 11), (13, 2, 64, 32), (1, 1, 17, 19)])
def test_workspace_of_an_lstm_is_the_allocators(
    sizes: tuple[int, int, int, int], is_bidirectional: bool
) -> None:
    length, batch, ins, hidden = sizes
    layer = nn.LSTM(ins, hidden, bidirectional=is_bidirectional)
    x = torch.randn(length, batch, ins, requires_grad=True)
    held = [x, *layer.parameters()]

    def step() -> None:
        out = layer(x)[0].sum()
        torch.autograd.grad(out, held)

    assert_equals_the_allocators(step, held)


MATRIX = torch.eye(7) + torch.arange(49.0).view(7, 7).tril() / 49
SIGNAL = torch.arange(5 * 30.0).view(5, 30)
MASK = SIGNAL > 70
IMAGE = torch.arange(3 * 5 * 31.0).view(3, 5, 31)
PLACES = torch.arange(3 * 5 * 31).view(3, 5, 31) % 3
BAGS = torch.arange(5 * 13).view(5, 13) % 5
HALF = SIGNAL.bfloat16()
COMPLEX = torch.complex(IMAGE, IMAGE)
VALUES = torch.tensor([5, 3, 5, 7, 3, 3, 1, 11] * 13)
OTHERS: dict[str, tuple[Callable[[], object], Any]] = {
    "solve": (lambda: torch.linalg.solve_ex(MATRIX, MATRIX), MATRIX),
    "svd": (lambda: torch.linalg.svd(MATRIX), MATRIX),
    "eigh": (lambda: torch.linalg.eigh(MATRIX), MATRIX),
    "qr": (lambda: torch.linalg.qr(MATRIX), MATRIX),
    "fft": (lambda: torch.fft.rfft(SIGNAL), SIGNAL),
    "sort": (lambda: SIGNAL.sort(dim=0), SIGNAL),
    "unique": (lambda: VALUES.unique(), VALUES),
    "logsumexp": (lambda: SIGNAL.logsumexp(1), SIGNAL),
    "mse_loss": (lambda: functional.mse_loss(SIGNAL, SIGNAL), SIGNAL),
    "masked_select": (lambda: SIGNAL.masked_select(MASK), (SIGNAL, MASK)),
    "isin": (lambda: torch.isin(VALUES, VALUES), VALUES),
    "nanmedian": (lambda: SIGNAL.nanmedian(0), SIGNAL),
    "to_sparse": (lambda: MATRIX.to_sparse(), MATRIX),
    "to_sparse_csr": (lambda: MATRIX.to_sparse_csr(), MATRIX),
    "to_dense": (lambda: MATRIX.to_sparse_csr().to_dense(), MATRIX),
    "coalesce": (lambda: torch.sparse_coo_tensor(VALUES[None], VALUES).coalesce(), VALUES),
    "allclose": (lambda: torch.allclose(SIGNAL, SIGNAL), SIGNAL),
    "mean of bags": (lambda: functional.embedding_bag(BAGS, SIGNAL, mode="mean"), (BAGS, SIGNAL)),
    "linear upsampling": (lambda: functional.interpolate(IMAGE, 77, mode="linear"), IMAGE),
    "mean by index": (
        lambda: IMAGE.scatter_reduce(0, PLACES, IMAGE, "mean", include_self=False),
        (IMAGE, PLACES),
    ),
    "maximum of columns": (lambda: SIGNAL.t().max(), SIGNAL),
    "indices of columns": (lambda: functional.embedding(BAGS.t(), SIGNAL), (BAGS, SIGNAL)),
    "padding of columns": (lambda: functional.pad(SIGNAL.t()[None], (2, 2), "reflect"), SIGNAL),
    "gather in half precision": (lambda: HALF.gather(1, BAGS), (HALF, BAGS)),
    "conjugated batch": (lambda: torch.bmm(COMPLEX, COMPLEX.mH), COMPLEX),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_workspace_without_a_formula_is_the_allocators(name: str) -> None:
    assert_equals_the_allocators(*OTHERS[name])


@pytest.mark.parametrize("is_masked", [False, True])
def test_layers_of_inference_take_what_the_allocator_says(is_masked: bool) -> None:
    """Torch runs a whole layer as one kernel."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    model = nn.TransformerEncoder(layer, 2).eval()
    attention = nn.MultiheadAttention(64, 4, batch_first=True).eval()
    x, mask = torch.randn(3, 70, 64), torch.arange(70).expand(3, 70) >= 50
    kwargs = {"src_key_padding_mask": mask} if is_masked else {}
    with torch.no_grad():
        assert_equals_the_allocators(lambda: layer(x, **kwargs), x, mask, *layer.parameters())
        assert_equals_the_allocators(lambda: attention(x, x, x), x, *attention.parameters())
        if not is_masked:  # or else a tensor that is nested without a jagged layout
            assert_equals_the_allocators(lambda: model(x), x, *model.parameters())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_layers_of_integers_take_what_the_allocator_says() -> None:
    x = torch.randn(11, 5)
    packed = torch.ops.quantized.linear_prepack(
        torch.quantize_per_tensor(torch.randn(7, 5), 0.1, 0, torch.qint8), torch.randn(7)
    )
    assert_equals_the_allocators(lambda: torch.ops.quantized.linear_dynamic(x, packed), x)
    recurrent = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.LSTM(5, 7)), {nn.LSTM})
    assert_equals_the_allocators(lambda: recurrent(x[:, None]), x)
    cell = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.LSTMCell(5, 7)), {nn.LSTMCell})
    assert_equals_the_allocators(lambda: cell(x), x, cell[0].bias_ih, cell[0].bias_hh)


OPERATOR = torch.ops.aten.exp.default
REPORTED = WorkspaceRule(lambda *_, out, **__: None)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list that grows with each report of the allocator; nothing is remembered yet."""
    started: list[None] = []
    start = _torch.start_reporting_allocations

    def count() -> None:
        started.append(None)
        start()

    monkeypatch.setattr(_torch, "start_reporting_allocations", count)
    monkeypatch.setattr(kernel_allocations, "_known", {})
    SHARED_PLANS.rules_changed()
    return started


def test_allocator_reports_each_signature_of_a_convolution_once(reports: list[None]) -> None:
    layer, other = nn.Conv2d(3, 5, 3), nn.Conv2d(3, 5, 3, padding=1)
    x, y = torch.randn(2, 2, 3, 7, 11)
    for _ in range(3):
        memory_of(lambda: (layer(x), layer(y), other(x), other(x)), x)
    assert len(reports) == 2
    in_channels_last = x.to(memory_format=torch.channels_last)
    memory_of(lambda: layer(in_channels_last), x)
    assert len(reports) == 3


def test_allocator_reports_each_call_whose_workspace_depends_on_values(
    reports: list[None],
) -> None:
    few, all_of_them = SIGNAL > 140, SIGNAL >= 0
    for mask in (few, all_of_them, few):
        assert_equals_the_allocators(lambda mask=mask: SIGNAL.masked_select(mask), SIGNAL, mask)
    assert len(reports) == 3 * 2


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_workspace_of_a_sparse_operand_depends_on_how_much_it_stores(reports: list[None]) -> None:
    dense = torch.ones(30, 30)
    for stored in (torch.eye(30), torch.ones(30, 30)):
        x = stored.to_sparse()
        assert_equals_the_allocators(lambda x=x: x * dense, x._indices(), x._values(), dense)
        y = stored.to_sparse_csr()
        parts = y.crow_indices(), y.col_indices(), y.values()
        assert_equals_the_allocators(lambda y=y: y + y, parts)


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
def test_settings_are_read_anew_for_a_call_that_is_known(
    reports: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum that casts an operand, in a loop, is known by comparison from its third call on."""
    monkeypatch.setattr(found_workspaces, "_found", {})
    doubles = SIGNAL.double()

    def alternate() -> None:
        for _ in range(5):
            SIGNAL + doubles
            with torch.backends.mkldnn.flags(enabled=False):
                SIGNAL + doubles

    assert_equals_the_allocators(alternate, SIGNAL, doubles)
    assert len(reports) == 1 + 2  # to find out that it casts, and under each of the settings


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
def test_workspace_is_remembered_for_the_kernels_in_force(reports: list[None]) -> None:
    layer, x = nn.Conv2d(16, 32, 3).requires_grad_(False), torch.randn(2, 16, 17, 19)
    held = [x, *layer.parameters()]
    assert_equals_the_allocators(lambda: layer(x), held)
    with torch.backends.mkldnn.flags(enabled=False):
        assert_equals_the_allocators(lambda: layer(x), held)
    assert_equals_the_allocators(lambda: layer(x), held)
    assert len(reports) == 2


def test_lazily_negated_input_is_computed_before_the_kernel_runs(reports: list[None]) -> None:
    layer, x = nn.Conv2d(16, 32, 3).requires_grad_(False), torch.randn(2, 16, 17, 19)
    negated = torch._neg_view(x)
    held = [x, *layer.parameters()]
    assert_equals_the_allocators(lambda: layer(x), held)
    assert_equals_the_allocators(lambda: layer(negated), held)
    assert len(reports) == 1 + 1  # of what computes it, too


def test_workspaces_that_are_remembered_are_bounded(
    reports: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_allocations, "_LIMIT", 3)
    layer = nn.Conv1d(2, 3, 1)
    for length in range(5, 5 + 7):
        memory_of(lambda length=length: layer(torch.ones(1, 2, length)))
    found = [sizes for one in kernel_allocations._known.values() for sizes in one.values()]
    (sizes,) = (sizes for sizes in found if sizes)
    assert len(sizes) == 7 - 2 * 3


def test_most_over_what_remains_is_the_workspace() -> None:
    width = 101

    def call(x: torch.Tensor) -> torch.Tensor:
        first = torch.empty(3 * width)
        second = torch.empty(2 * width)
        del first
        result = torch.empty(width)
        del second
        return result

    assert workspace_after(torch.ones(1), call) == (3 + 2 - 1) * width * 4


@pytest.mark.parametrize(
    ("is_steady", "numbers", "keywords"),
    [
        (True, BY_TYPE, ()),  # the number does not decide the cost
        (True, BY_VALUE, ("rows",)),
        (False, BY_VALUE, ()),
    ],
)
def test_workspace_of_calls_that_cost_the_same_may_vary(
    is_steady: bool, numbers: NumberKeys, keywords: tuple[str, ...]
) -> None:
    def call(x: torch.Tensor, rows: int) -> torch.Tensor:
        torch.empty(rows, 101)
        return x

    known = KnownCall(cost=CallCost("op", "free"))
    rule = WorkspaceRule(REPORTED.formula, is_steady=is_steady)
    ReportedOperator(OPERATOR, call, rule).prepare(known, numbers)
    for rows in (3, 5, 3, 7):
        assert known.run is not None
        known.run(torch.ones(1), *(() if keywords else (rows,)), **dict.fromkeys(keywords, rows))
        assert last_kernel.take() == rows * 101 * 4


@pytest.mark.parametrize(
    ("released", "expected"),
    [
        (300 + 700, 300 + 700),  # both at once: what was asked for
        (300 + 700 + 900, 512 + 1024),  # others before them: in the allocator's blocks
        (0, 512 + 1024),  # their release is pending
    ],
)
def test_workspace_on_cuda_is_no_more_than_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, released: int, expected: int
) -> None:
    blocks = [2048, 512, 1024, -512, -1024]  # the first one is the result
    so_far = iter([40_000, 40_000 + released])
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(kernel_allocations, "_reporting_device", lambda values: cuda)
    monkeypatch.setattr(_torch, "start_reporting_allocations", lambda: None)
    monkeypatch.setattr(_torch, "stop_reporting_allocations", lambda: ([7], blocks))
    monkeypatch.setattr(_torch, "released_on_cuda", lambda device: next(so_far))
    assert workspace_after(torch.ones(3)) == expected


def test_workspace_of_a_copy_to_cuda_is_that_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = iter((torch.device("cpu"), torch.device("cuda", 0)))  # before and after it
    monkeypatch.setattr(kernel_allocations, "_reporting_device", lambda values: next(devices))
    monkeypatch.setattr(_torch, "start_reporting_allocations", lambda: None)
    monkeypatch.setattr(_torch, "stop_reporting_allocations", lambda: ([7, -7], [11, 13, -13]))
    assert workspace_after(torch.ones(3)) == 13


def workspace_after(x: torch.Tensor, call: Callable[..., Any] = torch.exp) -> int | None:
    last_kernel.workspace = None
    ReportedOperator(OPERATOR, call, REPORTED).run(x)
    return last_kernel.workspace


@pytest.mark.parametrize(("on_cuda", "expected"), [(False, None), (True, 0)])
def test_kernel_whose_formula_knows_all_is_asked_on_cuda_alone(
    monkeypatch: pytest.MonkeyPatch, on_cuda: bool, expected: int | None
) -> None:
    """On the CPU it has no workspace, nor that of the kernel before it."""
    monkeypatch.setattr(kernel_allocations, "is_on_cuda", lambda args: on_cuda)
    rule = WorkspaceRule(REPORTED.formula, may_be_unknown=lambda args: False)
    last_kernel.workspace = 7
    ReportedOperator(OPERATOR, torch.exp, rule).run(torch.ones(3))
    assert last_kernel.workspace == expected


STEADY = WorkspaceRule(REPORTED.formula, is_steady=True)


@pytest.mark.parametrize("is_known", [False, True])
def test_allocator_reports_each_call_under_settings_that_cannot_be_read(
    reports: list[None], monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    monkeypatch.setattr(kernel_allocations, "settings_reader", lambda *, on_cuda: lambda: None)
    sizes = iter((3, 5))
    operator = ReportedOperator(OPERATOR, lambda x: torch.empty(next(sizes)) is None, STEADY)
    known = KnownCall(cost=CallCost("op", "free"), run=operator.run)
    if is_known:
        operator.prepare(known, BY_VALUE)
    for size in (3, 5):
        assert known.run is not None
        known.run(torch.ones(1))
        assert last_kernel.take() == size * 4


def test_allocator_reports_each_call_with_an_argument_of_unknown_kind(reports: list[None]) -> None:
    operator = ReportedOperator(OPERATOR, lambda x, rows: torch.empty(*rows) is None, STEADY)
    for rows in (3, 5):
        operator.run(torch.ones(1), (rows,))
        assert last_kernel.take() == rows * 4


A, B, C = (torch.ones(7) for _ in range(3))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((A,), (torch.ones(11),)),
        (([A, B], [C]), ([A], [B, C])),
    ],
    ids=["shapes", "lists"],
)
def test_allocator_reports_calls_whose_arguments_differ(
    reports: list[None], first: Any, second: Any
) -> None:
    sizes = iter((3, 5))
    operator = ReportedOperator(OPERATOR, lambda *_: torch.empty(next(sizes)) is None, STEADY)
    for args, size in ((first, 3), (second, 5)):
        operator.run(*args)
        assert last_kernel.take() == size * 4


def test_call_that_begins_with_an_empty_list_is_not_on_cuda() -> None:
    assert not kernel_allocations.is_on_cuda(([], A))


def test_workspace_is_not_known_where_nothing_is_computed_on_the_cpu() -> None:
    assert workspace_after(torch.ones(3)) == 0
    assert workspace_after(torch.ones(3, device="meta")) is None
    with FakeTensorMode():
        assert workspace_after(torch.ones(3)) is None
    assert workspace_after(torch.ones(3), lambda x: x.to("meta")) is None


def test_kernel_that_raises_ends_the_reports() -> None:
    def fail(x: torch.Tensor) -> None:
        raise KeyError("in the kernel")

    with pytest.raises(KeyError):
        workspace_after(torch.ones(3), fail)
    assert last_kernel.workspace is None
    assert not _torch.is_profiling()


def test_profiler_of_the_program_goes_first() -> None:
    def step() -> None:
        SIGNAL.sort(dim=0)

    with (
        FlopCounterMode(display=False, memory=True) as counter,
        torch.profiler.profile(profile_memory=True) as profiler,
    ):
        step()
    memory = counter.profile.memory
    assert memory is not None and memory.unseen == ("aten.sort.default",)
    assert "aten::sort" in {event.name for event in profiler.events()}


def test_allocator_is_asked_once_the_profiler_of_the_program_is_off(reports: list[None]) -> None:
    layer, x = nn.Conv2d(16, 32, 3).requires_grad_(False), torch.randn(2, 16, 17, 19)
    with torch.profiler.profile(profile_memory=True):
        assert memory_of(lambda: layer(x)).is_lower_bound
    assert_equals_the_allocators(lambda: layer(x), x, *layer.parameters())


def test_meta_device_lists_kernels_whose_workspace_is_not_known() -> None:
    layer = nn.Conv2d(3, 5, 3, device="meta")
    x = torch.ones(2, 3, 7, 11, device="meta")
    memory = memory_of(lambda: layer(x).sum().backward(), x, *layer.parameters())
    assert memory.is_lower_bound
    assert memory.unseen == ("aten.convolution.default", "aten.convolution_backward.default")


def test_workspace_of_a_part_is_not_that_of_the_operator_around_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sum casts its operand of 4 bytes to 8; the operator around it makes three times as much."""
    monkeypatch.setattr(workspaces, "_WORKSPACES", dict(workspaces._WORKSPACES))
    library = torch.library.Library("around", "DEF")
    library.define("sum_and_copies(Tensor x, Tensor y) -> (Tensor, Tensor)")

    def sum_and_copies(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.add(x, y)
        return found, found.repeat(3)

    library.impl("sum_and_copies", sum_and_copies, "CompositeImplicitAutograd")
    register_workspace("around::sum_and_copies")(lambda *args, **kwargs: None)
    with torch.inference_mode():
        x, y = torch.ones(101), torch.ones(101, dtype=torch.float64)
        for _ in range(2):
            with FlopCounterMode(display=False, memory=True) as counter:
                torch.ops.around.sum_and_copies(x, y)
            assert counter.profile.memory is not None
            assert counter.profile.memory.peak_bytes == 101 * (4 + 8 + 8 + 3 * 8)
