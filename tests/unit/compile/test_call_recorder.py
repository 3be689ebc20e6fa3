"""Which backends the recorder of opaque calls asks."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from dispatch_flops.compile import call_recorder
from dispatch_flops.compile.call_recorder import CallRecorder


class Backend:
    pass


def test_backend_that_is_collected_while_others_are_asked_ends_no_compilation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the collector does it, at any moment, with a backend that is cyclic garbage."""
    monkeypatch.setattr(call_recorder._torch, "follow_traced_calls", lambda recorder: None)
    recorder, backends = CallRecorder(), [Backend(), Backend()]
    asked = []
    for number in range(2):
        recorder.add_backend(backends[number], {number: None})

    def rules_of(rules: Any) -> dict[Any, Any]:
        asked.extend(rules)
        backends.clear()
        return {}

    monkeypatch.setattr(call_recorder.registry, "module_rules", rules_of)
    assert recorder.begin(nn.Linear(3, 5), Backend(), object(), {}, ()) is None
    assert asked == [0, 1]
    assert not recorder._rules
