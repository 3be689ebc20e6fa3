"""Idle modules, on which the overhead is measured."""

from __future__ import annotations

import pytest

from dispatch_flops.timing.idle_modules import IdleModules, make_call, run_in_fresh_thread


def test_idle_modules_call_only_the_given_hooks() -> None:
    idle = IdleModules(3, lambda x: x + 1)
    seen: list[str] = []
    idle.set_call(make_call([lambda *_: seen.append("before")], [lambda *_: seen.append("after")]))
    idle.run()
    assert seen == ["before", "after"] * 3
    idle.set_call(make_call())
    idle.run()
    assert len(seen) == 6


def test_run_in_fresh_thread_raises_what_its_function_raises() -> None:
    with pytest.raises(ZeroDivisionError):
        run_in_fresh_thread(lambda: 1 / 0)
