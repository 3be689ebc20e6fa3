"""The package's own printout: headline, module tree, top operators and remarks."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given

from dispatch_flops.analysis.folding import fold
from dispatch_flops.analysis.machines import Machine
from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import Profile, RunInfo, StepTiming, TensorInput
from dispatch_flops.profile.tree import SEVERAL_MODELS
from dispatch_flops.renderers import View, overview
from dispatch_flops.renderers.overview.rows import module_rows
from tests.helpers.trees import (
    deep,
    empty,
    encoder,
    hostile,
    lenet5,
    linear,
    lower_bound,
    module,
    op,
    place,
    profiles,
    timed,
    training_step,
    unknown,
    unmeasured,
    varying,
    wide,
)

ALL = 1_000  # a depth that no tree here reaches
LAYER_MACS = 2 * 3 * 5 * 7 + 2 * 3 * 7 * 5  # two projections and the two layers of the MLP


def parts(profile: Profile, **view: object) -> list[list[str]]:
    """Return the blocks of lines that blank lines separate."""
    text = overview.render(profile, View(**view))  # type: ignore[arg-type]
    return [block.splitlines() for block in text.split("\n\n")]


def tree(profile: Profile, **view: object) -> list[str]:
    """Return the lines of the module table without its header."""
    return parts(profile, **view)[1][2:]


def cells(line: str) -> list[str]:
    return [cell for cell in line.split("  ") if cell]


def test_headline_names_the_inputs_and_the_mode_where_they_are_known() -> None:
    run = RunInfo(
        inputs=(TensorInput(name="x", shape=(3, 7), dtype="float32", device="cpu"),),
        training=True,
        grad_mode="grad",
    )
    text = overview.render(dataclasses.replace(lenet5(), run=run))
    assert "\nInputs   x float32 [3, 7] on cpu\n" in text
    assert "\nMode     training, gradients on, autocast off\n" in text
    unknown = overview.render(dataclasses.replace(lenet5(), run=RunInfo()))
    assert "Inputs" not in unknown
    assert "Mode" not in unknown


class TestRows:
    def test_run_of_siblings_has_a_row_of_all_and_a_row_of_each(self) -> None:
        rows = list(module_rows(encoder(12).root))
        (run,) = [row for row in rows if row.level == 1 and row.is_run]
        (each,) = [row for row in rows if row.level == 2 and row.label == "each"]
        assert (run.label, run.class_name) == ("layer.0-11", "12 x Layer")
        assert run.figures.cost.macs == 12 * LAYER_MACS
        assert each.figures.cost.macs == LAYER_MACS
        assert run.figures.params == 12 * each.figures.params

    def test_calls_of_a_run_are_those_of_all_its_modules(self) -> None:
        rows = list(module_rows(encoder(3).root, depth=2))
        assert [(row.label, row.calls) for row in rows[2:4]] == [("layer.0-2", 3), ("each", 1)]

    def test_parameters_that_a_run_shares_count_once(self) -> None:
        tied = (module("Linear", name=str(i), own_params=30) for i in range(3))
        root = dataclasses.replace(place(module("Net", *tied)), total_params=30)
        params = [(row.label, row.figures.params) for row in module_rows(root)]
        assert params == [("Net", 30), ("0-2", 30), ("each", 30)]
        assert fold(root).children[0].total_params == 30

    def test_latency_of_each_is_the_mean_of_the_run(self) -> None:
        rows = {row.label: row for row in module_rows(encoder(12).root, depth=2)}
        of_all = sum(index + 1 for index in range(12)) * 1e-3
        assert rows["layer.0-11"].figures.latency_s == pytest.approx(of_all)
        assert rows["each"].figures.latency_s == pytest.approx(of_all / 12)

    def test_run_within_a_run_is_of_one_member(self) -> None:
        (run,) = [row for row in module_rows(encoder(12).root) if row.label == "0-1"]
        assert (run.class_name, run.level) == ("2 x Linear", 4)
        assert run.figures.cost.macs == 2 * 3 * 7 * 5

    def test_figures_of_all_rows_of_a_level_add_up(self) -> None:
        profile = encoder(12)
        level_1 = [row for row in module_rows(profile.root) if row.level == 1]
        assert sum(row.figures.cost.macs for row in level_1) == profile.total().macs

    def test_unfolded_tree_has_a_row_per_module(self) -> None:
        profile = encoder(12)
        containers = 1  # "layer" holds 12 modules, and keeps its row
        assert len(list(module_rows(profile.root, fold=False))) == 2 + containers + 12 * 6

    def test_container_with_one_child_shares_its_row(self) -> None:
        inner = linear("fc", 3, 5, batch=7)
        holder = module("ModuleList", module("Block", inner, name="0"), name="blocks", calls=0)
        rows = list(module_rows(place(module("Net", holder))))
        assert [row.label for row in rows] == ["Net", "blocks.0", "fc"]

    def test_container_that_was_called_keeps_its_row(self) -> None:
        holder = module("Sequential", linear("0", 3, 5, batch=7), name="mlp", calls=1)
        rows = list(module_rows(place(module("Net", holder))))
        assert [row.label for row in rows] == ["Net", "mlp", "0"]

    def test_sort_puts_the_largest_sibling_first(self) -> None:
        rows = list(module_rows(wide(5).root, sort="macs", fold=False))
        assert [row.label for row in rows[1:]] == ["4", "3", "2", "1", "0"]

    def test_depth_ends_the_tree(self) -> None:
        assert max(row.level for row in module_rows(encoder(3).root, depth=2)) == 2

    @given(profiles)
    def test_rows_of_any_profile_unfolded_are_its_modules(self, profile: Profile) -> None:
        rows = list(module_rows(profile.root, fold=False))
        nodes = list(profile.root.walk())
        assert {row.node.fqn for row in rows} <= {node.fqn for node in nodes}
        silent = [node for node in nodes if not node.calls and len(node.children) == 1]
        assert len(nodes) - len(silent) <= len(rows) <= len(nodes)

    def test_rows_of_a_model_deeper_than_pythons_stack_are_complete(self) -> None:
        assert len(list(module_rows(deep(3_000).root))) == 3_000


class TestTree:
    def test_cells_are_the_figures_of_the_module(self) -> None:
        found = [line.split()[-2:] for line in tree(wide(3), columns=("params", "macs"))]
        assert found == [["3", "6"], ["1", "1"], ["1", "2"], ["1", "3"]]  # parameters, 1+2+3 MACs

    def test_columns_without_a_figure_are_absent(self) -> None:
        header = parts(wide(3))[1][0]
        assert "Forward" not in header
        assert "Params" in header
        assert "n/a" not in overview.render(wide(3))

    def test_unknown_column_is_refused(self) -> None:
        with pytest.raises(
            ConfigError, match="'speed' is not a column; choose from output, params"
        ):
            overview.render(wide(3), View(columns=("speed",)))

    def test_columns_of_phases_hold_that_phase(self) -> None:
        profile = training_step()
        header, _, first, *_ = parts(profile, columns=("backward_flops",))[1]
        assert header.split()[-2:] == ["backward", "FLOPs"]
        assert profile.root.total("backward").flops
        assert cells(first)[0] == profile.root.class_name

    def test_column_of_a_phase_that_did_not_run_is_empty(self) -> None:
        header, _, *rows = parts(wide(3), columns=("backward_flops",))[1]
        assert header.split()[-2:] == ["backward", "FLOPs"]
        assert not any(row[-1].isdigit() for row in rows)

    def test_share_is_of_everything_that_ran(self) -> None:
        heavy = linear("heavy", 3, 5, batch=6)  # 90 MACs, 180 FLOPs
        light = linear("light", 3, 5, batch=2)  # 30 MACs, 60 FLOPs
        lines = tree(Profile(root=place(module("Net", heavy, light))), columns=("share",))
        assert [line.split()[-2] for line in lines] == ["100%", "75%", "25%"]
        assert [line.split()[-1] for line in lines] == ["██████", "████▌", "█▌"]  # of 6

    def test_output_shapes_are_shown_where_they_were_recorded(self) -> None:
        root = place(module("Net", linear("a", 3, 5), linear("b", 5, 7)))
        shapes = {"a": ((2, 5),), "b": (None, (2, 7))}
        children = tuple(
            dataclasses.replace(child, output_shapes=shapes[child.fqn]) for child in root.children
        )
        lines = tree(Profile(root=dataclasses.replace(root, children=children)))
        assert ["[2, 5]" in lines[1], "nested +1" in lines[2]] == [True, True]

    def test_latency_of_a_run_is_marked_where_any_of_its_modules_varies(self) -> None:
        lines = tree(varying("layer.2"), columns=("latency",), depth=1)
        assert cells(next(line for line in lines if "3 x Layer" in line))[-1] == "~6 ms"
        exact = tree(encoder(3), columns=("latency",), depth=1)
        assert "~" not in "".join(exact)

    def test_lower_bounds_are_marked(self) -> None:
        first, known, *_ = tree(lower_bound())
        assert ">= " in first
        assert ">=" not in known

    def test_lower_bounds_are_marked_in_each_column_of_a_cost(self) -> None:
        ops = (
            op("aten.mm.default", macs=105, n_bytes=(16, 12)),
            op("aten.mm.default", "backward", macs=210),
            unknown("lib.backward.default", "backward"),
        )
        profile = Profile(root=place(module("Net", ops=ops, latency_s=2.0)))
        columns = ("macs", "bytes", "forward_flops", "backward_flops", "rate")
        (line,) = tree(profile, columns=columns)
        assert [cell.strip() for cell in cells(line)] == [
            "Net", ">= 315", ">= 28 B", "210", ">= 420", "105 FLOP/s",
        ]  # fmt: skip
        bound = Profile(root=place(module("Net", ops=(*ops, unknown("lib.a")), latency_s=2.0)))
        (line,) = tree(bound, columns=("forward_flops", "rate"))
        assert [cell.strip() for cell in cells(line)] == ["Net", ">= 210", ">= 105 FLOP/s"]
        nothing = Profile(root=place(module("Net", ops=(unknown("lib.a"),), latency_s=2.0)))
        (line,) = tree(nothing, columns=("bytes", "rate"))
        assert [cell.strip() for cell in cells(line)] == ["Net", ">= 0 B", ">= 0 FLOP/s"]

    @pytest.mark.parametrize("width", [60, 80, 100])
    def test_lines_fit_the_width(self, width: int) -> None:
        for make in (encoder, lenet5, training_step, lower_bound, unmeasured, empty):
            tables = parts(make(), width=width, depth=ALL)
            assert max(len(line) for block in tables for line in block) <= width

    def test_wide_page_drops_nothing(self) -> None:
        narrow, whole = parts(encoder(), width=60)[1][0], parts(encoder(), width=None)[1][0]
        assert "MACs" in whole
        assert len(narrow) < len(whole)

    def test_colours_are_shown_on_request_only(self) -> None:
        assert "\x1b[" not in overview.render(encoder())
        assert "\x1b[36m█" in overview.render(encoder(), View(is_colored=True))

    def test_names_cannot_break_lines_or_drive_a_terminal(self) -> None:
        text = overview.render(hostile(), View(width=None))
        assert "\x1b" not in text
        assert "\r" not in text
        assert len(tree(hostile(), width=None)) == 1 + len(hostile().root.children)


class TestHeadline:
    def test_first_line_has_the_totals(self) -> None:
        first = parts(wide(3))[0][0]
        assert first == "Wide: 3 parameters, 6 MACs, 12 FLOPs, 0 B moved"

    def test_lower_bound_is_marked_in_the_totals(self) -> None:
        assert ">= " in parts(lower_bound())[0][0]

    def test_time_names_its_runs_and_spread(self) -> None:
        timing = StepTiming(seconds=timed(forward=4.0), spread_s=0.25, repeats=3)
        profile = dataclasses.replace(wide(3), timing=timing)
        (line,) = [line for line in parts(profile)[0] if line.startswith("Time")]
        assert line == "Time     4 s ± 250 ms (forward, median of 3 runs), 3 FLOP/s"

    def test_rate_is_a_lower_bound_where_the_flops_are(self) -> None:
        ops = (op("aten.mm.default", macs=105), unknown("lib.a"))
        timing = StepTiming(seconds=timed(forward=2.0))
        profile = Profile(root=place(module("Net", ops=ops)), timing=timing)
        assert "Time     2 s (forward), >= 105 FLOP/s" in parts(profile)[0]

    def test_utilisation_names_the_machine(self) -> None:
        timing = StepTiming(seconds=timed(forward=2.0))
        profile = dataclasses.replace(wide(3), timing=timing)
        machine = Machine(name="Tiny", flops_per_s={"float32": 24.0})
        (line,) = [line for line in parts(profile, machine=machine)[0] if line.startswith("MFU")]
        assert line == "MFU      25% of Tiny"  # 12 FLOPs in 2 s of 24 FLOP/s

    def test_utilisation_that_is_not_known_says_why(self) -> None:
        timing = StepTiming(seconds=timed(forward=2.0))
        profile = dataclasses.replace(wide(3), timing=timing)
        machine = Machine(name="Tiny", flops_per_s={"float16": 24.0})
        (line,) = [line for line in parts(profile, machine=machine)[0] if line.startswith("MFU")]
        assert line == "MFU      n/a of Tiny: no peak of Tiny is known for float32"

    def test_hardware_utilisation_that_alone_is_not_known_says_why(self) -> None:
        machine = Machine(name="Tiny", flops_per_s={"float32": 24.0})
        ops = (
            op("aten.relu.default", extra_flops=6),
            op("aten.mul.Tensor", "optimizer", dtype="float64", extra_flops=5),
        )
        profile = Profile(root=module("Net", ops=ops), timing=StepTiming(iteration_s=1.0))
        (line,) = [line for line in parts(profile, machine=machine)[0] if line.startswith("MFU")]
        assert line == "MFU      25% of Tiny; HFU n/a: no peak of Tiny is known for float64"

    def test_phases_are_told_apart(self) -> None:
        (line,) = [line for line in parts(training_step())[0] if line.startswith("FLOPs")]
        assert all(phase in line for phase in ("forward ", "backward ", "optimizer "))

    def test_only_phases_that_leave_out_work_are_lower_bounds(self) -> None:
        ops = (op("aten.mm.default", macs=105), unknown("lib.backward.default", "backward"))
        profile = Profile(root=place(module("Net", ops=ops)))
        assert "FLOPs    forward 210, backward >= 0" in parts(profile)[0]


class TestOperatorsAndRemarks:
    def test_top_chooses_the_number_of_operators_and_the_rest_is_stated(self) -> None:
        ops = (
            op("aten.mm.default", macs=7),
            op("aten.bmm.default", macs=2),
            op("aten.mv.default", macs=1),
        )
        profile = Profile(root=place(module("Net", ops=ops)))
        tables = [parts(profile, top=top)[2] for top in (1, 2, 3)]
        assert [len(table) for table in tables] == [2 + 1 + 1, 2 + 2 + 1, 2 + 3]
        assert tables[0][-1] == "and 2 more operators, 30% of the FLOPs"
        assert tables[1][-1] == "and 1 more operator, 10% of the FLOPs"

    def test_operators_come_with_the_most_flops_first(self) -> None:
        names = [line.split()[0] for line in parts(lower_bound())[2][2:]]
        assert names == ["aten.addmm.default", "lib.scan.default"]

    def test_figures_of_an_operator_without_some_of_its_calls_are_lower_bounds(self) -> None:
        (line,) = [line for line in parts(lower_bound())[2] if line.startswith("lib.scan.default")]
        macs, flops, _, n_bytes = (cell.strip() for cell in cells(line)[2:])
        assert (macs, flops, n_bytes) == (">= 11", ">= 22", ">= 30 B")

    def test_uncounted_operators_are_listed_with_their_reason(self) -> None:
        text = " ".join(overview.render(lower_bound()).split())
        assert "lib.mystery.default (4 calls: no formula)" in text
        assert "lower bounds, and shares are of what was counted: " in " ".join(text.split())
        assert "lib.scan.default (2 calls: ValueError: no length | here)" in text

    def test_modules_that_took_no_part_are_named(self) -> None:
        unused = dataclasses.replace(linear("unused", 3, 5, batch=0, calls=0), active_params=0)
        profile = Profile(root=place(module("Net", linear("fc", 3, 5), unused)))
        assert "Took no part in the run: unused." in overview.render(profile)

    def test_work_outside_the_model_is_named(self) -> None:
        profile = training_step()
        assert profile.outside.total().flops
        assert "Outside the model" in overview.render(profile)

    def test_work_of_a_model_that_was_not_called_is_outside(self) -> None:
        """One of its methods may use its parameters."""
        model = linear("", 3, 5, calls=0)
        for root, is_told in (
            (model, True),
            (dataclasses.replace(model, active_params=0), False),
            (dataclasses.replace(model, class_name=SEVERAL_MODELS), False),
            (dataclasses.replace(model, calls=1), False),
        ):
            text = overview.render(Profile(root=root, outside=training_step().outside))
            assert ("(no call of it was seen: its methods, loss" in text) is is_told

    def test_work_outside_the_model_without_a_cost_is_a_lower_bound(self) -> None:
        outside = module(
            "outside", ops=(op("aten.mm.default", macs=105), unknown("lib.op.default"))
        )
        outside = dataclasses.replace(training_step().outside, ops=outside.ops, children=())
        profile = Profile(root=place(module("Net", linear("fc", 3, 5))), outside=outside)
        text = " ".join(overview.render(profile).split())
        assert "other code): >= 105 MACs, >= 210 FLOPs." in text

    def test_notes_are_shown(self) -> None:
        assert "Note: the first step was left out" in overview.render(training_step())

    def test_model_that_never_ran_has_a_printout(self) -> None:
        assert overview.render(empty()).startswith("Empty: 0 parameters, 0 MACs")

    @given(profiles)
    def test_printout_of_any_profile_fits_its_page(self, profile: Profile) -> None:
        text = overview.render(profile, View(width=100, depth=ALL))
        assert text.startswith(f"{' '.join(profile.root.class_name.split())}: ")
        assert max(map(len, text.splitlines())) <= 100


def test_bars_in_names_do_not_end_the_cells_of_a_markdown_table() -> None:
    model = place(module("Net", module("A|B", name="a|b", own_params=3)))
    (table,) = (block for block in parts(Profile(root=model), style="markdown") if "|" in block[0])
    assert r"a\|b (A\|B)" in table[-1]
    assert {line.replace(r"\|", "").count("|") for line in table} == {table[1].count("|")}
