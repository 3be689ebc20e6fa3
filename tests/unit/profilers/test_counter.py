"""``FlopCounterMode``'s contract: what torch's counter gives, and what this one adds."""

from __future__ import annotations

import copy
import gc
import io
import re
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import flop_counter as theirs

import dispatch_flops
from dispatch_flops import FlopCounterMode, OpCost, Profile, Share, Split
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.errors import (
    ConfigError,
    NotProfiledError,
    TargetError,
    UncountedOpsError,
    UncountedWarning,
    UnknownOperatorError,
)
from dispatch_flops.renderers import View, overview
from dispatch_flops.timing.devices import Devices
from tests.helpers.attributing import plain, rows, train
from tests.helpers.profiling import profile_of

aten = torch.ops.aten


# -- what torch's counter gives ----------------------------------------------------------------


class Attention(nn.Module):
    """Products alone: projections, scores, values; no bias, no fused kernel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(q @ k.transpose(-1, -2) @ v)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "layers": lambda: (plain(3, 5, 7), rows(2, 3)),
    "input gradient": lambda: (plain(3, 5, 7), rows(2, 3, grad=True)),
    "nested": lambda: (nn.Sequential(plain(3, 5), plain(5, 7)), rows(2, 3)),
    "convolution": lambda: (
        nn.Sequential(nn.Conv2d(3, 5, (2, 3), bias=False), nn.Conv2d(5, 7, 1, bias=False)),
        torch.randn(2, 3, 7, 11),
    ),
    "attention": lambda: (Attention(6), torch.randn(2, 5, 6)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("given", [True, False], ids=["model given", "not given"])
def test_flop_counts_of_products_equal_torchs(name: str, given: bool) -> None:
    """On products alone: same keys, same values, forward and backward."""

    def products(counts: dict[str, dict[Any, int]]) -> dict[str, dict[Any, int]]:
        counted = theirs.flop_registry
        return {m: {op: n for op, n in of.items() if op in counted} for m, of in counts.items()}

    model, x = MODELS[name]()
    mods = model if given else None
    with theirs.FlopCounterMode(display=False) as torchs:
        train(model, x)
    model.zero_grad()
    with FlopCounterMode(mods, display=False) as ours:
        train(model, x)
    expected = {m: dict(of) for m, of in torchs.get_flop_counts().items() if of}
    found = {m: of for m, of in products(ours.get_flop_counts()).items() if of}
    assert found == expected


def test_flop_counts_include_sums() -> None:
    model = nn.Linear(3, 5)
    with FlopCounterMode(model, display=False) as counter:
        model(rows(2, 3)).sum()
    linear = 2 * 2 * 3 * 5 + 2 * 5
    assert counter.get_flop_counts() == {
        "Global": {aten.addmm: linear, aten.sum: 2 * 5 - 1},
        "Linear": {aten.addmm: linear},
    }
    assert counter.get_total_flops() == linear + 2 * 5 - 1
    assert counter.get_total_macs() == 2 * 3 * 5


def test_counter_accepts_the_signature_of_torchs_counter() -> None:
    """Changing the import is all that a user of torch's counter has to do."""
    counter = FlopCounterMode(None, 3, False, {aten.mm: lambda a, b, **_: 1})
    with counter as entered:
        plain(3, 5)(rows(2, 3))
    assert entered is counter
    assert (counter.depth, counter.display, counter.get_total_flops()) == (3, False, 1)


def test_table_with_depth_ends_at_that_depth() -> None:
    model = nn.Sequential(nn.Sequential(plain(3, 5)))
    with FlopCounterMode(model, depth=2, display=False) as counter:
        model(rows(2, 3))
    lines = {depth: counter.get_table(depth).count("\n") for depth in (1, 2, 3, 4)}
    assert lines[1] < lines[2] < lines[3] < lines[4]
    assert counter.get_table() == counter.get_table(2)
    assert counter.get_table(99) == counter.get_table(4)
    assert counter.get_table(0) == counter.get_table(1)


