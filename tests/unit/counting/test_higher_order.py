"""Higher-order operators: their functions are counted in forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops import associative_scan, out_dtype, scan, while_loop
from torch._higher_order_ops import map as hop_map
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_mutation,
)
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dispatch_flops import FlopMeter, OpCost, register_flops, unregister_flops
from dispatch_flops.errors import UncountedWarning
from tests.helpers.profiling import TORCH, profile_of

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]

M, K = 3, 5
ONE = M * K * K  # one product x[M,K] @ w[K,K]
STEPS = 7 if TORCH >= (2, 13) else 8  # of a scan; older releases run one more for shapes


def macs(function: Callable[..., Any], *args: Any, phase: Any = "forward") -> int:
    return profile_of(function, *args).total(phase).macs


def weights() -> torch.Tensor:
    return torch.ones(K, K, requires_grad=True)


def branches(w: torch.Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a function with one product, and one with three."""
    return lambda x: x @ w, lambda x: x @ w @ w @ w


@torch.library.custom_op("dispatch_flops_tests::unpriced", mutates_args=())
def unpriced(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@unpriced.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def power(x: torch.Tensor, products: int) -> torch.Tensor:
    out = x
    for _ in range(products):
        out = out @ x
    return out


class TestCond:
    @pytest.mark.parametrize(("taken", "products"), [(True, 1), (False, 3)])
    def test_cond_counts_the_branch_taken(self, taken: bool, products: int) -> None:
        x, w = torch.ones(M, K), torch.ones(K, K)
        assert macs(torch.cond, torch.tensor(taken), *branches(w), (x,)) == products * ONE

    @pytest.mark.parametrize(("taken", "products"), [(True, 1), (False, 3)])
    def test_cond_counts_backward_and_keeps_gradients(self, taken: bool, products: int) -> None:
        x, w = torch.ones(M, K), weights()

        def run() -> None:
            torch.cond(torch.tensor(taken), *branches(w), (x,)).sum().backward()

        run()
        expected, w.grad = w.grad, None
        profile = profile_of(run)
        assert torch.equal(w.grad, expected)  # tensors that the branches close over have gradients
        assert profile.total("forward").macs == products * ONE
        # each product has a gradient of w, and all but the first one of x
        assert profile.total("backward").macs >= (2 * products - 1) * ONE

    @pytest.mark.parametrize("device", ["meta", "fake"])
    def test_cond_without_data_counts_the_costlier_branch(self, device: str) -> None:
        with FakeTensorMode() if device == "fake" else torch.device("meta"):
            x, w = torch.ones(M, K), torch.ones(K, K)
            for pair in (branches(w), branches(w)[::-1]):
                profile = profile_of(torch.cond, torch.ones((), dtype=torch.bool), *pair, (x,))
                assert profile.total().macs == 3 * ONE
                assert profile.notes == ("cond without data: the costlier branch is counted",)

    def test_cond_of_branches_that_do_not_match_raises_as_without_a_counter(self) -> None:
        with FakeTensorMode():
            x, pred = torch.ones(M, K), torch.ones((), dtype=torch.bool)
            branches = (lambda x: (x * 2,), lambda x: ((x * 2).double(),))
            with pytest.raises(RuntimeError, match="expected same dtype"):
                profile_of(torch.ops.higher_order.cond, pred, *branches, (x,))

    @pytest.mark.parametrize(
        ("products", "uncounted"),
        [
            (1, {"higher_order.cond": 1}),
            (3, {"dispatch_flops_tests.unpriced.default": 1}),
        ],
    )
    def test_cond_without_data_tells_of_operators_without_a_cost_in_either_branch(
        self, products: int, uncounted: dict[str, int]
    ) -> None:
        """The branch with the operator has that many products, the other one two."""

        def one(x: torch.Tensor) -> torch.Tensor:
            return unpriced(power(x, products))

        with torch.device("meta"):
            x, pred = torch.ones(K, K), torch.ones((), dtype=torch.bool)
        with pytest.warns(UncountedWarning):
            profile = profile_of(
                torch.ops.higher_order.cond, pred, one, lambda x: power(x, 2), (x,)
            )
        assert profile.uncounted_ops() == uncounted

    def test_operators_before_a_cond_without_data_are_counted(self) -> None:
        with torch.device("meta"):
            x, w, pred = torch.ones(M, K), torch.ones(K, K), torch.ones((), dtype=torch.bool)

        def run() -> None:
            torch.ops.higher_order.cond(pred, *branches(w), (x @ w @ w,))

        assert macs(run) == (2 + 3) * ONE

    def test_cond_of_a_module_is_counted_after_a_meter(self) -> None:
        """A meter keeps its own hooks from being compiled; torch.cond compiles the counter's."""
        import torch._dynamo  # without it there is nothing to keep them from

        model = nn.Linear(K, K)
        FlopMeter(model)
        branches = (model, lambda y: y.clone())
        run = lambda x: torch.cond(x.sum() > 0, *branches, (x,))  # noqa: E731
        assert profile_of(run, torch.ones(M, K), model=model).total("forward").macs == ONE

    @pytest.mark.parametrize("latency", [False, True])
    def test_cond_names_modules_in_a_branch_below_their_caller(self, latency: bool) -> None:
        class Choice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(K, K)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.cond(x.sum() > 0, self.layer, lambda y: y.clone(), (x,))

        model = Choice()
        profile = profile_of(model, torch.ones(M, K), model=model, latency=latency)
        assert profile.root.total("forward").macs == ONE
        assert [node.fqn for node in profile.root.walk()] == ["", "layer"]


class TestLoops:
    def test_while_loop_counts_every_iteration(self) -> None:
        w = torch.ones(K, K)
        start = (torch.tensor(0), torch.ones(M, K))
        turn = lambda i, x: (i + 1, x @ w)  # noqa: E731
        assert macs(while_loop, lambda i, x: i < 4, turn, start) == 4 * ONE
        assert macs(while_loop, lambda i, x: i < 0, turn, start) == 0

    def test_while_loop_counts_backward_and_keeps_gradients(self) -> None:
        w, x = torch.ones(K, K), torch.ones(M, K, requires_grad=True)

        def run() -> None:
            turn = lambda i, x: (i + 1, x @ w)  # noqa: E731
            while_loop(lambda i, x: i < 4, turn, (torch.tensor(0), x))[1].sum().backward()

        run()
        expected, x.grad = x.grad, None
        profile = profile_of(run)
        assert torch.equal(x.grad, expected)
        assert profile.total("forward").macs == 4 * ONE
        assert profile.total("backward").macs >= 4 * ONE

    def test_while_loop_without_data_is_a_lower_bound(self) -> None:
        w = torch.ones(K, K, device="meta")
        start = (torch.zeros((), device="meta"), torch.ones(M, K, device="meta"))
        is_short = lambda i, x: (x @ w).sum() < i  # noqa: E731
        with pytest.warns(UncountedWarning, match="number of iterations depends on data"):
            profile = profile_of(while_loop, is_short, lambda i, x: (i + 1, x @ w), start)
        assert profile.total().macs == ONE + ONE  # the condition, and the body
        assert profile.is_lower_bound
        assert profile.uncounted_ops() == {"higher_order.while_loop": 1}

    @pytest.mark.filterwarnings("ignore:no cost is known for higher_order.while_loop")
    @pytest.mark.parametrize("device", ["meta", "fake"])
    def test_while_loop_without_data_stacks_its_iterations(self, device: str) -> None:
        """One that runs on meta; fake tensors know of their number that it is unknown."""
        loop = torch.ops.higher_order.while_loop_stack_output
        found: list[Any] = []
        is_fake = device == "fake"
        with FakeTensorMode(shape_env=ShapeEnv()) if is_fake else torch.device("meta"):
            start = (torch.zeros((), dtype=torch.int64), torch.ones(M, K))
            turn = lambda i, x: (i + 1, x * 2)  # noqa: E731
            profile_of(lambda: found.extend(loop(lambda i, x: i < 4, turn, start, ())))
        count, stacked = found
        assert (*stacked.shape[1:],) == (M, K) and count.dim() == 1
        assert isinstance(stacked.shape[0], torch.SymInt) == is_fake
        assert is_fake or stacked.shape[0] == 1

    def test_while_loop_without_data_leaves_a_number_as_it_is(self) -> None:
        loop = torch.ops.higher_order.while_loop_stack_output
        found: list[Any] = []
        start = (0, torch.ones(M, K, device="meta"))
        turn = lambda i, x: (i + 1, x * 2)  # noqa: E731
        with pytest.warns(UncountedWarning):
            profile_of(lambda: found.extend(loop(lambda i, x: i < 4, turn, start, ())))
        assert found[0] == 1 and found[1].shape == (1, M, K)

    @pytest.mark.parametrize("device", ["cpu", "meta", "fake"])
    def test_scan_counts_every_step(self, device: str) -> None:
        with FakeTensorMode() if device == "fake" else torch.device(device):
            w, xs = torch.ones(K, K), torch.ones(7, M, K)
            step = lambda c, x: (c + x @ w, (x @ w).sum(0))  # noqa: E731
            assert (
                macs(scan, step, torch.zeros(M, K), xs)
                == (7 if device == "fake" else STEPS) * 2 * ONE
            )

    def test_scan_of_fake_tensors_in_tuples_counts_every_step(self) -> None:
        with FakeTensorMode():
            w, xs = torch.ones(K, K), torch.ones(7, M, K)
            step = lambda c, x: (c + x @ w, x + c)  # noqa: E731
            start = (torch.zeros(M, K),)
            assert macs(torch.ops.higher_order.scan, step, start, (xs,), ()) == 7 * ONE

    def test_scan_counts_backward_and_keeps_gradients_of_closures(self) -> None:
        w, xs = weights(), torch.ones(7, M, K)

        def run() -> None:
            step = lambda c, x: (c + x @ w, c + x)  # noqa: E731
            scan(step, torch.zeros(M, K), xs)[0].sum().backward()

        run()
        expected, w.grad = w.grad, None
        profile = profile_of(run)
        assert torch.equal(w.grad, expected)
        assert profile.total("forward").macs == STEPS * ONE
        assert profile.total("backward").macs >= 7 * ONE

    @pytest.mark.parametrize("device", ["cpu", "meta", "fake"])
    def test_map_counts_every_row(self, device: str) -> None:
        with FakeTensorMode() if device == "fake" else torch.device(device):
            w, xs = torch.ones(K, K), torch.ones(7, M, K)
            assert macs(hop_map, lambda x, w: x @ w, xs, w) == 7 * ONE

    def test_map_keeps_gradients_of_closures(self) -> None:
        w, xs = weights(), torch.ones(7, M, K)
        profile = profile_of(lambda: hop_map(lambda x: x @ w, xs).sum().backward())
        assert w.grad is not None and float(w.grad[0, 0]) == 7 * M
        assert profile.total("forward").macs == 7 * ONE

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_associative_scan_counts_every_combination(self, device: str) -> None:
        # of 8 elements the tree multiplies 4, then 2, then 1 pairs up, and 1, 3 pairs down
        xs = torch.ones(8, K, K, device=device)
        combine = lambda a, b: a @ b  # noqa: E731
        count = macs(lambda: associative_scan(combine, xs, 0, combine_mode="generic"))
        assert count == (4 + 2 + 1 + 1 + 3) * K**3


class TestOthers:
    def test_out_dtype_counts_its_operator(self) -> None:
        a, b = torch.ones(M, K, dtype=torch.int8), torch.ones(K, K, dtype=torch.int8)
        assert macs(out_dtype, torch.ops.aten.mm.default, torch.int32, a, b) == ONE

    def test_flex_attention_counts_the_rectangle(self) -> None:
        q = torch.ones(1, 2, 128, 16)
        pairs = 2 * 128 * 128
        with torch.no_grad():
            assert macs(flex_attention, q, q, q) == pairs * (16 + 16)
            expected = flex_attention(q, q, q)
            out = []
            profile_of(lambda: out.append(flex_attention(q, q, q)))
        assert torch.equal(out[0], expected)

    def test_flex_attention_with_causal_half_counts_the_blocks_of_its_mask(self) -> None:
        q = torch.ones(1, 1, 256, 16)
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, 256, 256, device="cpu", BLOCK_SIZE=64
        )
        run = lambda: flex_attention(q, q, q, block_mask=mask)  # noqa: E731
        with torch.no_grad():
            assert macs(run) == 256 * 256 * (16 + 16)
            sparse = profile_of(run, causal="half").total().macs
        blocks = 1 + 2 + 3 + 4  # of 64 x 64, on and below the diagonal
        assert sparse == blocks * 64 * 64 * (16 + 16)

    def test_tag_activation_checkpoint_counts_its_graph(self) -> None:
        layer, x = nn.Linear(K, K), torch.ones(M, K)
        graph = torch.fx.symbolic_trace(nn.Sequential(layer))
        profile = profile_of(
            lambda: tag_activation_checkpoint(graph, x, use_reentrant=False).sum().backward()
        )
        assert profile.total("forward").macs == ONE
        assert profile.total("backward").macs == ONE

    @pytest.mark.parametrize(
        "name", ["invoke_subgraph", "strict_mode", "hints_wrapper", "run_const_graph"]
    )
    def test_operator_that_only_wraps_a_function_counts_it(self, name: str) -> None:
        w = torch.ones(K, K)
        body = torch.fx.symbolic_trace(lambda x: (x @ w,))
        x = torch.ones(M, K)
        args = {
            "invoke_subgraph": (body, "body", x),
            "strict_mode": (body, (x,)),
            "hints_wrapper": (body, (x,), {}, {}),
            "run_const_graph": (body, (x,)),
        }[name]
        op = getattr(torch.ops.higher_order, name)
        kwargs = {"hints": args[3]} if name == "hints_wrapper" else {}
        args = args[:3] if name == "hints_wrapper" else args
        with torch.no_grad():
            profile = profile_of(lambda: op(*args, **kwargs))
        assert profile.total().macs == ONE
        assert profile.uncounted_ops() == {}
        assert profile.root.class_name == "no model"  # the graph is not a module of the model

    def test_compiled_subgraph_is_given_its_operands_in_a_list(self) -> None:
        def body(operands: list[torch.Tensor]) -> tuple[torch.Tensor]:
            x, w = operands
            operands.clear()
            return (x @ w,)

        body._boxed_call = True  # type: ignore[attr-defined]
        args = (body, "body", torch.ones(M, K), torch.ones(K, K))
        with torch.no_grad():
            assert macs(torch.ops.higher_order.invoke_subgraph, *args) == ONE

    def test_operators_with_random_state_count_their_operator(self) -> None:
        from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

        x = torch.ones(M, K)

        def run() -> None:
            state, _ = run_and_save_rng_state(torch.ops.aten.mm.default, x, x.T)
            run_with_rng_state(state, torch.ops.aten.mm.default, x, x.T)

        assert macs(run) == 2 * M * K * M

    def test_operator_without_a_handler_runs_and_is_uncounted(self) -> None:
        class Twice(HigherOrderOperator):
            def __init__(self) -> None:
                super().__init__("dispatch_flops_test_twice")

            def __call__(self, body: Any, x: torch.Tensor) -> Any:
                return super().__call__(body, x)

        twice = Twice()
        twice.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(lambda body, x: body(body(x)))
        twice.py_autograd_impl(twice)
        out = []
        with torch.no_grad(), pytest.warns(UncountedWarning, match="test_twice"):
            profile = profile_of(lambda: out.append(twice(torch.exp, torch.zeros(M))))
        assert torch.equal(out[0], torch.ones(M).exp())
        assert profile.uncounted_ops() == {"higher_order.dispatch_flops_test_twice": 1}


