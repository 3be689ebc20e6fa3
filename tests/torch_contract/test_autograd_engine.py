"""Autograd: sequence numbers, the running node, graph tasks, and the engine's Python frame.

dispatch_flops says for every operator of a backward pass which module made it, without any
gradient hook. All of it rests on the undocumented attributes that are tested here.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from dispatch_flops._torch import (
    has_storage,
    holds_saved_tensors,
    keeps_graph,
    storage_address,
)
from tests.helpers.frames import frames

sequence_nr = torch._C._autograd._get_sequence_nr
current_node = torch._C._current_autograd_node
graph_task = torch._C._current_graph_task_id
saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
ENGINE = torch.autograd.graph._engine_run_backward.__code__


class Asking(TorchDispatchMode):
    """Keeps what ``question`` answers at every operator, by the operator's name."""

    def __init__(self, question: Any) -> None:
        super().__init__()
        self.question = question
        self.answers: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.answers.append((str(func), self.question()))
        return out

    def of(self, name: str) -> list[Any]:
        return [answer for op, answer in self.answers if op == name]


def leaf(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True)


def node_seq() -> int | None:
    node = current_node()
    return None if node is None else node._sequence_nr()


# -- sequence numbers -------------------------------------------------------------------------


def test_sequence_nr_when_an_operator_reaches_a_mode_its_node_is_numbered_already() -> None:
    """dispatch_flops relies on this for attributing backward passes (counting/thread_state.py:
    ``mark``).
    """
    with Asking(sequence_nr) as mode:
        out = leaf(2, 3) @ leaf(3, 2)
    (seen,) = mode.of("aten.mm.default")
    assert out.grad_fn._sequence_nr() == seen - 1, (
        "below autograd the counter must already be one past the number of the node that this "
        "operator's call has made"
    )


def test_sequence_nr_of_later_nodes_is_greater() -> None:
    """dispatch_flops relies on this for its timeline of modules (counting/thread_state.py:
    ``ThreadState``).
    """
    first = leaf(2).sin()
    between = sequence_nr()
    second = first.cos()
    assert first.grad_fn._sequence_nr() < between <= second.grad_fn._sequence_nr(), (
        "what is made after the counter was read must have that number or a greater one"
    )


def test_sequence_nr_without_gradients_stands_still() -> None:
    """dispatch_flops relies on this for cheap marks (counting/module_tracker.py): nothing made,
    nothing moves.
    """
    before = sequence_nr()
    torch.ones(2).sin()
    assert sequence_nr() == before, "only new nodes may move the counter"


def test_sequence_nr_in_a_new_thread_starts_anew() -> None:
    """dispatch_flops relies on this for telling nodes of threads apart (counting/node_owners.py:
    ``owner_of``).
    """
    leaf(2).sin()
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(sequence_nr()))
    thread.start()
    thread.join()
    assert seen == [0], "sequence numbers are expected to be counted per thread, from 0"


def test_sequence_nr_of_accumulate_grad_is_the_highest_number() -> None:
    """dispatch_flops relies on this for booking the accumulation of gradients
    (counting/node_owners.py: ``ACCUMULATES``).
    """
    node = leaf(2).sin().grad_fn.next_functions[0][0]
    assert node.name() == "torch::autograd::AccumulateGrad"
    assert node._sequence_nr() == 2**64 - 1, "AccumulateGrad must be told by its number"


# -- the running node -------------------------------------------------------------------------


def test_current_node_in_backward_is_the_one_made_by_the_forward_operator() -> None:
    """dispatch_flops relies on this for attributing backward passes
    (counting/operator_locator.py: ``locate_in_backward``).
    """
    product = leaf(2, 3) @ leaf(3, 2)
    made = product.grad_fn._sequence_nr()
    with Asking(node_seq) as mode:
        product.sum().backward()
    assert mode.of("aten.mm.default") == [made, made], (
        "while a backward operator runs, the current node must be the forward operator's"
    )


def test_current_node_in_a_custom_function_is_its_own() -> None:
    """dispatch_flops relies on this for operators in custom backwards
    (counting/operator_locator.py: ``locate_in_backward``).
    """

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    out = Double.apply(leaf(2))
    with Asking(node_seq) as mode:
        out.sum().backward()
    assert mode.of("aten.mul.Tensor") == [out.grad_fn._sequence_nr()], (
        "the backward of an autograd.Function must run with that function's node as current"
    )