def test_counter_with_display_prints_the_profile_at_exit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = plain(3, 5)
    with FlopCounterMode(model, depth=0) as counter:
        model(rows(2, 3))
    assert capsys.readouterr().out == overview.render(counter.profile, View(depth=0)) + "\n"


def test_bars_that_stdout_cannot_encode_do_not_end_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", stdout)
    model = plain(3, 5)
    with FlopCounterMode(model) as counter:
        model(rows(2, 3))
    stdout.flush()
    printed = stdout.buffer.getvalue().decode("cp1252")  # type: ignore[attr-defined]
    assert printed == overview.render(counter.profile).replace("█", "?") + "\n"


# -- results -----------------------------------------------------------------------------------


def test_counter_before_its_block_raises_not_profiled() -> None:
    counter = FlopCounterMode(display=False)
    for ask in (lambda: counter.profile, counter.get_total_flops, counter.get_table,
                counter.get_flop_counts, counter.in_thread().__enter__):  # fmt: skip
        with pytest.raises(NotProfiledError, match="block"):
            ask()


def test_profile_stays_after_the_block_and_starts_anew_in_the_next() -> None:
    model = plain(3, 5)
    with FlopCounterMode(model, display=False) as counter:
        model(rows(2, 3))
    first = counter.profile
    assert counter.profile is first
    with counter:
        assert counter.get_total_macs() == 0
        model(rows(7, 3))
    assert (first.total().macs, counter.profile.total().macs) == (2 * 3 * 5, 7 * 3 * 5)


def test_profile_after_an_exception_has_what_ran_before_it() -> None:
    model = plain(3, 5)
    counter = FlopCounterMode(model, display=False)
    with pytest.raises(ValueError, match="no"), counter:
        model(rows(2, 3))
        raise ValueError("no")
    assert counter.get_total_macs() == 2 * 3 * 5


@pytest.mark.parametrize("mods", [nn.Linear, [nn.Identity(), nn.Linear], {"G": nn.Linear}])
def test_class_of_a_model_is_told_from_an_instance(mods: Any) -> None:
    with pytest.raises(TargetError, match="mods holds the class Linear; pass an instance of it"):
        FlopCounterMode(mods, display=False)


@pytest.mark.parametrize("mods", [3, "model", [nn.Identity(), 3], int])
def test_mods_that_are_not_modules_raise_target_error(mods: Any) -> None:
    with pytest.raises(TargetError):
        FlopCounterMode(mods, display=False)


def test_run_info_states_device_convention_and_version() -> None:
    scope = profile_of(plain(3, 5), rows(2, 3), causal="half").run
    assert (scope.device, scope.causal, scope.torch_version) == ("cpu", "half", torch.__version__)


# -- formulas of the user ---------------------------------------------------------------------


@torch.library.custom_op("dispatch_flops_test::unpriced", mutates_args=())
def unpriced(x: Tensor) -> Tensor:
    return x * 3


@torch.library.custom_op("dispatch_flops_test::priced", mutates_args=())
def priced(x: Tensor, times: int = 1) -> Tensor:
    return x * times


def mapped(mapping: dict[Any, Any], fn: Callable[[], Any]) -> Profile:
    return profile_of(fn, custom_mapping=mapping)


@pytest.mark.parametrize(
    "key", [priced, torch.ops.dispatch_flops_test.priced,
            torch.ops.dispatch_flops_test.priced.default], ids=["def", "packet", "overload"],
)  # fmt: skip
def test_custom_mapping_calls_the_formula_with_arguments_and_out(key: Any) -> None:
    """Positional arguments arrive by position, the others by name, and the result as ``out``."""

    def formula(x: Tensor, times: int = 1, *, out: Tensor, **_: Any) -> OpCost:
        assert out.shape == x.shape
        return OpCost(macs=x.numel(), flops=2 * x.numel() * times)

    x = rows(2, 3)
    profile = mapped({key: formula}, lambda: priced(x, 5))
    assert profile.total().macs == 2 * 3
    assert profile.total().flops == 2 * 2 * 3 * 5
    assert list(profile.by_operator()) == ["dispatch_flops_test.priced.default"]


