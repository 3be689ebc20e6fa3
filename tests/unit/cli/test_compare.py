"""``diff``: what changed between two profiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from dispatch_flops import OpCost, Profile
from dispatch_flops.profile import ModuleNode, OpTotal, RunInfo, TensorInput
from tests.helpers.command_line import Result, Run, error_line, tree

Compare = Callable[..., Result]


@pytest.fixture
def compare(run: Run) -> Compare:
    def call(before: Profile, after: Profile, *options: str) -> Result:
        Path("a.json").write_text(before.to_json())
        Path("b.json").write_text(after.to_json())
        return run("diff", "a.json", "b.json", *options)

    return call


def _cells(text: str) -> dict[str, list[str]]:
    rows = [line.strip(" |").split(" | ") for line in text.splitlines() if " | " in line]
    return {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in rows}


def test_diff_lists_modules_and_operators_that_changed(compare: Compare) -> None:
    before = tree({"same": 3, "grown": 100, "gone": 5})
    after = tree({"same": 3, "grown": 150, "new": 7})
    result = compare(before, after, "--format", "markdown")
    assert result.code == 0
    cells = _cells(result.out)
    assert cells["everything"][1] == "108 -> 160 (+48.15%)"
    assert cells["(model)"][1] == "108 -> 160 (+48.15%)"
    assert cells["grown"][1:3] == ["100 -> 150 (+50%)", "200 -> 300 (+50%)"]
    assert cells["gone"][1] == "gone: 5"
    assert cells["new"][1] == "new: 7"
    assert "same" not in cells
    assert cells["aten.mm.default"][:2] == ["3", "108 -> 160 (+48.15%)"]


def test_diff_of_all_lists_unchanged_modules_to_the_depth(compare: Compare) -> None:
    before, after = tree({"same": 3, "grown": 100}), tree({"same": 3, "grown": 150})
    cells = _cells(compare(before, after, "--all", "--format", "markdown").out)
    assert cells["same"][1] == "3"
    options = ("--all", "--depth", "0", "--format", "markdown")
    assert "same" not in _cells(compare(before, after, *options).out)


def test_suffix_of_the_output_chooses_the_format(compare: Compare) -> None:
    one = tree({"a": 1})
    assert compare(one, one, "--output", "d.md").code == 0
    assert Path("d.md").read_text().startswith("|")
    assert error_line(compare(one, one, "--output", "d.json")) == (
        "--output d.json: the suffix .json is unknown; use one of .txt, .md, or add --format"
    )


def test_diff_that_rounding_would_hide_shows_all_digits(compare: Compare) -> None:
    out = compare(tree({"a": 10**9}), tree({"a": 10**9 + 1})).out
    assert "1,000,000,000 -> 1,000,000,001 (+<0.01%)" in out


def test_diff_marks_costs_as_lower_bounds_and_no_other_figure(compare: Compare) -> None:
    unknown = OpTotal(op="lib.a", phase="forward", calls=2, cost=None, uncounted=2)
    known = tree({"a": 10**9}, latency=1.0)
    before = dataclasses.replace(
        known, root=dataclasses.replace(known.root, ops=(unknown,), own_params=7, total_params=7)
    )
    larger = tree({"a": 10**9 + 1}, latency=1.0)
    after = dataclasses.replace(
        larger, root=dataclasses.replace(larger.root, ops=(unknown,), own_params=7, total_params=7)
    )
    cells = _cells(compare(before, after, "--all", "--format", "markdown").out)
    params, macs, _, _, latency = cells["everything"]
    assert (params, latency) == ("7", "1 s")
    assert macs == ">= 1,000,000,000 -> >= 1,000,000,001 (+<0.01%)"
    calls, macs, *_ = cells["lib.a"]
    assert (calls, macs) == ("2", ">= 0")


def test_exit_code_depends_on_counts_but_not_on_latencies(compare: Compare) -> None:
    one, other = tree({"a": 1}, latency=1.0), tree({"a": 1}, latency=2.0)
    same = compare(one, other, "--exit-code")
    assert same.code == 0
    assert "1 s -> 2 s (+100%)" in same.out
    assert "No count changed." in same.out
    assert compare(one, tree({"a": 2}), "--exit-code").code == 1
    assert compare(one, tree({"a": 2})).code == 0


def test_diff_names_the_phase_that_its_latencies_are_of(compare: Compare) -> None:
    """Seconds of modules are those of forward beside the counts of all phases."""
    one, other = tree({"a": 1}, latency=1.0), tree({"a": 2}, latency=2.0)
    heads = [line.split()[-1] for line in compare(one, other).out.splitlines() if "MACs" in line]
    assert heads[:2] == ["Forward", "Forward"]
    timed = dataclasses.replace(one, root=dataclasses.replace(one.root, seconds={"backward": 3.0}))
    cells = compare(timed, timed, "--phase", "backward").out.splitlines()
    assert (cells[0].split()[-1], cells[2].split()[-2:]) == ("Backward", ["3", "s"])


def test_diff_of_different_runs_says_what_differs(compare: Compare) -> None:
    before = tree({"a": 1})
    assert "differ in" not in compare(before, before).out
    half = dataclasses.replace(before, run=RunInfo(device="meta", causal="half"))
    assert compare(before, half).out.startswith(
        "The runs differ in device: cpu, then meta.\n\n"
        "The runs differ in causal attention: full, then half.\n\n"
    )
    backward = OpTotal(op="lib.a", phase="backward", calls=1, cost=OpCost())
    root = dataclasses.replace(before.root, ops=(*before.root.ops, backward))
    assert compare(before, dataclasses.replace(before, root=root)).out.startswith(
        "The runs differ in phases: forward, then forward + backward.\n\n"
    )


def test_phase_restricts_the_diff(compare: Compare) -> None:
    out = compare(tree({"a": 1}), tree({"a": 2}), "--phase", "backward").out
    assert "1 -> 2" not in out


def test_diff_says_when_inputs_or_modes_differ(compare: Compare) -> None:
    x = TensorInput(name="x", shape=(3, 7), dtype="float32", device="cpu")
    y = dataclasses.replace(x, shape=(5, 7))
    before = dataclasses.replace(
        tree({"a": 1}), run=RunInfo(inputs=(x,), training=False, grad_mode="grad", date="a")
    )
    run = dataclasses.replace(before.run, inputs=(y,), training=True, date="b", command="c")
    after = dataclasses.replace(before, run=run)
    assert compare(before, after).out.startswith(
        "The runs differ in inputs: x float32 [3, 7] on cpu, then x float32 [5, 7] on cpu.\n\n"
        "The runs differ in mode: evaluation, gradients on, autocast off, "
        "then training, gradients on, autocast off.\n\n"
    )
    assert "differ in" not in compare(before, tree({"a": 1})).out  # an old file has no inputs


class TestNames:
    """Modules that have other names in the second profile."""

    @staticmethod
    def _save(path: str, **counts: int) -> None:
        Path(path).write_text(tree({k.replace("_", "."): n for k, n in counts.items()}).to_json())

    def test_renamed_module_is_matched(self, run: Run) -> None:
        self._save("a.json", encoder=30, head=7)
        self._save("b.json", body=30, head=7)
        assert run("diff", "a.json", "b.json", "--exit-code").code == 1
        result = run("diff", "a.json", "b.json", "--rename", "encoder=body", "--exit-code")
        assert (result.code, "No count changed." in result.out) == (0, True)

    def test_name_without_a_pair_is_refused(self, run: Run) -> None:
        self._save("a.json", a=3)
        message = error_line(run("diff", "a.json", "a.json", "--rename", "encoder"))
        assert message == "--rename 'encoder' is not a pair of names; write OLD=NEW"
        twice = ("--rename", "encoder=body", "--rename", "encoder=trunk")
        message = error_line(run("diff", "a.json", "a.json", *twice))
        assert message == "--rename encoder is given twice; give it once"

    def test_rename_of_a_module_that_is_not_there_is_refused(self, run: Run) -> None:
        self._save("a.json", encoder=30)
        message = error_line(run("diff", "a.json", "a.json", "--rename", "encode=body"))
        assert message == "'encode' is renamed, but is not a module of the earlier profile"

    @pytest.mark.parametrize("prefix", ["base.model", "base.model."])
    def test_prefix_of_a_wrapped_model_is_stripped(self, run: Run, prefix: str) -> None:
        base = ModuleNode(fqn="", class_name="Net", calls=1, children=(_linear("q", 30),))
        inner = ModuleNode(
            fqn="base.model",
            name="model",
            class_name="Net",
            calls=1,
            children=(_linear("base.model.q", 30, _linear("base.model.q.lora", 7)),),
        )
        wrapper = ModuleNode(fqn="base", name="base", class_name="Lora", children=(inner,))
        lora = ModuleNode(fqn="", class_name="Peft", calls=1, children=(wrapper,))
        for name, root in (("a", base), ("b", lora)):
            Path(f"{name}.json").write_text(Profile(root=root).check().to_json())
        out = run("diff", "a.json", "b.json", "--strip-prefix", prefix).out
        rows = {line.split()[0]: line for line in out.splitlines() if "->" in line or "new" in line}
        assert list(rows) == ["everything", "(model)", "q", "q.lora", "aten.mm.default"]
        assert "30 -> 37" in rows["q"] and "new: 7" in rows["q.lora"]
        assert "gone" not in out


def _linear(fqn: str, macs: int, *below: ModuleNode) -> ModuleNode:
    op = OpTotal(
        op="aten.mm.default", phase="forward", calls=1, cost=OpCost(macs=macs, flops=2 * macs)
    )
    return ModuleNode(
        fqn=fqn,
        name=fqn.rsplit(".", 1)[-1],
        class_name="Linear",
        calls=1,
        ops=(op,),
        children=below,
    )
