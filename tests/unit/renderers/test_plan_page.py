"""The page of a plan: its data, and that it loads nothing."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch import nn

from dispatch_flops import Machine, plan
from dispatch_flops.analysis.planned import Plan, planned_step
from dispatch_flops.profile import OpTotal
from dispatch_flops.renderers import View, plan_page, plan_table
from dispatch_flops.units import bytes_text
from tests.helpers.html_pages import page_data
from tests.helpers.trees import training_step

IN, OUT, F32 = 256, 384, 4  # multiples of the 512 bytes that blocks are rounded to
MACHINE = Machine(
    name="a board", flops_per_s={"float32": 1e9}, bytes_per_s=1e7, memory_bytes=500e3, source="me"
)


def planned(machine: Machine = MACHINE, optimizer: str | None = None) -> Plan:
    def build(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        return nn.Linear(IN, OUT, bias=False), (torch.ones(batch, IN),)

    return plan(
        build, machine, sizes={"batch": [3, 64]}, optimizer=optimizer, search_batch=False,
        host_s_per_operator=0.5,
    )  # fmt: skip


def test_page_has_memory_time_and_figures_of_each_choice() -> None:
    data = page_data(plan_page.render(planned()))
    assert (data["title"], data["subtitle"]) == ("Linear", "a board: me")
    small, large = data["choices"]
    assert (small["label"], large["label"]) == ("batch=3", "batch=64")
    weight = IN * OUT * F32
    assert data["capacity"] == 500e3
    assert small["peak"] == weight + 3 * F32 * (IN + OUT)
    assert small["roles"]["parameters"] == weight and sum(small["roles"].values()) == small["peak"]
    assert (small["fits"], large["fits"]) == (True, False)
    assert large["fit"] == "does not fit" and small["fit"].startswith("fits, ")
    moving = (weight + 3 * F32 * (IN + OUT)) / 1e7
    assert small["times"]["Step"] == {
        "low": pytest.approx(2 * 3 * IN * OUT / 1e9),
        "middle": pytest.approx(moving),
        "high": pytest.approx(moving + 0.5),
    }
    assert data["assumptions"] == list(planned().assumptions)


@pytest.mark.parametrize(("field", "mark"), [("unseen", "<="), ("decomposed", "~")])
def test_what_a_peak_that_is_not_exact_leaves_is_marked(field: str, mark: str) -> None:
    step = planned().steps[0]
    assert step.memory is not None
    memory = dataclasses.replace(step.memory, **{field: ("lib.a",)})
    profile = dataclasses.replace(step.profile, memory=memory)
    plan = Plan(
        machine=MACHINE,
        steps=(dataclasses.replace(step, profile=profile, largest_batch=3),),
    )
    free = bytes_text(int(500e3) - memory.peak_bytes)
    (column,) = plan_table.columns_of(plan)
    assert (column["headroom"], column["largest batch that fits"]) == (
        f"{mark} {free}",
        f"{mark} 3",
    )
    (choice,) = page_data(plan_page.render(plan))["choices"]
    assert choice["fit"] == f"fits, {mark} {free} free"
    assert choice["details"][-1] == f"largest batch that fits: {mark} 3"


def test_times_that_leave_out_operators_of_unknown_cost_are_marked() -> None:
    step = planned().steps[0]
    unknown = OpTotal(op="lib.a", phase="forward", calls=1, cost=None, uncounted=1)
    root = step.profile.root
    bound = dataclasses.replace(root, ops=(*root.ops, unknown))
    profile = dataclasses.replace(step.profile, root=bound)
    exact, marked = (
        Plan(machine=MACHINE, steps=(dataclasses.replace(step, profile=run),))
        for run in (step.profile, profile)
    )
    (before,), (after,) = plan_table.columns_of(exact), plan_table.columns_of(marked)
    for name in (
        "computing", "moving", "step, all traffic saved", "step, unfused", "step, nothing hidden",
    ):  # fmt: skip
        assert after[name] == f">= {before[name]}"
    values = [page_data(plan_page.render(each))["choices"][0]["value"] for each in (exact, marked)]
    assert values[1] == f">= {values[0]}"


def test_memory_that_was_not_followed_is_unknown_and_not_0() -> None:
    step = planned_step(training_step(), MACHINE, {"batch": 3})
    assert (step.peak_bytes, step.memory_by_role, step.fits) == (None, None, None)
    plan = Plan(machine=MACHINE, steps=(step,))
    (choice,) = page_data(plan_page.render(plan))["choices"]
    assert (choice["peak"], choice["memory"], choice["fit"]) == (None, "n/a", "memory not followed")
    assert re.search(r"^memory +n/a$", plan_table.render(plan), re.MULTILINE)


def test_page_has_the_rows_of_the_table() -> None:
    shown = planned(optimizer="adamw")
    rows = page_data(plan_page.render(shown))["rows"]
    lines = plan_table.render(shown).splitlines()
    body = lines[4 : lines.index("", 4)]
    assert [line.split("  ")[0].strip() or line.split()[0] for line in body]
    assert len(rows) == len(body)
    for (name, texts), line in zip(rows, body, strict=True):
        assert line.strip().startswith(name.strip())
        assert all(text in line for text in texts)


def test_peak_is_marked_in_table_and_page_where_it_is_not_exact() -> None:
    shown = planned()
    for mark, names in (("~ ", "decomposed"), (">= ", "unseen")):
        step = shown.steps[0]
        memory = dataclasses.replace(step.profile.memory, **{names: ("aten.lstm.input",)})
        marked = dataclasses.replace(step, profile=dataclasses.replace(step.profile, memory=memory))
        found = dataclasses.replace(shown, steps=(marked,))
        (row,) = [line for line in plan_table.render(found).splitlines() if "memory  " in line]
        peak = IN * OUT * F32 + 3 * F32 * (IN + OUT)
        assert row.split("  ")[-1].strip() == f"{mark}{bytes_text(peak)}"
        (choice,) = page_data(plan_page.render(found))["choices"]
        assert choice["memory"] == f"{mark}{bytes_text(peak)}"


def test_row_that_the_first_choice_lacks_stays_beside_its_neighbours() -> None:
    columns = [{"a": "1", "c": "2"}, {"a": "1", "b": "3", "c": "2", "d": "4"}]
    assert plan_table.rows_of(columns) == ["a", "b", "c", "d"]


def test_figures_of_an_unknown_machine_are_unknown() -> None:
    data = page_data(plan_page.render(planned(Machine(name="unknown"))))
    (choice, _) = data["choices"]
    assert data["capacity"] is None and choice["fit"] == "capacity unknown"
    assert set(choice["times"]["Step"].values()) == {None}
    assert choice["value"] == "n/a"


def test_names_are_data_and_the_page_loads_nothing() -> None:
    page = plan_page.render(planned(), View(title="</script><b>"))
    assert "<b>" not in page
    assert page_data(page)["title"] == "</script><b>"
    assert "default-src &#x27;none&#x27;" in page or "default-src 'none'" in page


def test_plan_without_choices_is_a_page() -> None:
    empty = dataclasses.replace(planned(), steps=())
    assert page_data(plan_page.render(empty))["title"] == "Plan"


def test_generation_has_prefill_and_steps_apart() -> None:
    transformers = pytest.importorskip("transformers")
    from dispatch_flops.planning.generation import plan_generate

    def build() -> nn.Module:
        config = transformers.GPT2Config(n_embd=12, n_layer=2, n_head=3, vocab_size=17)
        model: nn.Module = transformers.GPT2LMHeadModel(config)
        return model

    shown = plan_generate(
        build, MACHINE, sizes={"batch": 2, "prompt": 5, "new": 3}, sequences=["1@7"],
        search_batch=False,
    )  # fmt: skip
    batch, packed = page_data(plan_page.render(shown))["choices"]
    assert set(batch["times"]) == {"Prefill", "Step of decode"}
    assert set(packed["times"]) == {"Step of decode"}
    assert batch["times"]["Prefill"]["low"] == shown.choices[0].prefill.fused_s
    assert batch["value"].endswith(" tokens/s")
    assert "KV cache 2.69 KB" in batch["details"]  # 2 x 2 layers x 12 x 2 sequences x 7 tokens x 4


def test_plan_of_a_mesh_names_its_devices_and_shows_the_fullest_rank() -> None:
    def build(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        layers = [nn.Sequential(nn.Linear(IN, IN), nn.Tanh()) for _ in range(2)]
        return nn.Sequential(*layers), (torch.ones(batch, IN),)

    shown = plan(build, MACHINE, sizes={"batch": 3}, mesh={"dp": 2}, search_batch=False)
    (step,) = shown.steps
    (choice,) = page_data(plan_page.render(shown))["choices"]
    assert choice["details"][0] == "2 devices"
    assert choice["peak"] == step.peak_bytes == sum(choice["roles"].values())
