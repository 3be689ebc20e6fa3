"""Blocks that no mode sees: also after an interrupt, no mode is lost and none comes back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import FrameType

import torch
from torch import nn
from torch._subclasses.functional_tensor import FunctionalTensorMode

from dispatch_flops import FlopCounterMode, _torch
from tests.helpers.interrupting import interrupted_at
from tests.helpers.modes import OperatorNames

BLOCK = {
    getattr(_torch.modes_disabled, name).__code__ for name in ("__enter__", "__exit__", "_put_back")
}
FREED = _torch.modes_disabled.__del__.__code__  # Python only prints what it raises


def is_of_block(frame: FrameType) -> bool:
    caller = frame.f_back.f_code if frame.f_back else None
    return frame.f_code in BLOCK and caller is not FREED


def was_interrupted(run: Callable[[int], None], step: int) -> bool:
    try:
        run(step)
    except KeyboardInterrupt:
        return True
    return False


def check_every_step(run: Callable[[int], None]) -> None:
    """Call ``run(step)`` until it is not interrupted; other modes must be left in force."""
    with OperatorNames() as outer, OperatorNames() as inner:
        for step in itertools.count():
            if not was_interrupted(run, step):
                break
            assert _torch.modes_in_force() == [outer, inner], step
        assert _torch.modes_in_force() == [outer, inner]
    assert step > 20  # the block has about 30 lines, of which some run for each mode


def test_modes_are_put_back_wherever_the_block_is_interrupted() -> None:
    def hide(step: int) -> None:
        with interrupted_at(step, is_of_block), _torch.modes_disabled():
            pass

    check_every_step(hide)


def test_modes_are_back_while_the_interrupt_that_ended_the_block_is_handled() -> None:
    def is_of_putting_back(frame: FrameType) -> bool:
        return is_of_block(frame) and frame.f_code is _torch.modes_disabled._put_back.__code__

    with OperatorNames() as outer, OperatorNames() as inner:
        for step in itertools.count():
            try:
                with (
                    interrupted_at(step, is_of_putting_back),
                    _torch.modes_disabled(),
                ):
                    pass
            except KeyboardInterrupt:
                assert _torch.modes_in_force() == [outer, inner], step
            else:
                break
    assert step > 5


def test_counter_that_an_interrupt_of_the_block_leaves_does_not_come_back() -> None:
    def count(step: int) -> None:
        with (
            FlopCounterMode(display=False),
            interrupted_at(step, is_of_block),
            _torch.modes_disabled(),
        ):
            pass

    check_every_step(count)


def test_counter_that_is_left_inside_such_a_block_does_not_come_back() -> None:
    counter = FlopCounterMode(nn.Linear(3, 5), display=False)
    with OperatorNames() as outer:
        counter.__enter__()
        with _torch.modes_disabled():
            counter.__exit__(None, None, None)
        assert _torch.modes_in_force() == [outer]


def test_block_hides_operators_from_all_modes_and_from_tracers() -> None:
    with FunctionalTensorMode(pre_dispatch=True) as tracer, OperatorNames() as mode:
        with _torch.modes_disabled():
            torch.ones(2)
            assert _torch.modes_in_force() == []
            assert torch._ops._len_torch_dispatch_stack_pre_dispatch() == 0
        assert _torch.modes_in_force() == [mode]
        assert torch._ops._get_dispatch_mode_pre_dispatch(tracer._mode_key) is tracer
    assert mode.seen == []
