"""Higher-order operators: their names, the order of their arguments, and their own kernels.

A mode gets such an operator whole; dispatch_flops has a handler for each by name, which runs the
functions among the arguments under the mode.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._higher_order_ops
import torch._higher_order_ops.triton_kernel_wrap
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dispatch_flops import _torch
from tests.helpers.profiling import TORCH

pytestmark = pytest.mark.usefixtures("fresh_compiler")

ops = torch.ops.higher_order

# Those that counting/higher_order.py has a handler for.
HANDLED = """
    cond while_loop while_loop_stack_output scan map_impl associative_scan out_dtype
    auto_functionalized auto_functionalized_v2 with_effects run_and_save_rng_state
    run_with_rng_state graphsafe_run_with_rng_state run_dtensor_rng_op invoke_subgraph invoke_quant
    invoke_quant_packed strict_mode hints_wrapper local_map_hop foreach_map run_const_graph
    triton_kernel_wrapper_mutation triton_kernel_wrapper_functional
""".split()
BY_THEIR_OWN_KERNEL = (
    "associative_scan out_dtype auto_functionalized auto_functionalized_v2 with_effects".split()
)


class Asked(TorchDispatchMode):
    """Keeps the higher-order operators that reach it, and the names of all others."""

    supports_higher_order_operators = True

    def __init__(self, answer: Any = None) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any, Any]] = []
        self.seen: list[str] = []
        self.answer = answer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, HigherOrderOperator):
            self.seen.append(str(func))
            return func(*args, **kwargs)
        self.calls.append((func.name(), args, kwargs))
        return func(*args, **kwargs) if self.answer is None else self.answer


def double(x: Tensor) -> Tensor:
    return x * 2


# -- names and kernels ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", HANDLED)
def test_operator_with_a_handler_is_known_by_that_name(name: str) -> None:
    """dispatch_flops relies on this for choosing a handler (counting/higher_order.py:
    ``HANDLERS``).
    """
    op = getattr(ops, name, None)
    if op is None and name == "run_dtensor_rng_op" and TORCH < (2, 12):
        pytest.skip("later than this torch")
    assert op is not None, f"torch.ops.higher_order.{name} is gone or renamed"
    assert op.name() == name


@pytest.mark.parametrize("name", BY_THEIR_OWN_KERNEL)
def test_py_kernels_have_the_operators_own_implementation(name: str) -> None:
    """dispatch_flops relies on this for running these under its mode (counting/higher_order.py:
    ``_by_its_own_kernel``).
    """
    kernels = getattr(ops, name).py_kernels
    assert callable(kernels.get(DispatchKey.CompositeExplicitAutograd)), (
        f"{name}'s implementation is now registered under {[str(key) for key in kernels]}"
    )


def test_py_kernel_run_under_a_mode_shows_what_it_runs() -> None:
    """dispatch_flops relies on this for the same (counting/higher_order.py:
    ``_by_its_own_kernel``).
    """
    a = torch.ones(2, 2, dtype=torch.int8)
    kernel = ops.out_dtype.py_kernels[DispatchKey.CompositeExplicitAutograd]
    with Asked() as mode:
        out = kernel(torch.ops.aten.mm.default, torch.int32, a, a)
    assert "aten.mm.default" in mode.seen
    assert out.dtype == torch.int32


def test_mode_that_supports_higher_order_operators_gets_them_whole() -> None:
    """dispatch_flops relies on this for all of its handlers (counting/dispatch_mode.py:
    ``supports_higher_order_operators``).
    """
    with Asked() as mode:
        ops.hints_wrapper(double, (torch.ones(2),), {}, hints={})
    assert [name for name, _, _ in mode.calls] == ["hints_wrapper"]
    assert mode.seen == ["aten.ones.default"], "what it runs must not reach the mode by itself"

    class Without(TorchDispatchMode):
        pass

    with pytest.raises(NotImplementedError), Without():
        ops.cond(True, double, double, (torch.ones(2),))


# -- the order of arguments -----------------------------------------------------------------------


def arguments_of(name: str, run: Any) -> tuple[Any, Any]:
    with Asked() as mode:
        run()
    found = [(args, kwargs) for called, args, kwargs in mode.calls if called == name]
    assert found, f"{name} did not reach the mode: {[called for called, _, _ in mode.calls]}"
    return found[0]


def test_cond_gives_predicate_branches_and_operands() -> None:
    """dispatch_flops relies on this order (counting/higher_order.py: ``_cond``)."""
    x = torch.ones(2)
    args, kwargs = arguments_of("cond", lambda: ops.cond(True, double, torch.sin, (x,)))
    assert args[0] is True and args[1] is double and args[2] is torch.sin and args[3][0] is x
    assert not kwargs and len(args) == 4


def test_while_loop_gives_condition_body_carried_and_additional() -> None:
    """dispatch_flops relies on this order (counting/higher_order.py: ``_while_loop``)."""
    condition, body = (lambda i: i < 3), (lambda i: (i + 1,))
    start = torch.zeros(())
    args, _ = arguments_of("while_loop", lambda: ops.while_loop(condition, body, (start,), ()))
    assert args[0] is condition and args[1] is body
    assert args[2][0] is start and args[3] == ()


def test_while_loop_stack_output_stacks_every_turn_on_a_new_dimension() -> None:
    """dispatch_flops relies on this for one turn without data (counting/higher_order.py:
    ``_stacked_once``).
    """
    (out,) = ops.while_loop_stack_output(
        lambda i: i < 3, lambda i: (i + 1,), (torch.zeros(()),), ()
    )
    assert out.shape == (3,)


def test_scan_gives_body_start_and_slices() -> None:
    """dispatch_flops relies on the slices being third (counting/higher_order.py:
    ``_repeated(2)``).
    """
    start, xs = torch.zeros(2), torch.ones(5, 2)
    body = lambda carry, x: [carry + x, carry * x]  # noqa: E731
    args, _ = arguments_of("scan", lambda: ops.scan(body, [start], [xs], ()))
    assert args[0] is body and args[1][0] is start and args[2][0] is xs


def test_map_gives_body_and_slices() -> None:
    """dispatch_flops relies on the slices being second (counting/higher_order.py:
    ``_repeated(1)``).
    """
    xs = torch.ones(5, 2)
    body = lambda x: (x * 2,)  # noqa: E731
    args, _ = arguments_of("map_impl", lambda: ops.map_impl(body, [xs], []))
    assert args[0] is body and args[1][0] is xs


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["cond", "scan"])
def test_functions_of_running_operators_list_the_modules_that_they_call(
    name: str, grad: bool
) -> None:
    """dispatch_flops relies on this for naming module classes whose formula is not asked
    (counting/opaque_modules.py: ``_note_traced_calls``).
    """
    found: list[tuple[str, set[Any]]] = []

    class Listing(Asked):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if isinstance(func, HigherOrderOperator):
                running = _torch.functions_of_running_operators()
                found.extend((op, _torch.module_classes_in(function)) for op, function in running)
            return super().__torch_dispatch__(func, types, args, kwargs)

    layer, x = torch.nn.Linear(3, 3), torch.ones(2, 3)
    with Listing(), torch.set_grad_enabled(grad):
        if name == "cond":
            torch.cond(x.sum() > 0, layer, lambda x: x * 2, (x,))
        else:
            torch._higher_order_ops.scan(lambda c, y: (layer(c), c + y), x, torch.ones(5, 2, 3))
    assert (name, {torch.nn.Linear}) in found


def test_rng_operators_have_their_function_where_it_is_counted() -> None:
    """dispatch_flops relies on these positions (counting/higher_order.py: ``_counting``)."""
    x, state = torch.ones(2), torch.get_rng_state()
    args, _ = arguments_of(
        "run_and_save_rng_state", lambda: ops.run_and_save_rng_state(torch.rand_like, x)
    )
    assert args[0] is torch.rand_like
    args, _ = arguments_of(
        "run_with_rng_state", lambda: ops.run_with_rng_state(state, torch.rand_like, x)
    )
    assert args[1] is torch.rand_like


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("invoke_subgraph", ("key", torch.ones(2)), {}),
        ("invoke_quant", (torch.ones(2),), {}),
        ("invoke_quant_packed", (torch.ones(2),), {}),
        ("strict_mode", ((torch.ones(2),),), {}),
        ("hints_wrapper", ((torch.ones(2),), {}), {"hints": {}}),
        ("foreach_map", (torch.ones(2),), {}),
        ("run_const_graph", ((torch.ones(2),),), {}),
    ],
)
def test_operator_that_only_calls_its_function_takes_that_first(
    name: str, args: Any, kwargs: Any
) -> None:
    """dispatch_flops relies on this for calling the function in the operator's place, on the
    arguments that come after it (counting/higher_order.py: ``_inlined``).
    """

    class Tuple(torch.nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x * 2,)

    body = torch.fx.symbolic_trace(Tuple())
    with Asked(answer=(torch.ones(2),)) as mode:
        getattr(ops, name)(body, *args, **kwargs)
    ((called, given, _),) = mode.calls
    assert called == name
    (doubled,) = given[0](torch.ones(2))  # some operators wrap the function
    assert torch.equal(doubled, torch.full((2,), 2.0)), f"{name}'s function is elsewhere: {given}"
    assert len(given) == 1 + len(args) + len(kwargs), (
        f"{name} now comes with {given[1:]} after its function"
    )


# -- without data ---------------------------------------------------------------------------------


def test_cond_on_fakes_runs_both_branches_once() -> None:
    """dispatch_flops relies on this for taking the costlier branch (counting/higher_order.py:
    ``_cond``).
    """
    runs: list[str] = []

    def branch(name: str) -> Any:
        def run(x: Tensor) -> tuple[Tensor]:
            runs.append(name)
            return (x * 2,)

        return run

    with FakeTensorMode():
        x, predicate = torch.ones(2), torch.tensor(True)
        assert isinstance(predicate, FakeTensor)
        ops.cond(predicate, branch("true"), branch("false"), (x,))
    assert sorted(runs) == ["false", "true"], f"the branches that ran: {runs}"


@pytest.mark.parametrize("name", ["scan", "map_impl"])
def test_loop_on_fakes_runs_its_body_once(name: str) -> None:
    """dispatch_flops relies on this for counting that turn as often as it stands for
    (counting/higher_order.py: ``_repeated``).
    """
    runs: list[str] = []

    def body(*values: Tensor) -> Any:
        runs.append(name)
        return [value * 2 for value in values]

    with FakeTensorMode():
        xs = torch.ones(5, 2)
        if name == "scan":
            ops.scan(body, [torch.zeros(2)], [xs], ())
        else:
            ops.map_impl(body, [xs], [])
    assert len(runs) == 1, f"{name}'s body ran {len(runs)} times on 5 slices that are fake"


# -- Triton ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mutation", "functional"])
def test_kernel_side_table_gives_back_what_a_wrapper_names_by_number(kind: str) -> None:
    """dispatch_flops relies on this for formulas of Triton kernels (counting/higher_order.py:
    ``_triton_kernel``): keywords of the wrapper, and the table of kernels and constants.
    """
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    def kernel() -> None: ...

    kernel_index = kernel_side_table.add_kernel(kernel)
    constants_index = kernel_side_table.add_constant_args({"BLOCK": 64})
    x = torch.ones(2)
    given: dict[str, Any] = {
        "kernel_idx": kernel_index,
        "constant_args_idx": constants_index,
        "grid": [(3, 1, 1)],
        "tma_descriptor_metadata": {},
        "kwargs": {"x": x},
    }
    if kind == "functional":
        given["tensors_to_clone"] = ["x"]
    with Asked(answer=()) as mode:
        getattr(ops, f"triton_kernel_wrapper_{kind}")(**given)
    ((_, _, kwargs),) = mode.calls
    assert kernel_side_table.get_kernel(kwargs["kernel_idx"]) is kernel
    assert kernel_side_table.get_constant_args(kwargs["constant_args_idx"]) == {"BLOCK": 64}
    assert kwargs["grid"] == [(3, 1, 1)]
    assert kwargs["kwargs"]["x"] is x


def test_transforms_that_run_are_named_with_their_batch_sizes() -> None:
    """dispatch_flops relies on this to tell batches of one step from those of another (_torch:
    ``function_transforms``).
    """
    seen = []

    def row(x: Tensor) -> Tensor:
        seen.append(_torch.function_transforms())
        return x.sum()

    row(torch.ones(3))
    torch.func.vmap(row)(torch.ones(5, 3))
    torch.func.vmap(torch.func.vmap(torch.func.grad(row)))(torch.ones(2, 7, 3))
    assert seen == [None, (5,), (2, 7, "TransformType.Grad")]
