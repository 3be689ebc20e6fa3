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


def test_step_that_raises_is_undone_once_and_the_others_too() -> None:
    steps = Steps("a", "b", "c", b=[ValueError("b")], c=[ValueError("c")])
    with pytest.raises(ValueError, match="c"):  # the first error
        steps.stack.run()
    steps.stack.run()
    assert steps.undone == ["c", "b", "a"]


def test_step_that_is_interrupted_is_undone_again() -> None:
    steps = Steps("a", "b", "c", b=[KeyboardInterrupt(), KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        steps.stack.run()
    assert steps.undone == ["c", "b", "b", "b", "a"]


def test_interrupt_is_raised_before_an_earlier_error() -> None:
    steps = Steps("a", "b", a=[KeyboardInterrupt()], b=[ValueError("b")])
    with pytest.raises(KeyboardInterrupt):
        steps.stack.run()
    assert steps.undone == ["b", "a", "a"]


def test_interrupt_between_two_steps_leaves_none() -> None:
    class Interrupted(list[Callable[[], object]]):
        """Raises when it is asked for the second time whether steps are left."""

        asked = 0

        def __bool__(self) -> bool:
            self.asked += 1
            if self.asked == 2:
                raise KeyboardInterrupt
            return len(self) > 0

    steps = Steps("a", "b", "c")
    steps.stack._steps = Interrupted(steps.stack._steps)
    with pytest.raises(KeyboardInterrupt):
        steps.stack.run()
    assert steps.undone == ["c", "b", "a"]