class Kernel:
    """Object with the attributes of a Triton kernel."""

    __name__ = "add_kernel"

    def fn(self) -> None: ...

    def run(self) -> None: ...


class TestTriton:
    def launch(self, kernel: Kernel) -> Any:
        with FakeTensorMode():
            x = torch.ones(M * K)
            return profile_of(
                lambda: triton_kernel_wrapper_mutation(
                    kernel_idx=kernel_side_table.add_kernel(kernel),  # type: ignore[arg-type]
                    constant_args_idx=kernel_side_table.add_constant_args({"BLOCK": 4}),
                    grid=[(4, 1, 1)],
                    tma_descriptor_metadata={},
                    kwargs={"x_ptr": x, "n": M * K},
                )
            )

    def test_triton_kernel_with_a_formula_passes_its_arguments(self) -> None:
        kernel = Kernel()

        @register_flops(kernel)
        def add_kernel(*, x_ptr: Any, n: int, BLOCK: int, grid: Any, **_: Any) -> OpCost:
            assert x_ptr.numel() == n and BLOCK == 4 and grid == [(4, 1, 1)]
            return OpCost(flops=n)

        try:
            profile = self.launch(kernel)
        finally:
            unregister_flops(kernel)
        assert profile.by_operator()["triton.add_kernel"].cost.flops == M * K

    def test_formula_of_a_triton_kernel_that_an_autotuner_wraps_is_asked(self) -> None:
        tuner, kernel = Kernel(), Kernel()
        tuner.fn = kernel  # type: ignore[assignment,method-assign]
        register_flops(kernel)(lambda *, n, **_: OpCost(flops=7 * n))
        try:
            profile = self.launch(tuner)
        finally:
            unregister_flops(kernel)
        assert profile.total().flops == 7 * M * K

    def test_triton_kernel_without_a_formula_is_uncounted(self) -> None:
        with pytest.warns(UncountedWarning, match="add_kernel"):
            profile = self.launch(Kernel())
        assert profile.uncounted_ops() == {"triton.add_kernel": 1}