def test_formula_that_returns_an_int_means_flops() -> None:
    profile = mapped({priced: lambda x, times=1, **_: 7}, lambda: priced(rows(2, 3)))
    assert (profile.total().macs, profile.total().flops) == (0, 7)


def test_formula_that_returns_a_split_assigns_children_and_phases() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return priced(x)

    def formula(x: Tensor, times: int = 1, **_: Any) -> Split:
        return Split(
            own=OpCost(flops=1),
            shares=(
                Share(cost=OpCost(flops=10), child="inner"),
                Share(cost=OpCost(flops=100), child="absent"),
                Share(cost=OpCost(flops=1000), phase="recompute"),
            ),
        )

    model = Fused()
    profile = profile_of(model, rows(2, 3), model=model, custom_mapping={priced: formula})
    assert profile.node("inner").own("forward").flops == 10
    assert profile.root.own("forward").flops == 101
    assert profile.root.own("recompute").flops == 1000
    assert profile.by_operator()["dispatch_flops_test.priced.default"].calls == 1


def test_custom_mapping_of_an_overload_wins_over_the_packet() -> None:
    mapping = {aten.add: lambda *a, **k: 1, aten.add.Scalar: lambda *a, **k: 10}
    x = rows(2, 3)
    profile = mapped(mapping, lambda: (torch.add(x, x), aten.add.Scalar(x, 2)))
    assert profile.total().flops == 11


def test_composite_operator_with_a_formula_is_not_decomposed() -> None:
    """Under inference_mode ``linear`` arrives whole; torch's counter never asks for its formula."""

    def call() -> None:
        with torch.inference_mode():
            nn.functional.linear(rows(2, 3), rows(5, 3))

    assert mapped({aten.linear: lambda *a, **k: 7}, call).total().flops == 7
    assert profile_of(call).total().flops == 2 * 2 * 3 * 5


def test_custom_mapping_accepts_formulas_of_torchs_counter() -> None:
    @theirs.register_flop_formula(torch.ops.dispatch_flops_test.unpriced)
    def by_shape(x_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return int(x_shape[0] * out_shape[1])

    def undecorated(x_shape: Any, *args: Any, out_shape: Any, **kwargs: Any) -> int:
        return int(100 * x_shape[0] * out_shape[1])

    def raw(x: Tensor, *args: Any, out_val: Any, **kwargs: Any) -> int:
        return x.numel() + out_val.numel()

    raw._get_raw = True  # type: ignore[attr-defined]

    def call() -> Tensor:
        return unpriced(rows(2, 3))

    try:
        assert profile_of(call).total().flops == 2 * 3
        assert mapped({unpriced: by_shape}, call).total().flops == 2 * 3
        assert mapped({unpriced: undecorated}, call).total().flops == 100 * 2 * 3
        assert mapped({unpriced: raw}, call).total().flops == 2 * 3 + 2 * 3
    finally:
        theirs.flop_registry.pop(torch.ops.dispatch_flops_test.unpriced)


def test_custom_mapping_of_a_function_raises_unknown_operator() -> None:
    with pytest.raises(UnknownOperatorError, match="custom_mapping: .* is not an operator"):
        FlopCounterMode(custom_mapping={len: lambda *a, **k: 1}, display=False)


# -- uncounted operators -----------------------------------------------------------------


def test_uncounted_operator_warns_once_and_marks_totals_as_lower_bounds() -> None:
    model = nn.Sequential(nn.Linear(3, 5, bias=False))

    def call() -> None:
        for _ in range(3):
            unpriced(model(rows(2, 3)))

    with pytest.warns(UncountedWarning) as caught:
        profile = profile_of(call, model=model)
    (warning,) = caught
    assert "dispatch_flops_test.unpriced.default (3 calls)" in str(warning.message)
    assert "register_flops" in str(warning.message)
    assert profile.uncounted_ops() == {"dispatch_flops_test.unpriced.default": 3}
    assert (profile.is_lower_bound, profile.root.is_lower_bound) == (True, False)
    assert profile.total().macs == 3 * 2 * 3 * 5


def test_strict_with_an_uncounted_operator_raises_at_exit_and_keeps_the_profile() -> None:
    counter = FlopCounterMode(display=False, strict=True)
    with (
        pytest.warns(UncountedWarning),
        pytest.raises(UncountedOpsError, match=r"unpriced\.default"),
        counter,
    ):
        unpriced(rows(2, 3))
    assert counter.profile.uncounted_ops() == {"dispatch_flops_test.unpriced.default": 1}


def test_strict_after_an_exception_raises_that_one() -> None:
    with (
        pytest.warns(UncountedWarning),
        pytest.raises(ValueError, match="mine"),
        FlopCounterMode(display=False, strict=True),
    ):
        unpriced(rows(2, 3))
        raise ValueError("mine")


def test_strict_without_uncounted_operators_does_not_raise() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.LayerNorm(5))
    with FlopCounterMode(model, display=False, strict=True):
        train(model, rows(2, 3))


