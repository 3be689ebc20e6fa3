"""Operators that autograd takes apart: with a formula one operator, without one their parts."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dispatch_flops import FlopCounterMode, OpCost, Profile, Share, Split, _torch, overridden
from dispatch_flops.counting import autograd_kernels
from dispatch_flops.errors import UncountedWarning
from dispatch_flops.operators import composites
from dispatch_flops.operators.registry import register_flops, unregister_flops
from tests.helpers.interrupting import interrupted_at
from tests.helpers.profiling import profile_of

aten = torch.ops.aten
FLOPS = 1009  # what the user's formula states, which no other operator costs

X = torch.ones(2, 3, 5, 5)
IMAGE, ROWS = torch.ones(2, 4, 7, 9), torch.ones(2, 3)
QUERY = torch.ones(2, 4, 3, 8)

# Operators that every torch program takes apart, called as programs call them.
COMPOSITES: dict[str, tuple[Any, Callable[[Tensor], Any], Tensor]] = {
    "linear": (aten.linear, nn.Linear(3, 5), ROWS),
    "matmul": (aten.matmul, lambda x: x @ x.mT, ROWS),
    "conv2d": (aten.conv2d, nn.Conv2d(4, 6, 3), IMAGE),
    "conv_transpose2d": (aten.conv_transpose2d, nn.ConvTranspose2d(4, 6, 3), IMAGE),
    "layer_norm": (aten.layer_norm, nn.LayerNorm(9), IMAGE),
    "group_norm": (aten.group_norm, nn.GroupNorm(2, 4), IMAGE),
    "batch_norm": (
        aten.batch_norm,
        lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4), training=True),
        IMAGE,
    ),
    "attention": (
        aten.scaled_dot_product_attention,
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        QUERY,
    ),
    "softmax": (aten.softmax, lambda x: x.softmax(1), ROWS),
    "dropout": (aten.dropout, nn.Dropout(0.5), ROWS),
    "einsum": (aten.einsum, lambda x: torch.einsum("ij,kj->ik", x, x), ROWS),
    "cross_entropy": (
        aten.cross_entropy_loss,
        lambda x: F.cross_entropy(x, torch.tensor([0, 2])),
        ROWS,
    ),
    "interpolate": (
        aten.upsample_bilinear2d,
        lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
        IMAGE,
    ),
    "interpolate to a size": (
        aten.upsample_nearest2d,
        lambda x: F.interpolate(x, size=(3, 5)),
        IMAGE,
    ),
    "max_pool2d": (aten.max_pool2d, nn.MaxPool2d(3), IMAGE),
    "bilinear": (aten.bilinear, lambda x: nn.Bilinear(3, 3, 5)(x, x), ROWS),
}
MODES: dict[str, Callable[[], Any]] = {
    "grad": torch.enable_grad,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def stated(*_: Any, out: Any, **__: Any) -> OpCost:
    return OpCost(macs=7, flops=FLOPS)


def computing(profile: Profile, phase: Any = None) -> dict[str, tuple[int, OpCost | None]]:
    """Return calls and cost of each operator that is not free."""
    ops = (op for op in profile.op_totals() if phase in (None, op.phase))
    return {op.op: (op.calls, op.cost) for op in ops if op.kind != "free"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", COMPOSITES)
def test_formula_of_a_composite_operator_is_used_and_its_parts_are_not_counted(
    name: str, mode: str
) -> None:
    packet, call, x = COMPOSITES[name]
    with MODES[mode]():
        profile = profile_of(call, x.clone(), custom_mapping={packet: stated})
    (op,) = computing(profile)
    assert op.startswith(f"aten.{packet.__name__}.")
    assert (profile.total().macs, profile.total().flops) == (7, FLOPS)
    assert profile.by_operator()[op].calls == 1


@pytest.mark.parametrize("name", COMPOSITES)
def test_backward_of_a_composite_operator_with_a_formula_is_counted_as_before(name: str) -> None:
    """Autograd runs the same operators, with the same results, in the same module."""
    packet, call, x = COMPOSITES[name]
    model = call if isinstance(call, nn.Module) else None

    def step() -> Tensor:
        torch.manual_seed(0)
        leaf = x.clone().requires_grad_()
        out = call(leaf)
        out.sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    results: list[Tensor] = []
    plain = profile_of(lambda: results.append(step()), model=model)
    ours = profile_of(lambda: results.append(step()), model=model, custom_mapping={packet: stated})
    assert torch.equal(*results)
    assert ours.total("backward").macs == plain.total("backward").macs
    own = [p.root.total("backward").macs for p in (ours, plain)]
    assert own[0] == own[1]
    assert computing(ours, "forward")[f"aten.{packet.__name__}.{overload_of(ours, packet)}"] == (
        1,
        ours.by_operator("forward")[f"aten.{packet.__name__}.{overload_of(ours, packet)}"].cost,
    )


def overload_of(profile: Profile, packet: Any) -> str:
    """Return the overload of ``packet`` that ran."""
    names = profile.by_operator("forward")
    return next(name for name in packet.overloads() if f"aten.{packet.__name__}.{name}" in names)


def test_formula_of_linear_is_recorded_in_its_module_and_phase() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 7))
    x = torch.ones(2, 3, requires_grad=True)
    with overridden({aten.linear: stated}):
        profile = profile_of(lambda: checkpoint(model, x, use_reentrant=False).sum().backward(),
                             model=model)  # fmt: skip
    # Checkpointing stops where the last layer would be computed again.
    for fqn, macs, recomputed in (("0", 2 * 3 * 5, FLOPS), ("2", 2 * 5 * 7, 0)):
        node = profile.node(fqn)
        assert node.total("forward").flops == FLOPS
        assert node.total("recompute").flops == recomputed
        assert node.total("backward").macs == 2 * macs
        assert node.active_params == node.total_params


def test_composite_operator_that_raises_is_recorded_by_the_parts_that_ran() -> None:
    def stop(tensor: Tensor) -> Tensor:
        raise ValueError("mine")

    def call() -> None:
        saving = torch.autograd.graph.saved_tensors_hooks(stop, lambda x: x)
        x = torch.ones(2, 3, requires_grad=True)
        with pytest.raises(ValueError, match="mine"), saving:
            torch.ops.aten.cross_entropy_loss(x * 1, torch.tensor([0, 2]))
        x + 1

    profile = profile_of(call, custom_mapping={aten.cross_entropy_loss: stated})
    assert "aten.cross_entropy_loss.default" not in computing(profile)
    assert computing(profile)["aten.add.Tensor"][0] == 1


def test_formula_registered_inside_the_block_is_used_from_then_on() -> None:
    layer = nn.Linear(3, 5, bias=False)
    with FlopCounterMode(layer, display=False) as counter:
        layer(ROWS)
        register_flops(aten.linear, override=True)(stated)
        try:
            layer(ROWS)
        finally:
            unregister_flops(aten.linear)
        layer(ROWS)
    assert {op: calls for op, (calls, _) in computing(counter.profile).items()} == {
        "aten.mm.default": 2,
        "aten.linear.default": 1,
    }


def test_calls_of_one_signature_ask_the_formula_once() -> None:
    asked: list[Any] = []

    def formula(*args: Any, out: Any, **_: Any) -> int:
        asked.append(args)
        return 1

    layer = nn.Linear(3, 5)
    mapping = {aten.linear: formula}
    profile = profile_of(lambda: [layer(ROWS) for _ in range(7)], custom_mapping=mapping)
    assert profile.total().flops == 7
    assert len(asked) == 1


def test_formula_of_one_counter_is_not_used_by_the_counter_around_it() -> None:
    layer = nn.Linear(3, 5, bias=False)
    with FlopCounterMode(layer, display=False) as outer:
        inner = profile_of(layer, ROWS, custom_mapping={aten.linear: stated})
    assert inner.total().flops == FLOPS
    assert outer.profile.total().flops == 2 * 2 * 3 * 5


@pytest.mark.parametrize("mapping", [{}, {aten.linear: stated}])
def test_counters_leave_no_kernel_behind(mapping: dict[Any, Any]) -> None:
    layer = nn.Linear(3, 5)
    before = torch._C._dispatch_dump("aten::linear")
    with pytest.raises(ValueError, match="mine"), FlopCounterMode(custom_mapping=mapping):
        layer(ROWS)
        raise ValueError("mine")
    assert torch._C._dispatch_dump("aten::linear") == before
    # a counter of an earlier test may have left one
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::linear", "AutogradCPU")


def test_formula_of_attention_is_used_on_the_meta_device_for_both_targets() -> None:
    packet = aten.scaled_dot_product_attention

    def step() -> None:
        q = torch.ones(2, 4, 3, 8, device="meta", requires_grad=True)
        F.scaled_dot_product_attention(q, q, q).sum().backward()

    for target in ("cpu", "cuda"):
        plain = profile_of(step, target=target)
        ours = profile_of(step, target=target, custom_mapping={packet: stated})
        assert computing(ours, "forward")["aten.scaled_dot_product_attention.default"][0] == 1
        assert ours.total("backward") == plain.total("backward")


def test_formula_of_a_composite_takes_the_seconds_of_its_parts() -> None:
    layer = nn.Linear(30, 50)
    x = torch.ones(20, 30)
    profile = profile_of(layer, x, model=layer, latency=True, custom_mapping={aten.linear: stated})
    (linear,) = [op for op in profile.op_totals() if op.op == "aten.linear.default"]
    assert linear.latency_s is not None
    assert linear.latency_s > 0


# -- operators of extensions -----------------------------------------------------------------

_NUMBERS = itertools.count()
LIBRARY = "dispatch_flops_extension"


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library(LIBRARY, "FRAGMENT") as made:
        yield made
    gc.collect()


def defined(
    library: torch.library.Library, kernel: Callable[..., Any], key: str, schema: str = "Tensor"
) -> Any:
    """Return a new operator on one tensor with this kernel alone."""
    name = f"op{next(_NUMBERS)}"
    library.define(f"{name}({schema} x) -> Tensor")
    library.impl(name, kernel, key)
    return getattr(torch.ops.dispatch_flops_extension, name)


def bypassing(x: Tensor) -> Tensor:
    """Compute as a C++ extension does: into allocated memory, unseen by the dispatcher."""
    out = torch.empty_like(x)
    out.detach().numpy()[...] = x.detach().numpy() * 3
    return out


KEYS = ["CompositeImplicitAutograd", "Autograd"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("mode", ["grad", "no grad"])
def test_extension_that_bypasses_the_dispatcher_without_a_formula_is_listed(
    library: torch.library.Library, key: str, mode: str
) -> None:
    op = defined(library, bypassing, key)
    with MODES[mode](), pytest.warns(UncountedWarning, match="bypass the dispatcher"):
        profile = profile_of(lambda: (op(ROWS), op(ROWS)))
    assert profile.uncounted_ops() == {str(op.default): 2}
    assert profile.is_lower_bound


def test_composite_extension_in_inference_mode_without_a_formula_is_listed(
    library: torch.library.Library,
) -> None:
    op = defined(library, bypassing, "CompositeImplicitAutograd")
    with torch.inference_mode(), pytest.warns(UncountedWarning, match="bypass the dispatcher"):
        profile = profile_of(op, ROWS.clone())
    assert profile.uncounted_ops() == {str(op.default): 1}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("mode", ["grad", "no grad"])
def test_extension_that_bypasses_the_dispatcher_with_a_formula_is_counted(
    library: torch.library.Library, key: str, mode: str
) -> None:
    op = defined(library, bypassing, key)
    with MODES[mode]():
        profile = profile_of(op, ROWS, custom_mapping={op: stated})
    assert computing(profile) == {str(op.default): (1, profile.total())}
    assert profile.total().flops == FLOPS


@pytest.mark.parametrize("key", KEYS)
def test_extension_of_visible_operators_is_counted_by_its_parts(
    library: torch.library.Library, key: str
) -> None:
    op = defined(library, lambda x: x @ x.mT, key)
    profile = profile_of(op, ROWS)
    assert not profile.uncounted_ops()
    assert profile.total().macs == 2 * 2 * 3


@pytest.mark.parametrize("key", KEYS)
def test_extension_that_returns_a_view_is_not_listed(
    library: torch.library.Library, key: str
) -> None:
    name = f"view{next(_NUMBERS)}"
    library.define(f"{name}(Tensor(a) x) -> Tensor(a)")
    library.impl(name, lambda x: x.view(-1), key)
    assert not profile_of(getattr(torch.ops.dispatch_flops_extension, name), ROWS).uncounted_ops()


def test_extension_that_writes_in_place_without_a_formula_is_listed(
    library: torch.library.Library,
) -> None:
    def write(x: Tensor) -> None:
        x.detach().numpy()[...] *= 3

    library.define("write_(Tensor(a!) x) -> ()")
    library.impl("write_", write, "CompositeImplicitAutograd")
    with pytest.warns(UncountedWarning, match="write_"):
        profile_of(torch.ops.dispatch_flops_extension.write_, ROWS.clone())


def test_kernels_of_a_counter_do_not_have_operators_listed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FlopCounterMode(display=False, custom_mapping={aten.linear: stated}):
        pass
    monkeypatch.setattr(_torch, "all_operator_names", lambda: pytest.fail("listed again"))
    with (
        FlopCounterMode(display=False, custom_mapping={aten.linear: stated}),
        FlopCounterMode(display=False),
        overridden({aten.layer_norm: stated}),
    ):
        pass


def test_kernels_in_cpp_are_found_once_while_no_library_adds_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def total() -> int:
        with FlopCounterMode(display=False, custom_mapping={aten.linear: stated}) as counter:
            torch.nn.functional.linear(ROWS, ROWS)
        return counter.get_total_flops()

    assert total() == FLOPS
    monkeypatch.setattr(_torch, "autograd_kernel", lambda *_: pytest.fail("looked up again"))
    assert total() == FLOPS


@pytest.mark.parametrize("key", KEYS)
def test_operator_that_python_defines_again_runs_its_new_kernel(key: str) -> None:
    for number in range(3):
        with torch.library._scoped_library(LIBRARY, "FRAGMENT") as made:
            made.define("again(Tensor x) -> Tensor")
            made.impl("again", lambda x, number=number: x + number, key)
            with FlopCounterMode(display=False):
                assert torch.ops.dispatch_flops_extension.again(ROWS)[0, 0] == 1 + number


def test_kernel_that_python_registers_again_runs(library: torch.library.Library) -> None:
    library.define("replaced(Tensor x) -> Tensor")
    for number in range(3):
        with torch.library._scoped_library(LIBRARY, "IMPL") as another:
            another.impl("replaced", lambda x, number=number: x + number, "Autograd")
            with FlopCounterMode(display=False):
                assert torch.ops.dispatch_flops_extension.replaced(ROWS)[0, 0] == 1 + number


def test_kernel_in_python_of_one_device_runs_as_without_a_counter(
    library: torch.library.Library,
) -> None:
    op = defined(library, lambda x: x + 1, "Autograd")
    library.impl(op.default.name(), lambda x: x + 2, "AutogradCPU")
    with FlopCounterMode(display=False):
        assert op(ROWS)[0, 0] == 1 + 2


def test_formulas_that_are_known_are_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"dispatch_flops_unloaded::operator{i}" for i in range(50)]
    register_flops(names)(stated)
    try:
        with FlopCounterMode(display=False):
            pass
        monkeypatch.setattr(composites, "overloads_of", lambda key: pytest.fail("looked up again"))
        with FlopCounterMode(display=False):
            pass
    finally:
        unregister_flops(names)


def with_two_kernels(library: torch.library.Library, autograd: Callable[..., Tensor]) -> Any:
    """Return an operator with a kernel of the CPU, and one of autograd."""
    op = defined(library, bypassing, "CPU")
    library.impl(op.default.name().partition("::")[2], autograd, "Autograd")
    return op


@pytest.mark.parametrize("mode", MODES)
def test_extension_whose_autograd_kernel_computes_in_place_of_its_own_is_listed(
    library: torch.library.Library, mode: str
) -> None:
    op = with_two_kernels(library, bypassing)
    with MODES[mode]():
        x = ROWS.clone()
        with pytest.warns(UncountedWarning):
            profile = profile_of(lambda: (op(x), op(x)))
        assert profile.uncounted_ops() == {str(op.default): 2}
        profile = profile_of(lambda: (op(x), op(x)), custom_mapping={op: stated})
    assert computing(profile) == {str(op.default): (2, profile.total())}
    assert profile.total().flops == 2 * FLOPS
    assert not profile.is_lower_bound


@pytest.mark.parametrize("mode", MODES)
def test_extension_whose_autograd_kernel_calls_its_own_is_recorded_once(
    library: torch.library.Library, mode: str
) -> None:
    def redispatched(x: Tensor) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            found: Tensor = op(x)
        return found

    op = with_two_kernels(library, redispatched)
    with MODES[mode](), pytest.warns(UncountedWarning) as warned:
        profile = profile_of(op, ROWS)
    assert profile.uncounted_ops() == {str(op.default): 1}
    assert "bypass" not in str(warned[0].message)
    with MODES[mode]():
        profile = profile_of(op, ROWS, custom_mapping={op: stated})
    assert computing(profile) == {str(op.default): (1, profile.total())}
    assert profile.notes == ()


def test_operators_whose_autograd_kernel_is_none_get_no_kernels_of_a_counter(
    library: torch.library.Library,
) -> None:
    op = with_two_kernels(library, torch.library.fallthrough_kernel)
    assert op.default not in composites.operators_of_extensions()


def test_custom_operators_get_no_kernels_of_a_counter() -> None:
    """torch's own kernel of autograd calls the one of the device."""

    @torch.library.custom_op("dispatch_flops_extension::custom", mutates_args=())
    def custom(x: Tensor) -> Tensor:
        return x * 3

    op = torch.ops.dispatch_flops_extension.custom.default
    assert op not in composites.operators_of_extensions()


