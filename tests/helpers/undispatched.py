"""What tests of layers and steps that run without the mode have in common."""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from dispatch_flops import Profile
from dispatch_flops.counting import known_layers, known_steps, module_tracker


def note_layers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the fqn of each layer whose call is not dispatched."""
    found: list[str] = []

    def begin(thread: Any, known: Any, call: Any) -> None:
        found.append(known.module_phase.fqn)
        known_layers.begin_layer(thread, known, call)

    monkeypatch.setattr(module_tracker, "begin_layer", begin)
    return found


def note_steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the class of each optimizer whose step is not dispatched."""
    found: list[str] = []
    begin_step = known_steps.begin_step

    def begin(thread: Any, opened: Any, step: Any) -> None:
        found.append(type(opened.owner).__name__)
        begin_step(thread, opened, step)

    monkeypatch.setattr(known_steps, "begin_step", begin)
    return found


def operators_and_memory(profile: Profile) -> Any:
    """Return everything that a profile says of operators and of memory."""
    memory = profile.memory
    assert memory is not None
    phases = ("forward", "backward", "optimizer")
    nodes = [node for root in (profile.root, profile.outside) for node in root.walk()]
    return (
        memory.peak_bytes,
        memory.peak_at,
        memory.at_peak,
        memory.unseen,
        [memory.by_role(phase) for phase in phases],
        {node.fqn: (node.memory, node.ops, node.calls) for node in nodes},
    )


def imported_again(module: ModuleType) -> Any:
    """Return a copy of a module, as a program gets it that imports it now."""
    assert module.__spec__ is not None
    again = importlib.util.module_from_spec(module.__spec__)
    assert module.__spec__.loader is not None
    module.__spec__.loader.exec_module(again)
    return again


@contextmanager
def signalled_at(function: Any, handler: Callable[[], object]) -> Iterator[None]:
    """Run the handler of a signal once, where ``function`` is called next inside the block."""

    def raise_signal(frame: Any, event: str, what: Any) -> None:
        if event == "call" and frame.f_code is function.__code__:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, lambda *args: handler())
    sys.setprofile(raise_signal)
    try:
        yield
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGINT, before)
