"""``ops``: the registry and what it covers."""

from __future__ import annotations

import csv
import io
import re
import sys
from typing import Any

import pytest
import torch

from dispatch_flops import OpCost, register_flops, unregister_flops
from dispatch_flops.cli.ops import cost_of, coverage
from dispatch_flops.operators import registry
from tests.helpers.command_line import Run, error_line

FACTORISATIONS = """
    linalg_cholesky_ex linalg_lu_factor_ex linalg_ldl_factor_ex geqrf linalg_qr ormqr _linalg_svd
    linalg_householder_product _linalg_eigh linalg_eig linalg_eigvals _linalg_solve_ex
    linalg_lu_solve cholesky_solve linalg_ldl_solve linalg_solve_triangular triangular_solve
    linalg_inv_ex cholesky_inverse linalg_lstsq _linalg_det _linalg_slogdet
"""


class TestList:
    def test_row_has_kind_cost_and_source(self, run: Run) -> None:
        rows = list(csv.DictReader(io.StringIO(run("ops", "--format", "csv").out)))
        by_name = {row["Operator"]: row for row in rows}
        assert by_name["aten.mm"]["Kind"] == "formula"
        assert "M·N·K" in by_name["aten.mm"]["Cost"]
        assert by_name["aten.view"]["Kind"] == "free"
        assert by_name["aten.gelu"]["Kind"] == "pointwise"
        assert all(row["Cost"] for row in rows)

    @pytest.mark.usefixtures("odd_operator")
    def test_formula_of_the_user_is_listed_with_its_docstring(self, run: Run) -> None:
        @register_flops(torch.ops.cli_test.odd)
        def odd(x: torch.Tensor, *, out: Any, **_: Any) -> OpCost:
            """Something odd.

            MACs: none.
            FLOPs: 3 per
                element. Source: thin air.
            """
            return OpCost()

        try:
            result = run("ops", "--filter", "cli_test.*", "--format", "csv")
        finally:
            unregister_flops(torch.ops.cli_test.odd)
        rows = list(csv.reader(io.StringIO(result.out)))
        assert rows[1:] == [
            ["cli_test.odd", "formula", "MACs: none. FLOPs: 3 per element.", "thin air"]
        ]

    def test_costs_name_operators_and_arguments_but_no_function_of_a_formula(self) -> None:
        rules = registry.rules()
        operators = {*rules, *(name.partition(".")[2] for name in rules)}
        for operator, rule in rules.items():
            functions = vars(sys.modules[rule.formula.__module__])
            for name in set(re.findall(r"``([^`]+)``", cost_of(rule))) - operators:
                assert name.partition(".")[0] not in functions, operator
                assert not name.startswith("_"), operator

    def test_cost_of_attention_says_which_scores_the_kernel_masks_and_drops(self) -> None:
        costs = {name: cost_of(rule) for name, rule in registry.rules().items()}
        flash = costs["aten._scaled_dot_product_flash_attention"]
        assert "1 per pair if causal" in flash and "2 per pair with dropout" in flash
        on_cpu = costs["aten._scaled_dot_product_flash_attention_for_cpu"]
        assert "1 per pair if masked or causal" in on_cpu and "dropout" not in on_cpu
        assert "alibi" in costs["flash_attn._flash_attn_varlen_forward"]
        assert "dropout" in costs["flash_attn._flash_attn_varlen_forward"]

    def test_cost_without_macs_and_flops_is_the_whole_docstring(self) -> None:
        cost = cost_of(registry.rules()["aten._ctc_loss_backward"])
        assert "13 per cell" in cost and "In total 22 per cell" in cost
        assert "Source" not in cost

    def test_cost_of_a_factorisation_is_a_number_of_operations(self) -> None:
        rules = registry.rules()
        for name in FACTORISATIONS.split():
            assert "FLOPs" in cost_of(rules[f"aten.{name}"]), name

    @pytest.mark.parametrize("pattern", ["aten.addmm", "aten.addm*"])
    def test_filter_takes_parts_and_patterns_of_names(self, run: Run, pattern: str) -> None:
        lines = run("ops", "--filter", pattern).out.splitlines()
        assert any(line.startswith("aten.addmm ") for line in lines)
        assert not any(line.startswith("aten.bmm ") for line in lines)

    def test_markdown_quotes_names(self, run: Run) -> None:
        assert "| `aten.addmm` " in run("ops", "--filter", "aten.addmm", "--markdown").out

    def test_filter_that_matches_nothing_is_refused(self, run: Run) -> None:
        assert error_line(run("ops", "--filter", "nothing_like_it")) == (
            "no operator matches 'nothing_like_it'; omit the text to list all"
        )

    def test_text_alone_filters(self, run: Run) -> None:
        out = run("ops", "aten.addmm").out
        assert "aten.addmm" in out and out == run("ops", "--filter", "aten.addmm").out

    def test_two_filters_are_refused(self, run: Run) -> None:
        message = error_line(run("ops", "mm", "--filter", "bmm"))
        assert message == "TEXT and --filter are both given; give one of them"


class TestCoverage:
    def test_overloads_are_sorted_into_kinds_except_composites(self, run: Run) -> None:
        found, total = coverage()
        assert "aten.mm.default" in found["formula"]
        assert "aten.view.default" in found["free"]
        listed = {op for ops in found.values() for op in ops}
        assert "aten.matmul.default" not in listed  # composite
        assert len(listed) == sum(map(len, found.values())) < total
        out = run("ops", "--coverage").out
        assert f"Without a cost ({len(found.get('none', []))})" in out or not found.get("none")

    def test_csv_is_refused(self, run: Run) -> None:
        assert error_line(run("ops", "--coverage", "--format", "csv")) == (
            "--format csv is not available with --coverage; use table or markdown"
        )