class Tripling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return bypassing(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return bypassing(grads[0])


class VisiblyTripling(Tripling):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 3


def trained(op: Any) -> Callable[[], None]:
    def step() -> None:
        op(ROWS.clone().requires_grad_()).backward(torch.ones(2, 3))

    return step


def test_backward_of_an_extension_that_bypasses_the_dispatcher_is_listed(
    library: torch.library.Library,
) -> None:
    op = defined(library, Tripling.apply, "Autograd")
    with pytest.warns(UncountedWarning, match="its backward ran no operator that computes"):
        profile = profile_of(trained(op), custom_mapping={op: stated})
    assert profile.total("forward").flops == FLOPS
    assert profile.by_operator("backward")[str(op.default)].uncounted == 1


def test_backward_of_an_extension_that_its_formula_states_is_not_listed(
    library: torch.library.Library,
) -> None:
    def both(*_: Any, out: Any, **__: Any) -> Split:
        return Split(own=OpCost(flops=5), shares=(Share(cost=OpCost(flops=7), phase="backward"),))

    op = defined(library, Tripling.apply, "Autograd")
    profile = profile_of(trained(op), custom_mapping={op: both})
    assert (profile.total("forward").flops, profile.total("backward").flops) == (5, 7)
    assert not profile.is_lower_bound


def test_backward_of_an_extension_that_runs_operators_is_not_listed(
    library: torch.library.Library,
) -> None:
    op = defined(library, VisiblyTripling.apply, "Autograd")
    profile = profile_of(trained(op), custom_mapping={op: stated})
    assert profile.total("backward").flops == 2 * 3
    assert not profile.is_lower_bound


def test_backward_of_an_extension_after_the_block_runs_as_before(
    library: torch.library.Library,
) -> None:
    op = defined(library, Tripling.apply, "Autograd")
    x = ROWS.clone().requires_grad_()
    with FlopCounterMode(display=False, custom_mapping={op: stated}) as counter:
        out = op(x)
    out.backward(torch.ones(2, 3))
    assert x.grad is not None
    assert x.grad.tolist() == [[3.0] * 3] * 2
    assert not counter.profile.is_lower_bound


@pytest.mark.parametrize("mapping", ["none", "formula"])
def test_extension_of_which_operators_are_seen_is_noted_without_a_formula(
    library: torch.library.Library, mapping: str
) -> None:
    op = defined(library, lambda x: bypassing(x) + 1, "CompositeImplicitAutograd")
    mine = {op: stated} if mapping == "formula" else None
    profile = profile_of(op, ROWS, custom_mapping=mine)
    noted = [note for note in profile.notes if note.startswith(f"{op.default}: the operators that")]
    assert len(noted) == (mapping == "none")
    assert profile.total().flops == (FLOPS if mine else 2 * 3)


def test_composite_of_torch_is_not_noted_where_another_counter_has_a_formula() -> None:
    layer = nn.Linear(3, 5)
    with FlopCounterMode(display=False, custom_mapping={aten.linear: stated}):
        assert profile_of(layer, ROWS).notes == ()


def test_interrupt_of_a_registration_leaves_no_kernel_behind() -> None:
    registering = {
        function.__code__ for function in (autograd_kernels._update, autograd_kernels._register)
    } | {_torch.Kernels.register.__code__}
    attention = "aten::scaled_dot_product_attention"
    before = torch._C._dispatch_dump(attention), {*_torch._own_kernels}
    for step in itertools.count():
        with interrupted_at(step, lambda frame: frame.f_code in registering):
            try:
                with FlopCounterMode(display=False):
                    assert torch._C._dispatch_dump(attention) != before[0]
                    break
            except KeyboardInterrupt:
                assert (torch._C._dispatch_dump(attention), _torch._own_kernels) == before
    assert step > 20  # two kernels of attention, of several lines each
    assert (torch._C._dispatch_dump(attention), _torch._own_kernels) == before


def test_parts_that_a_checkpoint_recomputes_of_a_composite_are_counted() -> None:
    """Recomputation ends amid the call, where backward has what it needs: before the last product.

    The formula stands for whole calls.
    """
    sizes, stated = [(2, 3), (3, 5), (5, 7)], 10_007
    matrices = [torch.ones(size, requires_grad=True) for size in sizes]
    rule = {aten.linalg_multi_dot: lambda *_, **__: stated}
    with FlopCounterMode(display=False, custom_mapping=rule) as counter:
        out = checkpoint(lambda *t: torch.linalg.multi_dot(t), *matrices, use_reentrant=False)
        out.backward(torch.ones(2, 7))
    profile = counter.profile
    assert profile.total("forward").flops == stated
    assert profile.total("recompute").macs == 2 * 3 * 5
    assert profile.total("backward").macs == 2 * (2 * 3 * 5) + 2 * (2 * 5 * 7)