def test_current_node_outside_backward_is_none() -> None:
    """dispatch_flops relies on this for what hooks run between nodes
    (counting/operator_locator.py: ``locate_in_backward``).
    """
    assert current_node() is None, "outside of a backward pass no node may be running"


def test_node_next_functions_lead_to_the_parameters() -> None:
    """dispatch_flops relies on this for nodes that no timeline knows (counting/python_frames.py:
    ``owner_by_parameters``): names of the nodes in between, and ``variable`` at the end.
    """
    weight = leaf(3, 2)
    sources = {
        "TBackward0": weight.t(),
        "TransposeBackward0": weight.transpose(0, 1),
        "ToCopyBackward0": weight.double(),
        "ViewBackward0": weight.view(6),
    }
    for name, tensor in sources.items():
        assert tensor.grad_fn.name() == name, f"torch now calls this node {tensor.grad_fn.name()}"
        (source, _) = tensor.grad_fn.next_functions[0]
        assert source.variable is weight, "AccumulateGrad must say of which tensor it is"


# -- graph tasks ------------------------------------------------------------------------------


def test_graph_task_id_outside_backward_is_minus_one() -> None:
    """dispatch_flops relies on this for telling forward from backward (counting/dispatch_mode.py,
    counting/module_tracker.py).
    """
    assert graph_task() == -1, "-1 is expected to mean: no backward pass runs"


def test_graph_task_id_of_a_nested_backward_is_greater() -> None:
    """dispatch_flops relies on this for telling a recomputed forward's own backward pass from the
    one that it runs in (counting/node_owners.py: ``owner_of``;
    counting/operator_locator.py: ``locate_in_backward``).
    """
    tasks: list[int] = []

    def nested(grad: Tensor) -> None:
        tasks.append(graph_task())
        with torch.enable_grad():
            inner = leaf(2).sin()
            inner.register_hook(lambda _: tasks.append(graph_task()))
            inner.sum().backward()
        tasks.append(graph_task())

    outer = leaf(2).sin()
    outer.register_hook(nested)
    outer.sum().backward()
    before, inside, after = tasks
    assert 0 <= before < inside, "a nested backward pass must have a later graph task id"
    assert before == after, "the outer graph task must be current again afterwards"


# -- Python frames ------------------------------------------------------------------------------


def test_engine_frame_while_backward_runs_is_that_of_engine_run_backward() -> None:
    """dispatch_flops relies on this for finding the caller of the engine by ``f_code``, and by the
    file that it is called from (counting/checkpoints.py: ``recomputing_frame``).
    """
    found: list[list[FrameType]] = []
    out = leaf(2).sin()
    out.register_hook(lambda _: found.append(list(frames())))
    out.sum().backward(retain_graph=True)
    torch.autograd.backward(out.sum(), retain_graph=True)
    torch.autograd.grad(out.sum(), out)
    for stack in found:
        places = [place for place, frame in enumerate(stack) if frame.f_code is ENGINE]
        assert places, "backward no longer runs through graph._engine_run_backward"
        caller = stack[places[0] + 1].f_code
        assert caller.co_filename == torch.autograd.__file__, (
            f"the engine is now called from {caller.co_filename}"
        )
    assert len(found) == 3


@pytest.mark.parametrize("retain_graph", [True, False])
def test_sums_of_nodes_run_while_saved_tensors_are_held_and_sums_of_the_engine_after(
    retain_graph: bool,
) -> None:
    """dispatch_flops relies on this for telling which sums torch computes in place."""

    def question() -> tuple[str, bool, bool] | None:
        node = current_node()
        if node is None:
            return None
        engine = next(frame for frame in frames() if frame.f_code is ENGINE)
        return node.name(), holds_saved_tensors(node), keeps_graph(engine)

    x = leaf(3, 3)
    variance, mean = torch.var_mean(x)
    out = x * x * variance * mean
    with Asking(question) as asking:
        torch.autograd.grad(out.sum(), x, retain_graph=retain_graph)
    sums = asking.of("aten.add.Tensor")
    assert ("VarMeanBackward0", True, retain_graph) in sums  # its own
    assert ("VarMeanBackward0", retain_graph, retain_graph) in sums  # the engine's
    assert ("MulBackward0", retain_graph, retain_graph) in sums


