"""Operators as torch.ops has them: names, schemas, kernels, tags; and torch's own flop counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from dispatch_flops import _torch
from tests.helpers.interpreters import run_python
from tests.helpers.modes import OperatorNames

aten = torch.ops.aten
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


# -- names and schemas ----------------------------------------------------------------------------


def test_classes_of_operators_are_those_of_torch_ops() -> None:
    """dispatch_flops relies on this for the keys of its registry (operators/registry.py)."""
    assert isinstance(aten.add, OpOverloadPacket)
    assert isinstance(aten.add.Tensor, OpOverload)
    assert isinstance(torch.ops.higher_order.cond, HigherOrderOperator)
    assert aten.add.Tensor.overloadpacket is aten.add


def test_names_of_an_overload_have_library_packet_and_overload() -> None:
    """dispatch_flops relies on this for names of operators and keys by name
    (operators/registry.py).
    """
    mm, add = aten.mm.default, aten.add.Tensor
    assert (str(mm), str(add)) == ("aten.mm.default", "aten.add.Tensor")
    assert (mm.name(), add.name()) == ("aten::mm", "aten::add.Tensor")
    assert (mm._overloadname, add._overloadname) == ("default", "Tensor")
    assert (aten.mm._qualified_op_name, aten.mm.__name__) == ("aten::mm", "mm")
    assert mm.namespace == "aten"
    assert "Tensor" in aten.add.overloads()


def test_name_of_a_higher_order_operator_is_without_library() -> None:
    """dispatch_flops relies on this for choosing a handler (counting/higher_order.py:
    ``HANDLERS``).
    """
    assert torch.ops.higher_order.cond.name() == "cond"


def test_schema_names_arguments_and_tells_outs() -> None:
    """dispatch_flops relies on this for formulas by name (operators/registry.py) and for leaving
    ``out=`` tensors out of what is read (operators/costing.py).
    """
    arguments = aten.mm.out._schema.arguments
    assert [argument.name for argument in arguments] == ["self", "mat2", "out"]
    assert [argument.is_out for argument in arguments] == [False, False, True]


def test_is_view_and_tags_say_what_they_say() -> None:
    """dispatch_flops relies on this for bytes (views move none: operators/costing.py) and for
    operators that read data (counting/meta_tensors.py).
    """
    assert aten.view.default.is_view
    assert not aten.mm.default.is_view
    assert torch.Tag.data_dependent_output in aten._local_scalar_dense.default.tags
    assert torch.Tag.dynamic_output_shape in aten.nonzero.default.tags


def test_custom_op_has_its_overload() -> None:
    """dispatch_flops relies on this for formulas of ``torch.library.custom_op``
    (operators/registry.py).
    """

    def plus_one(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    op = torch.library.custom_op("contract_of_dispatch_flops::plus_one", mutates_args=())(plus_one)
    assert isinstance(op, torch.library.CustomOpDef)
    assert op._opoverload.overloadpacket is torch.ops.contract_of_dispatch_flops.plus_one


def test_all_op_names_are_qualified_and_name_overloads() -> None:
    """dispatch_flops relies on this for ``dispatch-flops ops --coverage`` (cli/ops.py)."""
    names = set(torch._C._dispatch_get_all_op_names())
    assert {"aten::mm", "aten::add.Tensor"} <= names
    assert len([name for name in names if name.startswith("aten::")]) > 2000


# -- kernels --------------------------------------------------------------------------------------


def test_op_runs_what_the_overload_runs() -> None:
    """dispatch_flops relies on this for its overhead: ``_op`` is the overload's own callable,
    called at every operator (counting/kernels.py: ``kernel``).
    """
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(aten.mm.default._op(x, x.t()), x @ x.t())
    assert torch.equal(aten.sum.dim_IntList._op(x, [1], keepdim=True), x.sum(1, keepdim=True))
    out = torch.empty(2, 2)
    assert aten.mm.out._op(x, x.t(), out=out) is out


def test_has_kernel_tells_composites_from_operators_of_their_own() -> None:
    """dispatch_flops relies on this for what to take apart (operators/composites.py:
    ``is_composite``).
    """
    composite = "CompositeImplicitAutograd"
    assert has_kernel("aten::linear", composite)
    assert not has_kernel("aten::linear", "CPU")
    assert has_kernel("aten::mm", "CPU")
    assert not has_kernel("aten::mm", composite)
    assert has_kernel("aten::silu_backward", composite) and has_kernel(
        "aten::silu_backward", "CPU"
    ), "silu_backward no longer has both: the rule for such operators can go"
    assert has_kernel("aten::linear", "NestedTensorCPU"), "nested tensors' own kernels are not told"
    assert COMPOSITE.name == composite


def test_operators_of_python_only_are_not_registered() -> None:
    """dispatch_flops relies on this before it asks for kernels (_torch.py: ``has_kernel``)."""
    assert not torch._C._dispatch_has_kernel("prim::device")
    assert torch._C._dispatch_has_kernel("aten::mm")
    with pytest.raises(RuntimeError, match="does not exist"):
        has_kernel("prim::device", "CPU")


def test_can_decompose_is_true_of_composites_alone() -> None:
    """dispatch_flops relies on this for what to take apart (operators/composites.py:
    ``is_composite``).
    """
    assert aten.linear.default._can_decompose()
    assert not aten.mm.default._can_decompose()


def test_can_decompose_of_prim_device_is_false_or_a_runtime_error() -> None:
    """dispatch_flops relies on this for asking it of every operator (``_torch.is_decomposable``
    catches RuntimeError and nothing else).
    """
    try:
        answer = torch.ops.prim.device.default._can_decompose()
    except RuntimeError:
        answer = False
    assert not answer


def test_op_dk_runs_the_composite_kernel_below_a_mode() -> None:
    """dispatch_flops relies on this for counting what an operator is made of (_torch.py:
    ``run_taken_apart``).
    """
    x, w = torch.ones(2, 3), torch.ones(4, 3)
    with torch.inference_mode(), OperatorNames() as mode:
        out = aten.linear.default._op_dk(COMPOSITE, x, w)
    assert "aten.matmul.default" in mode.seen, f"linear's kernel now runs {mode.seen}"
    assert torch.equal(out, torch.full((2, 4), 3.0))


def test_decompose_runs_below_a_mode_or_is_not_implemented() -> None:
    """dispatch_flops relies on this for composites that have only a Python decomposition
    (_torch.py: ``run_taken_apart``).
    """
    x, w = torch.ones(2, 3), torch.ones(4, 3)
    nothing = aten.mm.default.decompose(x, w.t())
    with torch.inference_mode(), OperatorNames() as mode:
        aten.linear.default.decompose(x, w)
    assert mode.seen, "what the decomposition runs no longer reaches the mode"
    assert nothing is NotImplemented


def test_item_on_meta_reaches_a_mode_before_it_fails() -> None:
    """dispatch_flops relies on this for ``meta_value`` (counting/meta_tensors.py: ``run``)."""

    class Mode(OperatorNames):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            return 3.0 if func is aten._local_scalar_dense.default else func(*args, **(kw or {}))

    with Mode():
        assert torch.empty((), device="meta").item() == 3.0


# -- tracing --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_tracing_state_taken_away_leaves_no_trace() -> None:
    """dispatch_flops relies on this for asking sizes under ``torch.jit.trace``
    (operators/tensors.py: ``untraced``).
    """
    states: list[Any] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        state = torch._C._get_tracing_state()
        states.append(state)
        torch._C._set_tracing_state(None)
        untraced = x.cos()
        torch._C._set_tracing_state(state)
        return x.sin() + untraced

    assert torch._C._get_tracing_state() is None, "outside of a trace there is no state"
    traced = torch.jit.trace(function, torch.ones(2), check_trace=False)
    assert states[0] is not None
    graph = str(traced.graph)
    assert "aten::sin" in graph and "aten::cos" not in graph, (
        "operators run while the state was away must not be in the trace"
    )


# -- torch's own flop counter ---------------------------------------------------------------------


def test_flop_registry_is_keyed_by_packet_and_holds_wrapped_formulas() -> None:
    """dispatch_flops relies on this for formulas that the user registered with torch
    (operators/torch_formulas.py: ``registered_with_torch``, ``accept_torch_style``).
    """
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    formula = flop_registry[aten.mm]
    x = torch.ones(2, 3)
    assert formula(x, x.t(), out_val=torch.ones(2, 2)) == 2 * 2 * 3 * 2

    def raw(x: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return 7

    name = "plus_two"
    op = torch.library.custom_op(f"contract_of_dispatch_flops::{name}", mutates_args=())(_plus_two)
    packet = op._opoverload.overloadpacket
    try:
        register_flop_formula(packet, get_raw=True)(raw)
        assert flop_registry[packet](x, out_val=x) == 7
    finally:
        flop_registry.pop(packet, None)


def _plus_two(x: torch.Tensor) -> torch.Tensor:
    return x + 2


# -- imports --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_import_torch_and_a_mode_do_not_import_the_compiler() -> None:
    """dispatch_flops relies on this for the time of its first operator (counting/dispatch_mode.py,
    counting/eager_stance.py): in a program that compiles nothing, torch._dynamo is not imported,
    which takes a second.
    """
    program = """
