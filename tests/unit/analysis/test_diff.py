"""Comparison of hand-built profiles."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dispatch_flops import analysis
from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import Profile
from tests.helpers.trees import encoder, lenet5, module, op, timed


def test_diff_of_equal_profiles_has_no_change() -> None:
    difference = analysis.diff(encoder(), encoder())
    assert difference.changed_modules() == difference.changed_operators() == []
    assert not difference.total.changed


def test_diff_of_counts_that_become_lower_bounds_has_changed() -> None:
    known, unknown = (
        Profile(root=module("Net", ops=(op("a", calls=7, uncounted=n),))).check() for n in (0, 5)
    )
    compared = analysis.diff(known, unknown)
    assert [change.name for change in compared.changed_modules()] == [""]
    assert [change.name for change in compared.changed_operators()] == ["a"]
    assert compared.total.changed and compared.has_changed
    assert "0 -> >= 0" in str(compared) and "No count changed." not in str(compared)


def test_diff_of_paths_says_to_pass_profiles() -> None:
    with pytest.raises(ConfigError, match="after is of type str; pass a Profile"):
        analysis.diff(lenet5(), "after.json")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"rename": [("a", "b")]}, "rename=.*: pass a dict of old and new fqns"),
        ({"strip_prefix": None}, "strip_prefix=None: pass the fqn of a module"),
        ({"strip_prefix": "base_model."}, "'base_model' is to be left out, but is not a module of"),
    ],
)
def test_diff_with_a_wrong_option_names_it(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        analysis.diff(lenet5(), lenet5(), **option)


def test_diff_whose_rename_gives_two_modules_one_name_is_refused() -> None:
    first, second = [node.fqn for node in lenet5().root.children][:2]
    with pytest.raises(ConfigError, match=f"rename gives two modules .* the name '{second}'"):
        analysis.diff(lenet5(), lenet5(), rename={first: second})
    swapped = analysis.diff(lenet5(), lenet5(), rename={first: second, second: first})
    changes = {change.name: change for change in swapped.modules}
    assert changes[second].before == changes[first].after != changes[second].after


def test_diff_of_other_latencies_has_no_change() -> None:
    slower = dataclasses.replace(lenet5().root, seconds=timed(forward=1.0))
    difference = analysis.diff(lenet5(), Profile(root=slower))
    assert difference.changed_modules() == []
    assert difference.total.after is not None
    assert difference.total.after.latency_s == 1.0


@pytest.mark.parametrize(
    ("convention", "says"),
    [
        ({"causal": "half"}, "causal attention: full, then half."),
        ({"flops": "contractions"}, "FLOPs: all, then contractions."),
        ({"subclass": "logical"}, "operators of tensor subclasses: executed, then logical."),
    ],
    ids=str,
)
def test_diff_says_which_conventions_differ(convention: dict[str, Any], says: str) -> None:
    before = encoder()
    after = dataclasses.replace(before, run=dataclasses.replace(before.run, **convention))
    compared = analysis.diff(before, after)
    assert str(compared).startswith(f"The runs differ in {says}\n\n")
    assert f"<p>The runs differ in {says}</p>" in compared._repr_html_()
    assert analysis.diff(before, before).differences == ()


def test_diff_of_backward_leaves_out_calls_of_forward() -> None:
    def calling(times: int) -> Profile:
        steps = (op("aten.mm.default", macs=7 * times), op("aten.mm.default", "backward", macs=11))
        return Profile(root=module("Custom", ops=steps, calls=times))

    assert analysis.diff(calling(1), calling(3), "forward").total.changed
    difference = analysis.diff(calling(1), calling(3), "backward")
    assert not difference.has_changed and not difference.total.changed
    module_calls = {
        (c.calls_before, c.calls_after) for c in (difference.total, *difference.modules)
    }
    assert module_calls == {(None, None)}  # not 0: the calls of a backward pass are not counted
    assert (difference.operators[0].calls_before, difference.operators[0].calls_after) == (1, 1)


def test_diff_shows_calls_of_modules_where_they_differ() -> None:
    """A module without a cost, such as Identity, may be called more often."""

    def calling(times: int) -> Profile:
        return Profile(root=module("Net", module("Identity", name="skip", calls=times)))

    assert "1 -> 3 (+200%)" in str(analysis.diff(calling(1), calling(3)))
    assert "Calls" not in str(analysis.diff(encoder(3), encoder(2))).split("Operator")[0]


def test_diff_of_another_operator_of_equal_cost_has_changed() -> None:
    one, other = (Profile(root=module("Net", ops=(op(name, macs=7),))) for name in "ab")
    difference = analysis.diff(one, other)
    assert difference.changed_modules() == [] and difference.has_changed


def test_diff_of_other_counts_lists_modules_and_operators() -> None:
    difference = analysis.diff(encoder(3), encoder(2))
    changed = {change.name: change for change in difference.changed_modules()}
    gone = {"layer.2" + rest for rest in ("", ".query", ".key", ".mlp", ".mlp.0", ".mlp.1")}
    assert set(changed) == {"", "layer"} | gone
    assert changed["layer.2"].after is None
    before, after = changed[""].before, changed[""].after
    assert before is not None and after is not None
    assert before.cost.macs - after.cost.macs == 4 * 3 * 5 * 7
    assert [c.name for c in difference.changed_operators()] == ["aten.addmm.default"]
    assert difference.operators[0].calls_before - difference.operators[0].calls_after == 4
    assert {
        c.name for c in analysis.diff(encoder(2), encoder(3)).modules if c.before is None
    } == gone
