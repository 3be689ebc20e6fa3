"""Undoing steps: all of them, the last first, whatever some of them raise."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dispatch_flops.counting.undo import UndoStack


class Steps:
    """Steps that note their names when they are undone, and raise what they are told to."""

    def __init__(self, *names: str, **raised: list[BaseException]) -> None:
        self.undone: list[str] = []
        self._raised = raised
        self.stack = UndoStack()
        for name in names:
            self.stack.add(self._undo(name))

    def _undo(self, name: str) -> Callable[[], None]:
        def undo() -> None:
            self.undone.append(name)
            if waiting := self._raised.get(name):
                raise waiting.pop(0)

        return undo


def test_steps_are_undone_once_the_last_first() -> None:
    steps = Steps("a", "b", "c")
    steps.stack.run()
    steps.stack.run()
    assert steps.undone == ["c", "b", "a"]


def test_step_that_always_raises_is_given_up_and_the_others_are_undone() -> None:
    steps = Steps("a", "b", "c", b=[ValueError("b")] * 3, c=[ValueError("c")] * 3)
    with pytest.raises(ValueError, match="c"):  # the first error
        steps.stack.run()
    steps.stack.run()
    assert steps.undone == ["c", "c", "b", "b", "a"]


@pytest.mark.parametrize(
    "errors", [[KeyboardInterrupt()] * 3, [SystemExit()], [ValueError(), KeyboardInterrupt()]]
)
def test_step_that_is_interrupted_is_undone_again(errors: list[BaseException]) -> None:
    times = len(errors) + 1
    steps = Steps("a", "b", "c", b=[*errors])
    with pytest.raises(type(errors[-1])):
        steps.stack.run()
    assert steps.undone == ["c", *["b"] * times, "a"]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_interrupt_is_raised_before_an_earlier_error(interrupt: type[BaseException]) -> None:
    steps = Steps("a", "b", a=[interrupt()], b=[ValueError("b")])
    with pytest.raises(interrupt):
        steps.stack.run()
    assert steps.undone == ["b", "b", "a", "a"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_interrupt_between_two_steps_leaves_none(error: type[BaseException]) -> None:
    class Interrupted(list[Callable[[], object]]):
        """Raises when it is asked for the second time whether steps are left."""

        asked = 0

        def __bool__(self) -> bool:
            self.asked += 1
            if self.asked == 2:
                raise error
            return len(self) > 0

    steps = Steps("a", "b", "c")
    steps.stack._steps = Interrupted(steps.stack._steps)
    with pytest.raises(error):
        steps.stack.run()
    assert steps.undone == ["c", "b", "a"]


def test_steps_of_a_stack_that_is_gone_are_undone() -> None:
    """An interrupt may come before the first line of ``__exit__``."""
    steps = Steps("a", "b")
    del steps.stack
    assert steps.undone == ["b", "a"]
