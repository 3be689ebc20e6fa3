"""Targets that are Python objects in files and modules."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import nn

from dispatch_flops.cli.targets.inputs import Inputs
from dispatch_flops.cli.targets.objects import MODEL, Factory, find_factory
from dispatch_flops.errors import TargetError


def _build(target: str) -> nn.Module:
    return find_factory(target, MODEL).build({})[0]


class TestFindFactory:
    @pytest.mark.parametrize(
        "target", ["net.py:Net", "net.py:model", "net.py:anything", "net.py:Holder.make", "net:Net"]
    )
    def test_name_in_a_file_or_module_builds_a_model(self, target: str) -> None:
        model, inputs = find_factory(target, MODEL).build({})
        assert type(model).__name__ == "Net"
        assert inputs is None

    def test_file_that_imports_its_neighbour_is_imported(self, tmp_path: Path) -> None:
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / "net_neighbour.py").write_text("WIDTH = 11\n")
        (tmp_path / "sub" / "net_main.py").write_text(
            "from net_neighbour import WIDTH\nfrom torch import nn\n"
            "def make(): return nn.Linear(WIDTH, 3)\n"
        )
        model = _build("sub/net_main.py:make")
        assert isinstance(model, nn.Linear)
        assert model.in_features == 11

    def test_module_of_a_package_is_imported(self, tmp_path: Path) -> None:
        (tmp_path / "pack").mkdir()
        (tmp_path / "pack" / "inner.py").write_text(Path("net.py").read_text())
        assert type(_build("pack.inner:Net")).__name__ == "Net"

    @pytest.mark.parametrize(
        "target,message",
        [
            ("net.py", f"target 'net.py' is incomplete; write net.py:NAME, where NAME is {MODEL}"),
            ("", f"target '' is incomplete; write package.module:NAME, where NAME is {MODEL}"),
            (":x", f"target ':x' is incomplete; write package.module:NAME, where NAME is {MODEL}"),
            (
                "c/config.json",
                "target 'c/config.json' is incomplete; write hf:c/config.json if it is the config "
                "of a transformers model",
            ),
            ("missing.py:x", "file 'missing.py' does not exist; check the path"),
            ("net.py:Nett", "net.py has no 'Nett'; did you mean Net?"),
            ("net.py:constant", f"net.py:constant is a value of type int; name {MODEL}"),
            ("bad.py:x", "importing bad.py raised SyntaxError: invalid syntax (bad.py, line 1)"),
            (
                "nested.py:x",
                "importing nested.py raised ModuleNotFoundError: No module named "
                "'missing_dependency'",
            ),
        ],
    )
    def test_target_without_a_factory_is_refused(
        self, target: str, message: str, tmp_path: Path
    ) -> None:
        (tmp_path / "bad.py").write_text("def (")
        (tmp_path / "nested.py").write_text("import missing_dependency")
        with pytest.raises(TargetError) as caught:
            find_factory(target, MODEL)
        assert str(caught.value) == message

    @pytest.mark.parametrize(
        "target,module",
        [("missing_package.inner:x", "missing_package"), ("net.missing:x", "net.missing")],
    )
    def test_missing_module_is_named(self, target: str, module: str) -> None:
        with pytest.raises(TargetError) as caught:
            find_factory(target, MODEL)
        assert str(caught.value) == (
            f"module '{module}' is neither installed nor in the current directory; for a file, "
            "write path/to/file.py:NAME"
        )

    def test_file_that_fails_to_import_leaves_no_module(self, tmp_path: Path) -> None:
        (tmp_path / "net_bad.py").write_text("raise RuntimeError('no')")
        with pytest.raises(TargetError):
            find_factory("net_bad.py:x", MODEL)
        assert "dispatch_flops_target_net_bad" not in sys.modules


class TestFactory:
    def test_variables_are_the_keyword_arguments(self) -> None:
        def function(positional: int, /, a: int, *rest: int, b: int = 2) -> None: ...

        assert Factory("f", function).variables == {"a", "b"}
        assert Factory("f", lambda **options: None).variables is None
        assert Factory("f", nn.Identity()).variables == frozenset()

    def test_call_passes_the_variables_that_it_takes(self) -> None:
        given = {"width": 11, "depth": 3}
        assert Factory("f", lambda width=5: width).call(given) == 11
        assert Factory("f", lambda **options: options).call(given) == given

    def test_pair_of_a_model_and_inputs_is_split(self) -> None:
        model, inputs = Factory("f", lambda: (nn.Identity(), [1, 2])).build({})
        assert isinstance(model, nn.Identity)
        assert inputs == Inputs((1, 2))

    @pytest.mark.parametrize(
        "name,message",
        [
            (
                "number",
                "net.py:number returned a value of type int; it must return an nn.Module, or a "
                "pair of a model and its inputs",
            ),
            (
                "needs",
                "net.py:needs needs width; give it with --set width=..., or name a function "
                "without required arguments",
            ),
            ("broken", "net.py:broken raised ValueError: first line"),
        ],
    )
    def test_build_that_fails_is_a_target_error(self, name: str, message: str) -> None:
        with pytest.raises(TargetError) as caught:
            _build(f"net.py:{name}")
        assert str(caught.value) == message