def test_annotations_for_a_profiler_are_not_operators_of_the_profile() -> None:
    """An optimizer's step is such a range, too."""
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters())
    with FlopCounterMode(model, display=False) as counter:
        with torch.profiler.record_function("loss"):
            model(torch.ones(5, 2)).sum().backward()
        optimizer.step()
    names = {op.op for op in counter.profile.op_totals()}
    assert "aten.addmm.default" in names
    assert not any(name.startswith("profiler.") for name in names)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (ZeroDivisionError("oh"), "ZeroDivisionError: oh"),
        (None, "returned None"),
        (1.5, "returned 1.5"),
        (True, "returned True"),
        ("many", "returned 'many'"),
        (-1, "at least 0"),
        (OpCost(flops=-1), "at least 0"),
        (OpCost(flops=1.5), "ints"),  # type: ignore[arg-type]
        (Split(own=OpCost(), shares=(Share(cost=OpCost(macs=-3)),)), "at least 0"),
        (OpCost(macs=10), "return OpCost(macs=10, flops=20) if there are no others"),
        (OpCost(macs=10, flops=3), "return OpCost(macs=10, flops=23) if 3 are others"),
        (Split(shares=(Share(cost=OpCost(macs=3)),)), "return OpCost(macs=3, flops=6)"),
        (Split(shares=(Share(cost=3),)), "return Share(cost=OpCost(...))"),  # type: ignore[arg-type]
        (Split(shares=(3,)), "returned 3 as a share"),  # type: ignore[arg-type]
        (Split(shares=(Share(cost=OpCost(), phase="all"),)), "a Share of the phase 'all', which"),  # type: ignore[arg-type]
        (Split(shares=(Share(cost=OpCost(), phase=""),)), "a Share of the phase '', which"),  # type: ignore[arg-type]
        (Split(shares=(Share(cost=OpCost(), phase=3),)), "a Share of the phase 3, which"),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_formula_without_a_cost_is_recorded_and_the_program_continues(
    answer: Any, says: str
) -> None:
    def formula(*args: Any, **kwargs: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    def call() -> None:
        out = priced(priced(rows(2, 3)))
        assert out.shape == (2, 3)

    with pytest.warns(UncountedWarning, match=re.escape("priced.default (2 calls")) as caught:
        profile = mapped({priced: formula}, call)
    assert len(caught) == 1
    assert "Mend the formula of dispatch_flops_test.priced" in str(caught[0].message)
    assert "register_flops" not in str(caught[0].message)
    (error,) = profile.formula_errors().values()
    assert says in error
    assert profile.uncounted_ops() == {"dispatch_flops_test.priced.default": 2}
    assert profile.total().flops == 0


@pytest.mark.parametrize(
    "answer",
    [np.int64(42), OpCost(macs=np.int32(7), flops=np.int64(42))],  # type: ignore[arg-type]
    ids=["FLOPs", "OpCost"],
)
def test_formula_that_returns_integers_of_numpy_is_counted_in_ints(answer: Any) -> None:
    total = mapped({priced: lambda *_, **__: answer}, lambda: priced(rows(2, 3))).total()
    assert total.flops == 42
    assert {type(total.flops), type(total.macs)} == {int}


def test_formula_of_integers_may_return_macs_without_flops() -> None:
    def call() -> None:
        priced(torch.ones(2, 3, dtype=torch.int8))

    assert mapped({priced: lambda *_, **__: OpCost(macs=6)}, call).total().macs == 6


def test_warning_of_a_broken_formula_and_a_missing_one_says_what_to_do_of_each() -> None:
    def call() -> None:
        unpriced(priced(rows(2, 3)))

    with pytest.warns(UncountedWarning) as caught:
        mapped({priced: lambda *_, **__: None}, call)
    assert "Give each a formula" in str(caught[0].message)
    assert "Mend the formula of dispatch_flops_test.priced.default" in str(caught[0].message)


def test_formula_that_reads_data_is_recorded_and_the_program_continues() -> None:
    with pytest.warns(UncountedWarning):
        profile = mapped({priced: lambda x, **_: -len(x.tolist())}, lambda: priced(rows(2, 3)))
    assert profile.uncounted_ops() == {"dispatch_flops_test.priced.default": 1}


def test_formula_that_is_not_cacheable_is_called_every_time() -> None:
    """``cacheable=False`` asks the formula at every call; else once per signature."""
    asked: list[int] = []

    def formula(x: Tensor, times: int = 1, **_: Any) -> int:
        asked.append(times)
        return times

    def call() -> None:
        for times in (1, 2, 2, 2):
            priced(rows(2, 3), times)

    for cacheable, expected in ((True, [1, 2]), (False, [1, 2, 2, 2])):
        asked.clear()
        dispatch_flops.register_flops(priced, cacheable=cacheable)(formula)
        try:
            assert profile_of(call).total().flops == 1 + 2 + 2 + 2
        finally:
            dispatch_flops.unregister_flops(priced)
        assert asked == expected


def test_counter_with_many_signatures_loses_no_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """More shapes than are kept: the counts are the same, in forward and in backward."""
    monkeypatch.setattr("dispatch_flops.counting.dispatch_mode._LIMIT", 7)
    model = plain(3, 5)

    def call() -> None:
        for n in range(1, 30):
            train(model, rows(n, 3))

    profile = profile_of(call, model=model)
    assert profile.node("0").total("forward").macs == sum(range(1, 30)) * 3 * 5
    assert profile.node("0").total("backward").macs == sum(range(1, 30)) * 3 * 5


def test_code_without_a_model_is_said_to_have_none(capsys: pytest.CaptureFixture[str]) -> None:
    with FlopCounterMode() as counter:
        torch.ones(3, 5) @ torch.ones(5, 7)
    assert counter.profile.uncalled_modules() == []
    printed = capsys.readouterr().out
    assert printed.startswith("no model: 0 parameters, 105 MACs, 210 FLOPs")  # 3 x 5 x 7
    assert "Took no part in the run" not in printed


def test_counter_while_paused_counts_nothing() -> None:
    model = plain(3, 5)
    with FlopCounterMode(model, display=False) as counter:
        out = model(rows(2, 3))
        counter.pause()
        counter.pause()
        model(rows(7, 3))
        assert counter.get_total_macs() == 2 * 3 * 5
        counter.resume()
        counter.resume()
        out.sum().backward()
        counter.pause()
    profile = counter.profile
    assert profile.root.total("forward").macs == 2 * 3 * 5
    assert profile.root.total("backward").macs == 2 * 3 * 5
    assert profile.root.calls == 1
    for change in (counter.pause, counter.resume):
        with pytest.raises(NotProfiledError):
            change()


def test_model_that_was_deleted_is_in_the_profile() -> None:
    def train() -> None:
        model = nn.Sequential(nn.Linear(3, 5), nn.ReLU())
        model(rows(2, 3))

    with FlopCounterMode(display=False) as counter:
        train()
    root = counter.profile.root
    assert root.total_params == 3 * 5 + 5
    assert [node.class_name for node in root.walk()] == ["Sequential", "Linear", "ReLU"]


def test_model_without_submodules_that_was_deleted_is_not_kept_alive() -> None:
    model = nn.Linear(3, 5)
    alive = weakref.ref(model)
    with FlopCounterMode(display=False) as counter:
        model(rows(2, 3))
        del model
        gc.collect()
        assert alive() is None
    assert counter.get_total_macs() == 2 * 3 * 5


@pytest.mark.parametrize("memory", [False, True])
def test_nothing_is_told_of_the_release_of_modules_and_optimizers_after_the_block(
    memory: bool,
) -> None:
    """Garbage that the collector finds during their release must not be told of it: see ``end``."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 5))
    optimizer = torch.optim.SGD(model.parameters())

    def told_of(released: Any) -> list[Any]:
        return [c for ref in weakref.getweakrefs(released) if (c := ref.__callback__) is not None]

    before = [told_of(one) for one in (optimizer, *model.modules())]  # torch._dynamo, for one
    with FlopCounterMode(display=False, memory=memory) as counter:
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    assert [told_of(one) for one in (optimizer, *model.modules())] == before
    assert counter.profile.node("0").calls == 3


def test_compiled_module_that_was_deleted_is_in_the_profile() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.compiled = torch.compile(nn.Linear(3, 5), backend="eager")
            self.linear = nn.Linear(5, 7)
            self.list = nn.Sequential(self.linear)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.compiled(x)
            return self.linear(y) + self.list(y)  # type: ignore[no-any-return]

    with FlopCounterMode(display=False) as counter:
        Model()(rows(2, 3))
        gc.collect()
    nodes = {node.fqn: node for node in counter.profile.root.walk()}
    assert {fqn: node.class_name for fqn, node in nodes.items()} == {
        "": "Model", "compiled": "Linear", "linear": "Linear", "list": "Sequential",
        "list.0": "Linear",
    }  # fmt: skip
    assert counter.profile.total_params == 3 * 5 + 5 + 5 * 7 + 7


@pytest.mark.parametrize("latency", [False, True])
def test_counter_paused_within_a_forward_attributes_later_code_correctly(latency: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    counter = FlopCounterMode(model, display=False, latency=latency)
    handle = model[0].register_forward_hook(lambda *_: counter.pause())
    with counter:
        model(torch.ones(2, 3))
        handle.remove()
        counter.resume()
        torch.mm(torch.ones(11, 13), torch.ones(13, 17))
        model(torch.ones(2, 3))
    profile = counter.profile
    assert profile.outside.own("forward").macs == 11 * 13 * 17
    assert profile.node("0").total("forward").macs == 2 * 2 * 3 * 5
    assert profile.node("1").total("forward").macs == 2 * 5 * 7
    assert profile.root.own("forward").macs == 0


def test_counter_resumed_within_a_forward_continues_in_that_module() -> None:
    class Pausing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            counter.pause()
            x = self.layer(x)
            counter.resume()
            return torch.mm(x, torch.ones(5, 7))

    model = Pausing()
    with FlopCounterMode(model, display=False) as counter:
        model(torch.ones(2, 3))
    assert counter.profile.root.own("forward").macs == 2 * 5 * 7
    assert counter.profile.total().macs == 2 * 5 * 7


def test_counter_left_without_entering_raises_not_profiled() -> None:
    counter = FlopCounterMode(display=False)
    with pytest.raises(NotProfiledError, match="only inside the counter's block"):
        counter.__exit__(None, None, None)


@pytest.mark.filterwarnings("error::dispatch_flops.errors.UncountedWarning")
def test_program_exception_wins_over_the_uncounted_warning() -> None:
    @torch.library.custom_op("dispatch_flops_counter::opaque", mutates_args=())
    def opaque(x: Tensor) -> Tensor:
        return x.clone()

    counter = FlopCounterMode(display=False, strict=True)
    with pytest.raises(KeyError, match="own"), counter:
        opaque(rows(2, 3))
        raise KeyError("own")
    assert counter.profile.uncounted_ops() == {"dispatch_flops_counter.opaque.default": 1}


def test_counter_without_latency_enters_without_reading_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(names: ModuleNames) -> Devices:
        raise AssertionError

    counter = FlopCounterMode(nn.Linear(3, 5), display=False)
    with monkeypatch.context() as patch:
        patch.setattr(ModuleNames, "modules", refuse)
        counter.__enter__()
    counter.__exit__(None, None, None)


def test_contractions_count_two_flops_per_mac_in_every_total_and_keep_the_bytes() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 7))
    profiles = []
    for flops in ("all", "contractions"):
        model.zero_grad()
        with FlopCounterMode(model, display=False, flops=flops) as counter:
            model(torch.ones(2, 3)).sum().backward()
        profiles.append(counter.profile)
    everything, contractions = profiles
    # Forward, both gradients of the second layer, the weight's gradient of the first.
    assert contractions.total().flops == 2 * (2 * 2 * 3 * 5 + 3 * 2 * 5 * 7)
    for node, same in zip(contractions.nodes(), everything.nodes(), strict=True):
        for phase in (None, "forward", "backward"):
            assert node.total(phase).flops == 2 * same.total(phase).macs
            assert node.total(phase).bytes_read == same.total(phase).bytes_read
            assert node.total(phase).bytes_written == same.total(phase).bytes_written
    assert (everything.run.flops, contractions.run.flops) == ("all", "contractions")
    assert not everything.notes
    assert "2 per MAC" in contractions.notes[0]
    assert Profile.from_json(contractions.to_json()) == contractions


@pytest.mark.parametrize("is_training", [False, True])
def test_contractions_cover_parts_that_belong_to_submodules_and_other_phases(
    is_training: bool,
) -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 10, batch_first=True).train(is_training)
    x = torch.ones(2, 5, 6, requires_grad=is_training)
    with (
        torch.set_grad_enabled(is_training),
        FlopCounterMode(layer, display=False, flops="contractions") as counter,
    ):
        out = layer(x)
        if is_training:
            out.sum().backward()
    assert counter.get_total_macs() > 0
    for total in counter.profile.op_totals():
        assert total.cost is None or total.cost.flops == 2 * total.cost.macs


def test_contractions_keep_flops_that_a_formula_of_the_user_returns_as_an_int() -> None:
    mapping = {torch.ops.aten.cos: lambda x, *, out: 7, torch.ops.aten.mm: _padded}
    with FlopCounterMode(display=False, flops="contractions", custom_mapping=mapping) as counter:
        torch.ones(3).cos()
        torch.ones(2, 3) @ torch.ones(3, 5)
    assert counter.get_total_flops() == 7 + 2 * 11


def _padded(*_: Any, out: Any) -> OpCost:
    return OpCost(macs=11, flops=1000)


def test_flop_counts_are_empty_before_the_first_run_and_zero_for_the_unknown() -> None:
    counter = FlopCounterMode(display=False)
    assert counter.flop_counts["Global"] == {}
    with counter:
        torch.ones(2, 3) @ torch.ones(3, 5)
        assert counter.flop_counts["Global"][torch.ops.aten.mm] == 2 * 2 * 3 * 5
    assert counter.flop_counts["Global"][torch.ops.aten.bmm] == 0
    assert counter.flop_counts["nowhere"] == {}


def test_names_do_not_begin_with_the_root_that_holds_several_models() -> None:
    model, criterion = nn.Sequential(nn.Linear(3, 5)), nn.MSELoss()
    with FlopCounterMode(display=False) as counter:
        criterion(model(torch.ones(2, 3)), torch.ones(2, 5))
    assert set(counter.get_flop_counts()) == {
        "Global", "Sequential", "Sequential.0", "MSELoss",
    }  # fmt: skip
    assert "models." not in counter.get_table()
    assert " Sequential.0 " in counter.get_table(3)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.only(x)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copy_inside_the_block_is_a_counter_that_is_not_active(copied: Any) -> None:
    model = _Model()
    counter = FlopCounterMode(model, display=False)
    with counter:
        model(torch.ones(2, 3))
        other = copied(counter)
        model(torch.ones(2, 3))
    assert other.get_total_macs() == 2 * 3 * 5
    assert counter.get_total_macs() == 2 * 2 * 3 * 5
    with other:
        model(torch.ones(7, 3))
    assert other.get_total_macs() == 7 * 3 * 5
    assert counter.get_total_macs() == 2 * 2 * 3 * 5


def test_copy_that_is_lost_inside_its_block_leaves_nothing_behind() -> None:
    other = copy.deepcopy(FlopCounterMode(display=False))
    other.__enter__()
    del other
    gc.collect()
    assert not nn.modules.module._global_forward_hooks


def test_single_named_model_keeps_its_name() -> None:
    with FlopCounterMode({"G": nn.Sequential(nn.Linear(3, 5))}, display=False) as counter:
        counter_input = torch.ones(2, 3)
        counter._roots["G"](counter_input)  # type: ignore[call-overload]
    assert list(counter.profile.by_module()) == ["", "G", "G.0"]


@pytest.mark.parametrize("name", ["", "a.b", "<outside>", 3])
def test_name_of_a_model_that_cannot_begin_an_fqn_is_refused(name: Any) -> None:
    with pytest.raises(TargetError, match="without dots"):
        FlopCounterMode({name: nn.Linear(3, 5)})


def test_one_module_under_two_names_is_refused() -> None:
    model = nn.Linear(3, 5)
    with pytest.raises(TargetError, match="twice, 'G' and 'D'"):
        FlopCounterMode({"G": model, "D": model})


def test_running_module_that_is_none_is_refused() -> None:
    with (
        FlopCounterMode(display=False) as counter,
        pytest.raises(TargetError, match="module is of type str; pass an nn.Module"),
    ):
        counter.note_running("model")  # type: ignore[arg-type]


def test_table_of_no_number_of_levels_is_refused() -> None:
    with FlopCounterMode(display=False) as counter:
        pass
    with pytest.raises(ConfigError, match="depth='2': pass an int of at least 0"):
        counter.get_table("2")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"causal": "quarter"}, "quarter"),
        ({"flops": "matmuls"}, '"all" or "contractions"'),
        ({"mesh": "dp"}, "mesh is of type str; pass a DeviceMesh or None"),
        *(
            (
                {"optimizers": none},
                f"optimizers is of type {kind}; pass a list of them, as .opt",
            )
            for none, kind in (
                (5, "int"),
                (None, "NoneType"),
                ("SGD", "str"),
                (torch.optim.SGD([torch.ones(1)]), "SGD"),
            )
        ),
        *(
            ({"optimizers": [none]}, f"optimizers holds an object of type {kind}; pass a list of")
            for none, kind in ((None, "NoneType"), (nn.Linear(3, 5), "Linear"))
        ),
        *(
            ({"depth": depth}, "depth=.*: pass an int of at least 0, or None")
            for depth in ("2", 2.5, -1, int, torch.ones(2))
        ),
    ],
)
def test_wrong_option_is_refused_before_the_block(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FlopCounterMode(**option)