def test_frames_of_gradient_clipping_and_scaling_name_their_modules() -> None:
    """dispatch_flops relies on this for naming what torch does between backward and step
    (counting/python_frames.py: ``named_part_of_torch``): the module's name, within 16 frames of the
    operator.
    """
    weight = leaf(2)
    weight.grad = torch.ones(2)

    def callers() -> list[str]:
        names = [frame.f_globals.get("__name__", "") for frame in frames()]
        return names[:16]

    with Asking(callers) as mode:
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
    assert any("torch.nn.utils.clip_grad" in names for _, names in mode.answers), (
        "gradient clipping's operators are no longer asked for by torch.nn.utils.clip_grad"
    )
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(torch.ones(()))
    with Asking(callers) as mode:
        scaler.unscale_(optimizer)
    assert any("torch.amp.grad_scaler" in names for _, names in mode.answers), (
        "gradient scaling's operators are no longer asked for by torch.amp.grad_scaler"
    )


def test_frame_of_a_zero_bubble_schedule_that_adds_up_gradients_names_its_module() -> None:
    """dispatch_flops relies on this for telling these sums from what comes between backward and
    step (counting/python_frames.py: ``named_part_of_torch``).
    """
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    layer, x = torch.nn.Linear(2, 3), leaf(5, 2)
    layer.weight.grad = torch.ones(3, 2)
    _, groups = stage_backward_input([layer(x)], [torch.ones(5, 3)], [x], layer.parameters())

    def callers() -> list[str]:
        return [frame.f_globals.get("__name__", "") for frame in frames()]

    with Asking(callers) as mode:
        stage_backward_weight(layer.parameters(), groups)
    sums = [names for op, names in mode.answers if op == "aten.add_.Tensor"]
    assert len(sums) == 1 and "torch.distributed.pipelining._backward" in sums[0]


def test_optimizer_step_hook_is_called_by_the_frame_of_the_step() -> None:
    """dispatch_flops relies on this for steps that raised: their frame is gone
    (counting/python_frames.py: ``calling_frame``, ``has_returned``).
    """
    called_by: list[FrameType | None] = []
    during: list[bool] = []

    def hook(*_: Any) -> None:
        called_by.append(sys._getframe(1))

    class Step(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            during.append(any(frame is called_by[0] for frame in frames()))

    weight = leaf(2)
    optimizer = Step([weight], lr=0.1)
    handle = register_optimizer_step_pre_hook(hook)
    try:
        optimizer.step()
    finally:
        handle.remove()
    assert during == [True], "the hook's caller must be a Python frame that encloses the step"
    assert not any(frame is called_by[0] for frame in frames())


# -- saved tensors ------------------------------------------------------------------------------


def test_top_saved_tensors_hooks_are_the_innermost_pair_or_none() -> None:
    """dispatch_flops relies on this for noticing torch.utils.checkpoint without a walk over the
    frames (counting/checkpoints.py: ``recomputing_frame_at``; counting/module_tracker.py:
    ``enter_module``).
    """

    def pack(x: Tensor) -> Tensor:
        return x

    def unpack(x: Tensor) -> Tensor:
        return x

    assert not saved_tensors_hooks(True), "without hooks the answer must be falsy"
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert tuple(saved_tensors_hooks(True)) == (pack, unpack), "expected (pack, unpack)"
    assert not saved_tensors_hooks(True)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_views_of_a_gradient_share_its_storage_address(device: str) -> None:
    """dispatch_flops relies on this to find operators that work on gradients
    (operators/tensors.py: ``storages_of``).
    """
    weight, other = (torch.zeros(2, 3, device=device, requires_grad=True) for _ in range(2))
    weight.grad, other.grad = (torch.zeros(2, 3, device=device) for _ in range(2))
    same = {
        storage_address(t) for t in (weight.grad, weight.grad.data, weight.grad.detach().view(-1))
    }
    assert len(same) == 1
    assert storage_address(other.grad) not in same
    assert has_storage(weight.grad) and not has_storage(torch.zeros(2).to_sparse())