import sys, torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._python_dispatch import TorchDispatchMode

class Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func._op(*args, **(kwargs or {}))

with Mode():
    torch.ones(2, 2) @ torch.ones(2, 2)
heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy")
print(*[name for name in heavy if name in sys.modules])
"""
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"now imported at once: {done.stdout}"


# -- attention ------------------------------------------------------------------------------------


def test_cpu_chooses_attention_by_shapes_of_tensors_without_data() -> None:
    """dispatch_flops relies on this for attention on meta (``is_flash_chosen_on_cpu``)."""
    q = torch.empty(2, 3, 5, 8, device="meta")
    choose = aten._fused_sdp_choice.default._op_dk
    cpu = torch._C.DispatchKey.CPU
    assert choose(cpu, q, q, q) == torch.nn.attention.SDPBackend.FLASH_ATTENTION.value
    assert choose(cpu, q, q, q, None, 0.5) == torch.nn.attention.SDPBackend.MATH.value


def test_kernels_for_autograd_keys_run_first_until_they_are_removed() -> None:
    """dispatch_flops relies on this for attention on meta (``Kernels``)."""
    name, q = "aten::scaled_dot_product_attention", torch.empty(2, 3, 5, 8, device="meta")
    library = torch.library.Library("aten", "IMPL")
    library.impl(name, lambda q, k, v: q.new_empty(7), "AutogradMeta")
    assert has_kernel(name, "AutogradMeta")
    assert torch.nn.functional.scaled_dot_product_attention(q, q, q).shape == (7,)
    library._destroy()
    library._destroy()
    assert not has_kernel(name, "AutogradMeta")
    assert torch.nn.functional.scaled_dot_product_attention(q, q, q).shape == q.shape


# -- kernels under autograd's keys ----------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_kernel_under_an_autograd_key_can_be_replaced_by_one_that_calls_it(mode: Any) -> None:
    """dispatch_flops relies on this for composite operators (counting/autograd_kernels.py)."""
    op, seen = aten.linear.default, []
    kernel = torch.library.get_kernel(op, "AutogradCPU")

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(args))
        return kernel.call_boxed(keyset, *args, **kwargs)

    library = torch.library.Library("aten", "IMPL")
    library.impl(op, run, "AutogradCPU", with_keyset=True)
    try:
        layer = torch.nn.Linear(3, 5)
        with mode(), OperatorNames() as modes:
            out = layer(torch.ones(2, 3))
    finally:
        library._destroy()
    assert seen == [3]
    assert modes.seen[-1] == "aten.addmm.default"
    assert out.requires_grad is (mode is torch.enable_grad)
    layer(torch.ones(2, 3))
    assert seen == [3]


@pytest.mark.parametrize("name", ["linear", "matmul", "dropout"])
def test_kernels_by_which_transforms_take_composites_apart_can_be_replaced(name: str) -> None:
    """dispatch_flops relies on this for formulas of composite operators in torch.func
    (counting/autograd_kernels.py: ``_register``).
    """
    op = getattr(torch.ops.aten, name).default
    seen: list[str] = []

    def observing(key: str, kernel: Any) -> Any:
        def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(key)
            return kernel(keyset, *args, **kwargs)

        return run

    given = {"matmul": (torch.eye(3),), "linear": (torch.eye(3),), "dropout": (0.0, True)}[name]
    call = torch.vmap(lambda x: op(x, *given), randomness="same")
    x = torch.arange(18.0).view(2, 3, 3)
    own = _torch.transform_kernels(op)
    kernels = _torch.Kernels("aten")
    try:
        for key, kernel in own.items():
            kernels.register(op, observing(key, kernel), key)
        assert torch.equal(call(x), x)
        assert seen and set(seen) <= set(own)
    finally:
        kernels.remove()
    count = len(seen)
    assert torch.equal(call(x), x)
    assert len(seen) == count
    has_own = "FuncTorchDynamicLayerFrontMode" in own
    assert has_own == (name != "matmul"), "torch.func takes other operators apart by itself"


def test_forward_mode_is_known_while_it_computes_tangents() -> None:
    """dispatch_flops relies on this for formulas, which state no tangents
    (counting/formulas_not_asked.py: ``problem_of_call``).
    """
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.is_in_forward_mode())
        return x * 2

    torch.func.jvp(function, (torch.ones(2),), (torch.ones(2),))
    torch.func.grad(lambda x: function(x).sum())(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        function(torch.ones(2))
    assert seen == [True, False, True]


def test_defining_an_operator_changes_the_tables_of_torch_library() -> None:
    """dispatch_flops relies on this to know when to list operators anew (operators/composites)."""
    before = frozenset(torch.library._defs), frozenset(torch.library._impls)
    with torch.library._scoped_library("dispatch_flops_contract", "FRAGMENT") as library:
        library.define("defined(Tensor x) -> Tensor")
        library.impl("defined", lambda x: x, "CompositeImplicitAutograd")
        after = frozenset(torch.library._defs), frozenset(torch.library._impls)
        assert all(new > old for new, old in zip(after, before, strict=True))


def test_kernels_that_only_go_on_to_the_next_key_are_known() -> None:
    """dispatch_flops relies on this where autograd has no kernel to run (operators/composites)."""
    with torch.library._scoped_library("dispatch_flops_contract", "FRAGMENT") as library:
        library.define("passed(Tensor x) -> Tensor")
        library.impl("passed", torch.library.fallthrough_kernel, "Autograd")
        library.impl("passed", lambda x: x, "CPU")
        name = "dispatch_flops_contract::passed"
        assert [_torch.is_fallthrough(name, key) for key in ("Autograd", "CPU")] == [True, False]


def test_operators_of_custom_op_are_known() -> None:
    """dispatch_flops relies on this, for their kernel of autograd calls the one of the device
    (operators/composites).
    """

    @torch.library.custom_op("dispatch_flops_contract::custom", mutates_args=())
    def custom(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    assert _torch.is_custom_op(torch.ops.dispatch_flops_contract.custom.default)
    assert has_kernel("dispatch_flops_contract::custom", "Autograd")
    assert not _torch.is_custom_op(aten.mm.default)


def test_functions_in_cpp_have_the_names_of_their_operators() -> None:
    """dispatch_flops relies on this for what runs a known call (counting/torch_functions.py)."""
    assert torch.add in _torch.functions_named_as(aten.add.Tensor)
    assert torch.Tensor.add_ in _torch.functions_named_as(aten.add_.Tensor)
    assert torch._C._nn.gelu in _torch.functions_named_as(aten.gelu.default)
    assert not _torch.functions_named_as(torch.ops.prims.add.default)


def test_attention_of_separate_operators_returns_its_probabilities() -> None:
    """dispatch_flops relies on this for attention on meta (counting/meta_attention.py)."""
    query, key, value = (torch.randn(2, 3, length, 7) for length in (5, 11, 11))
    out, probabilities = _torch.math_attention(query, key, value)
    assert (out.shape, probabilities.shape) == ((2, 3, 5, 7), (2, 3, 5, 11))
    torch.testing.assert_close(probabilities @ value, out)
