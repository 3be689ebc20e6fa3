"""Dispatch modes: the stack of them, entering one again, and what reaches a mode.

dispatch_flops counts in a ``TorchDispatchMode``, which torch documents only in its source.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import _len_torch_dispatch_stack_pre_dispatch, _pop_mode_from_pre_dispatch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.func import jvp
from torch.overrides import BaseTorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from dispatch_flops import _torch
from tests.helpers.modes import OperatorNames

# -- the stack ----------------------------------------------------------------------------------


def test_modes_of_fake_tensors_and_tracers_have_places_of_their_own() -> None:
    """dispatch_flops relies on this where it takes modes off one by one (_torch.py)."""
    own = OperatorNames()
    with own, FakeTensorMode() as fake:
        assert set(_torch.modes_in_force()) == {own, fake}
        assert _torch.stacked_modes() == [own]
        assert _torch.number_of_modes() == 2


def test_mode_stack_lists_modes_outermost_first() -> None:
    """dispatch_flops relies on this for leaving from under other modes (counting/entered_mode.py:
    ``leave``) and for asking whether it is on in this thread (profilers/session.py:
    ``_is_mode_on``).
    """
    with OperatorNames() as outer, OperatorNames() as inner:
        assert _get_current_dispatch_mode_stack() == [outer, inner]
    assert _get_current_dispatch_mode_stack() == []


def test_mode_stack_inside_a_mode_lacks_that_mode() -> None:
    """dispatch_flops relies on this for functions of higher-order operators: its mode is off while
    it handles an operator, and ``with mode`` turns it on again (counting/higher_order.py:
    ``under``).
    """
    inside: list[Any] = []

    class Mode(OperatorNames):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            inside.append(_get_current_dispatch_mode_stack())
            with self:
                inside.append(_get_current_dispatch_mode_stack())
            return func(*args, **(kw or {}))

    with Mode() as mode:
        torch.ones(2)
    assert inside == [[], [mode]], "a mode must be off while it handles an operator"


def test_mode_on_the_stack_is_asked_for_its_own_attribute() -> None:
    """dispatch_flops relies on this for letting operators pass a mode that cannot be left now
    (counting/entered_mode.py: ``leave``). The attribute must be a bound method.
    """

    class Mode(OperatorNames):
        def pass_through(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **kwargs or {})

    with Mode() as mode:
        vars(mode)["__torch_dispatch__"] = mode.pass_through
        torch.ones(2)
        del vars(mode)["__torch_dispatch__"]
        torch.zeros(2)
    assert mode.seen == ["aten.zeros.default"]


def test_mode_exit_takes_off_the_top_of_the_stack() -> None:
    """dispatch_flops relies on this for leaving from under other modes (counting/entered_mode.py:
    ``leave``).
    """
    below, above = OperatorNames(), OperatorNames()
    below.__enter__()
    above.__enter__()
    TorchDispatchMode.__exit__(above, None, None, None)
    TorchDispatchMode.__exit__(below, None, None, None)
    TorchDispatchMode.__enter__(above)
    try:
        torch.ones(2)
    finally:
        TorchDispatchMode.__exit__(above, None, None, None)
    assert (below.seen, above.seen) == ([], ["aten.ones.default"]), (
        "a mode that was taken off and put back must see operators, and the one left must not"
    )
    assert _get_current_dispatch_mode_stack() == []


def test_modes_taken_off_and_put_back_one_by_one_make_the_same_stack() -> None:
    """dispatch_flops relies on this for its own work inside the user's block (``modes_disabled`` in
    profilers/session.py, counting/opaque_modules.py, compile/backend.py,
    integrations/generation.py).
    """
    with FakeTensorMode(), OperatorNames() as mode:
        before = _get_current_dispatch_mode_stack()
        taken_off = [_pop_mode() for _ in before]
        made = torch.ones(2)
        for each in reversed(taken_off):
            _push_mode(each)
        assert _get_current_dispatch_mode_stack() == before == taken_off[::-1]
    assert mode.seen == [], "operators inside must not reach the mode"
    assert not isinstance(made, FakeTensor), "fake tensor modes must be off, too"


def test_inference_mode_restores_the_dispatch_keys_but_not_the_modes() -> None:
    """dispatch_flops relies on this to tell that counting which began in inference mode has missed
    operators (profilers/running_step.py: ``StepCounter``).
    """
    mode, x = OperatorNames(), torch.ones(2)
    with torch.inference_mode():
        mode.__enter__()
        assert _torch.are_modes_seen()
        x.neg()
    assert _get_current_dispatch_mode_stack() == [mode]
    assert not _torch.are_modes_seen()
    x.abs()
    mode.__exit__(None, None, None)
    assert mode.seen == ["aten.neg.default"]
    assert not _torch.are_modes_seen()
    torch.ones(2)  # the key did not come back


def test_backward_restores_the_modes_after_each_node() -> None:
    """dispatch_flops relies on this: it neither starts nor stops counting in a backward pass
    (profilers/running_step.py: ``StepCounter``).
    """
    mode, x = OperatorNames(), torch.ones(2, requires_grad=True)
    y = x.neg()
    y.register_hook(lambda _: setattr(mode.__enter__(), "was_entered", True))
    y.sum().backward()
    assert mode.seen == ["aten.neg.default"], "the mode must see the rest of the node"
    assert _get_current_dispatch_mode_stack() == []
    assert _python_dispatch._is_in_any_mode_without_ignore_compile_internals
    _torch.tell_of_modes()  # what the mode's exit would have done
    assert not _python_dispatch._is_in_any_mode_without_ignore_compile_internals


def test_function_modes_are_counted_in_their_own_thread() -> None:
    """dispatch_flops relies on this to read shapes without a guard (counting/output_shapes.py)."""
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch._C._len_torch_function_stack()))
    assert torch._C._len_torch_function_stack() == 0
    with BaseTorchFunctionMode(), torch.device("meta"):
        assert torch._C._len_torch_function_stack() == 2
        thread.start()
        thread.join()
    assert seen == [torch._C._len_torch_function_stack()] == [0]


def test_tracers_before_autograd_are_counted_and_taken_off_apart_from_the_stack() -> None:
    """dispatch_flops relies on this for its own work while torch.export traces."""
    with FunctionalTensorMode(pre_dispatch=True) as mode:
        assert _get_current_dispatch_mode_stack() == []
        assert _len_torch_dispatch_stack_pre_dispatch() == 1
        assert _pop_mode_from_pre_dispatch() is mode
        assert _len_torch_dispatch_stack_pre_dispatch() == 0
        _push_mode(mode)
        assert _len_torch_dispatch_stack_pre_dispatch() == 1, "_push_mode must find their stack"


# -- what a class of modes may say ------------------------------------------------------------


def test_should_skip_dynamo_if_false_leaves_torch_dispatch_as_it_is() -> None:
    """dispatch_flops relies on this for its overhead: the wrapper imports torch._dynamo at the
    first operator, and costs half a microsecond at each (counting/dispatch_mode.py:
    ``CountingMode``).
    """

    def raw(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    def mode_class(skip: bool) -> Any:
        answer = classmethod(lambda cls: skip)
        return type(
            "Mode", (TorchDispatchMode,), {"_should_skip_dynamo": answer, "__torch_dispatch__": raw}
        )

    assert mode_class(skip=False).__torch_dispatch__ is raw, (
        "_should_skip_dynamo() must be asked when the class is made, and False leave the method"
    )
    assert mode_class(skip=True).__torch_dispatch__ is not raw, (
        "torch no longer wraps __torch_dispatch__: _should_skip_dynamo may have lost its meaning"
    )


def test_ignore_compile_internals_is_asked_when_a_mode_is_entered() -> None:
    """dispatch_flops relies on this for not de-compiling the user's code
    (counting/dispatch_mode.py); what follows from it is tested in test_dynamo.py.
    """
    asked: list[type] = []

    class Mode(OperatorNames):
        @classmethod
        def ignore_compile_internals(cls) -> bool:
            asked.append(cls)
            return True

    with Mode():
        pass
    assert Mode in asked, "entering a mode no longer asks ignore_compile_internals()"


# -- what reaches a mode --------------------------------------------------------------------------


def test_not_implemented_hands_the_operator_to_the_subclass_below_the_mode() -> None:
    """dispatch_flops relies on this for counting what a tensor subclass runs underneath
    (counting/dispatch_mode.py: ``_dispatch_on_subclass``): entered again, the mode steps aside by
    NotImplemented.
    """
    runs: list[tuple[str, str]] = []

    class Wrapper(Tensor):
        inner: Tensor

        @staticmethod
        def __new__(cls, inner: Tensor) -> Wrapper:
            made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
            made.inner = inner
            return made

        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            runs.append(("subclass", str(func)))
            return func(*(a.inner if isinstance(a, Wrapper) else a for a in args))

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            runs.append(("mode", str(func)))
            if Wrapper not in types:
                return func(*args, **(kw or {}))
            if runs[-2:] == [("mode", str(func))] * 2:
                return NotImplemented
            with self:
                return func(*args, **(kw or {}))

    x = Wrapper(torch.ones(2))
    with Mode():
        torch.sin(x)
    op = "aten.sin.default"
    assert runs == [("mode", op), ("mode", op), ("subclass", op), ("mode", op)], (
        "the subclass must get the operator next, and what it runs must reach the mode again"
    )


def test_composites_arrive_whole_only_in_inference_mode() -> None:
    """dispatch_flops relies on this for taking apart what arrives whole, and for counting the same
    operators whatever the mode of gradients (operators/composites.py: ``is_composite``).
    """
    x, w = torch.ones(2, 3), torch.ones(4, 3)
    for context in (torch.enable_grad(), torch.no_grad()):
        with context, OperatorNames() as mode:
            torch.nn.functional.linear(x, w)
        assert mode.seen[-1] == "aten.mm.default", f"linear now arrives as {mode.seen}"
    with torch.inference_mode(), OperatorNames() as mode:
        torch.nn.functional.linear(x, w)
    assert mode.seen == ["aten.linear.default"], f"linear now arrives as {mode.seen}"


def test_types_of_plain_tensors_and_parameters_are_empty() -> None:
    """dispatch_flops relies on this for its shortest path: no look at the tensors' classes where
    ``types`` is empty (counting/dispatch_mode.py: ``__torch_dispatch__``).
    """
    found: list[Any] = []

    class Mode(OperatorNames):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            found.append(tuple(types))
            return func(*args, **(kw or {}))

    with Mode():
        torch.ones(2, 2) @ torch.nn.Parameter(torch.ones(2, 2))
    assert set(found) == {()}, f"operators on plain tensors now come with types {set(found)}"


# -- zero tangents of forward-mode differentiation ---------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_zero_tangents_reach_a_mode_as_mul_scalar_of_zero_tensors() -> None:
    """dispatch_flops relies on this for answering ``zeros * 2``, in which torch recurses infinitely
    below a mode (counting/strategies.py: ``multiply``): mul.Scalar, told by ``_is_zerotensor()``.
    """
    found: list[bool] = []

    class Mode(OperatorNames):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            if func is torch.ops.aten.mul.Scalar and args[0]._is_zerotensor():
                found.append(True)
                zeros, number = args
                return torch._efficientzerotensor(
                    zeros.shape, dtype=torch.result_type(zeros, number), device=zeros.device
                )
            return func(*args, **(kw or {}))

    x = torch.ones(3)
    with Mode():
        _, tangent = jvp(lambda x: torch.add(x, torch.ones(3), alpha=2), (x,), (x,))
    assert found, "zero tangents no longer reach a mode as aten.mul.Scalar of zero tensors"
    assert torch.equal(tangent, x), "an efficient zero tensor is no longer a valid answer"


def test_efficientzerotensor_is_a_zero_tensor_without_memory() -> None:
    """dispatch_flops relies on this for the same (counting/strategies.py: ``multiply``)."""
    zeros = torch._efficientzerotensor((2, 3), dtype=torch.float64, device=torch.device("cpu"))
    assert zeros._is_zerotensor()
    assert (zeros.shape, zeros.dtype) == ((2, 3), torch.float64)
    assert torch.equal(zeros + 1, torch.ones(2, 3, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_shapes_of_zero_tangents_are_found_by_prims_on_meta() -> None:
    """dispatch_flops relies on this for not listing these as work (counting/strategies.py:
    ``infer_shape``): prims.mul and prims.add, all of whose tensors are on meta.
    """
    found: dict[str, set[str]] = {}

    class Mode(OperatorNames):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            if str(func).startswith("prims."):
                devices = {a.device.type for a in args if isinstance(a, Tensor)}
                found.setdefault(str(func), set()).update(devices)
            return func(*args, **(kw or {}))

    model, x = torch.nn.Linear(3, 3), torch.ones(1, 3)
    with Mode():
        jvp(model, (x,), (x,))
        jvp(lambda x: x * torch.ones(3), (x,), (x,))
    known = {"prims.add.default", "prims.mul.default", "prims.div.default"}
    assert set(found) & known, f"torch now finds these shapes by {sorted(found) or 'no prims'}"
    assert set(found) <= known, f"prims that dispatch_flops does not know: {set(found) - known}"
    assert set.union(*found.values()) == {"meta"}


def test_autocast_keys_in_a_dispatch_mode_are_excluded_but_in_the_snapshot() -> None:
    """dispatch_flops relies on this to run kernels with the caller's autocast state
    (_torch.py: ``with_autocast``).
    """
    key = torch._C.DispatchKey.AutocastCPU
    seen: list[tuple[bool, bool]] = []

    class Asking(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            inside = torch._C._dispatch_tls_local_exclude_set().has(key)
            with torch._C._RestorePythonTLSSnapshot():
                outside = torch._C._dispatch_tls_local_exclude_set().has(key)
            seen.append((inside, outside))
            return func(*args, **(kwargs or {}))

    for is_enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled), Asking():
            torch.ones(3).neg()
    assert seen[-1] == (True, True), "without autocast the snapshot excludes its keys, too"
    assert (True, False) in seen, "with autocast the snapshot must not exclude its keys"
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    assert nesting == 1, "the nesting of autocast regions outside of one is 0"


def test_lazy_conjugate_is_not_resolved_inside_a_mode() -> None:
    """dispatch_flops relies on this being undone by torch's function for excluding a key, which
    kernels of FFT and of linear algebra need (_torch.py: ``with_conjugates``).
    """
    found: list[Tensor] = []

    class Mode(OperatorNames):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            x = torch.full((2,), 1j)
            found.append(x.conj() * 1)
            torch._C._dispatch_tls_set_dispatch_key_excluded(_torch.DispatchKey.Conjugate, False)
            found.append(x.conj() * 1)
            torch._C._dispatch_tls_set_dispatch_key_excluded(_torch.DispatchKey.Conjugate, True)
            return func(*args, **(kw or {}))

    with Mode():
        torch.ones(2)
    assert [numbers.tolist() for numbers in found] == [[1j, 1j], [-1j, -1j]]
