"""The README and the cookbook: snippets run, commands work, output and links are right."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import dispatch_flops
from dispatch_flops import Profile, unregister_flops
from dispatch_flops.cli import main
from dispatch_flops.errors import UnknownOperatorError
from dispatch_flops.operators import registry
from dispatch_flops.timing import peaks
from tests.helpers.interpreters import run_python
from tests.helpers.paths import BENCHMARKS, REPOSITORY

README = REPOSITORY / "README.md"
COOKBOOK = BENCHMARKS / "cookbook.md"
CHANGELOG = REPOSITORY / "CHANGELOG.md"
DOCUMENTS = (README, CHANGELOG, *sorted(BENCHMARKS.rglob("*.md")))
NOT_RUN = "Trainers and engines"  # needs an engine, a data set, Lightning

MODEL_FILE = """
import torch
from torch import nn

def make_model():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
"""
IDS_FILE = """
from torch import nn

def make_model():
    return nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 16))
"""
CONFIG_FILE = """
{"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 101,
 "n_positions": 2048, "bos_token_id": 0, "eos_token_id": 0}
"""


def headings(text: str) -> list[re.Match[str]]:
    """Return the headings of a page; a comment in a snippet is not one."""
    hidden = re.sub(r"^```.*?^```", lambda m: " " * len(m[0]), text, flags=re.MULTILINE | re.DOTALL)
    return list(re.finditer(r"^(#+) (.*)$", hidden, flags=re.MULTILINE))


def section(path: Path, title: str) -> str:
    """Return the text below a heading, up to the next one of its level or above."""
    text = path.read_text(encoding="utf-8")
    found = headings(text)
    (start,) = (heading for heading in found if heading[2] == title)
    below = (h.start() for h in found if h.start() > start.end() and len(h[1]) <= len(start[1]))
    return text[start.end() : next(below, None)]


def blocks(text: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def python_of(path: Path) -> list[str]:
    return blocks(path.read_text(encoding="utf-8"))


def run(code: str, names: dict[str, Any]) -> None:
    """Run a snippet; graphs are compiled without inductor, which takes a minute."""
    exec(compile(code.replace('"inductor"', '"aot_eager"'), "snippet", "exec"), names)


@pytest.fixture
def library() -> Iterator[None]:
    """Define the operators that the snippets register formulas for."""
    lib = torch.library.Library("mylib", "FRAGMENT")
    lib.define("fused_mlp(Tensor x, Tensor w1, Tensor w2) -> Tensor")
    lib.define("fused_mlp_backward(Tensor grad, Tensor x, Tensor w1, Tensor w2) -> Tensor")
    lib.impl("fused_mlp", lambda x, w1, w2: x @ w1 @ w2, "CPU")
    lib.impl("fused_mlp_backward", lambda grad, x, w1, w2: torch.empty_like(x), "CPU")
    yield
    for op in (torch.ops.mylib.fused_mlp, torch.ops.mylib.fused_mlp_backward):
        with contextlib.suppress(UnknownOperatorError):
            unregister_flops(op)
    lib._destroy()


@pytest.fixture
def small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure a machine by small products: large ones take seconds where bfloat16 is emulated."""
    measure = peaks._matmul_flops_per_s
    monkeypatch.setattr(
        peaks,
        "_matmul_flops_per_s",
        lambda operand, repeats: measure(operand[:64, :64].contiguous(), repeats),
    )


class TestReadme:
    def test_quick_start_prints_what_is_shown(self, capsys: pytest.CaptureFixture[str]) -> None:
        text = section(README, "Quick start")
        (code,), (shown,) = blocks(text), blocks(text, "text")
        run(code, {})
        printed = capsys.readouterr().out
        lines = [line.rstrip() for line in printed.splitlines() if not line.startswith("Device ")]
        expected = shown.splitlines()
        assert lines[: len(expected)] == expected

    def test_snippets_run_in_order(self, library: None) -> None:
        names: dict[str, Any] = {
            "y": torch.ones(8, 64),
            "loader": [(torch.ones(8, 64), torch.ones(8, 64))] * 6,
            "loss_fn": nn.MSELoss(),
            "make_model": lambda: nn.Linear(64, 7),
        }
        for code in python_of(README):
            run(code, names)
            names["optimizer"] = names.get("optimizer") or torch.optim.AdamW(
                names["model"].parameters()
            )
        assert names["fc"].profile.total("backward").macs == 8 * 64 * 256 * 3
        assert names["meter"].run.total.macs == 6 * 8 * 64 * 256 * (2 + 3)
        assert names["macs"] == "262.14 KMACs"
        assert names["cluster"].total("backward").macs == 64 * 8 * 64 * 7

    def test_size_is_about_nine_kilobytes(self) -> None:
        assert len(README.read_bytes()) <= 10_000

    def test_two_commands_set_everything_up(self) -> None:
        commands = re.findall(
            r"^```sh\n(python3 -m venv .*?)$", README.read_text(encoding="utf-8"), re.MULTILINE
        )
        assert commands == [
            "python3 -m venv .venv && .venv/bin/pip install -q -c tests/constraints.txt . "
            "&& .venv/bin/dispatch-flops demo",
            "python3 -m venv .venv && .venv/bin/pip install -q -c tests/constraints.txt '.[test]' "
            "&& .venv/bin/python -m pytest -n 2 --dist loadfile",
        ]
        assert (REPOSITORY / "tests" / "constraints.txt").is_file()

    def test_table_of_rooms_names_every_room(self) -> None:
        package = Path(dispatch_flops.__file__).parent
        rooms = {path.parent.name for path in package.glob("*/__init__.py")}
        table = section(README, "Contributing")
        assert {f"`{room}/`" for room in rooms} == set(re.findall(r"`\w+/`(?= \||,)", table))
        assert {"errors", "units"} <= set(re.findall(r"`(\w+)`", table))

    def test_accuracy_is_that_of_the_results(self) -> None:
        shown = section(README, "Accuracy")
        for name in ("probes", "peers"):
            results = section(BENCHMARKS / "results" / f"{name}.md", "Exact rows")
            exact = re.findall(r"\d+/\d+", results)
            (row,) = re.findall(rf"^\| \[\w+\]\(.*{name}\.md\).*$", shown, re.MULTILINE)
            assert re.findall(r"\d+/\d+", row) == exact


def pytest_exit(folder: Path, code: str, *options: str) -> tuple[int, str]:
    """Run a file of tests with the package's plugin; return the exit status and the output."""
    (folder / "test_cost.py").write_text(code, encoding="utf-8")
    plugin = ("-p", "dispatch_flops.integrations.pytest_plugin", "-p", "no:cacheprovider")
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = run_python("-m", "pytest", "-q", *plugin, *options, "test_cost.py", cwd=folder, env=env)
    return done.returncode, done.stdout


class TestCookbook:
    def test_there_are_ten_recipes(self) -> None:
        assert len(blocks(section(COOKBOOK, "Recipes"))) == 10

    @pytest.mark.slow
    @pytest.mark.parametrize("number", range(10))
    def test_recipe_runs_on_its_own(
        self,
        number: int,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        run(blocks(section(COOKBOOK, "Recipes"))[number], {})
        assert capsys.readouterr().out

    def test_demo_prints_what_is_shown(self, capsys: pytest.CaptureFixture[str]) -> None:
        (shown,) = blocks(section(COOKBOOK, "Command line"), "text")
        assert main(["demo", "--device", "meta"]) == 0
        printed = capsys.readouterr().out
        lines = [line.rstrip() for line in printed.splitlines() if not line.startswith("Device ")]
        expected = shown.splitlines()
        assert lines[: len(expected)] == expected

    @pytest.mark.slow
    @pytest.mark.usefixtures("small_matrices")
    def test_usage_runs_in_order(self, library: None) -> None:
        skipped = blocks(section(COOKBOOK, NOT_RUN))
        names: dict[str, Any] = {}
        for code in blocks(section(COOKBOOK, "Usage in full")):
            if code not in skipped:
                run(code, names)
        assert names["p"].total("backward").macs == 8 * 64 * 256 * 3
        assert names["net_macs"] == 8 * 30 * 30 * (3 * 3 * 3 + 10)
        assert names["prof"].get_total_macs() == 8 * 64 * 256 * 2
        assert names["cluster"].ranks[77].total("forward").macs == 8 * 64 * 256 * 2 // 8
        assert names["merged"].ranks == {0: names["fc"].profile}

    def test_commands_of_a_training_step_succeed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("model.py").write_text(MODEL_FILE, encoding="utf-8")
        text = section(COOKBOOK, "Whole training steps on the command line")
        (commands,), (shown,) = blocks(text, "sh"), blocks(text, "text")
        for line in commands.splitlines():
            assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().err
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in shown.splitlines() if line not in lines] == []

    @pytest.mark.slow
    def test_stored_baseline_fails_as_is_shown(self, tmp_path: Path) -> None:
        text = section(COOKBOOK, "Tests of a model's cost")
        (code,) = (code for code in blocks(text) if "test_cost.py" in code)
        (shown,) = blocks(text, "text")
        assert pytest_exit(tmp_path, code, "--update-flops")[0] == 0
        assert pytest_exit(tmp_path, code)[0] == 0
        status, printed = pytest_exit(tmp_path, code.replace("width, 8", "width, 16"))
        assert status == 1
        assert [line for line in shown.splitlines() if line not in printed] == []

    def test_custom_formulas_count_what_they_say(self, library: None) -> None:
        (code,) = blocks(section(COOKBOOK, "Custom operators"))
        names: dict[str, Any] = {
            "model": nn.GELU(),
            "x": torch.ones(2, 3),
            "FlopCounterMode": dispatch_flops.FlopCounterMode,
        }
        run(code, names)
        x, w1, w2 = torch.ones(2, 3), torch.ones(3, 5), torch.ones(5, 7)
        with dispatch_flops.FlopCounterMode(display=False) as counter:
            torch.ops.mylib.fused_mlp(x, w1, w2)
            torch.ops.mylib.fused_mlp_backward(torch.ones(2, 7), x, w1, w2)
        found = counter.profile.by_operator()
        macs = 2 * (3 * 5 + 5 * 7)
        forward = found["mylib.fused_mlp.default"].cost
        assert forward is not None
        assert (forward.macs, forward.flops) == (macs, 2 * macs)
        backward = found["mylib.fused_mlp_backward.default"].cost
        assert backward is not None
        assert backward.flops == 2 * 2 * macs


class Launcher:
    """Stands for a Triton kernel where there is no Triton: it launches, and computes nothing."""

    def __init__(self, fn: Any) -> None:
        self.fn = self.run = fn

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert grid == (1,)
        return lambda *args, **options: None


def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("torch._dynamo")  # it reads more of triton when it is imported
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    triton.jit, triton.cdiv = Launcher, lambda a, b: -(-a // b)  # type: ignore[attr-defined]
    language.constexpr = int  # type: ignore[attr-defined]
    triton.language = language  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)


@pytest.fixture
def formulas_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_USER", dict(registry._USER))


@pytest.mark.usefixtures("formulas_restored")
class TestKernelsOfYourOwn:
    @pytest.mark.filterwarnings("ignore::dispatch_flops.UncountedWarning")
    def test_custom_attention_gets_from_the_first_warning_to_its_mfu(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        names: dict[str, Any] = {}
        code = blocks(section(COOKBOOK, "From the first warning to the right MFU"))
        for snippet in code:
            run(snippet, names)
        printed = capsys.readouterr().out
        assert "mykernels.attention.default" in printed
        assert "mykernels.attention_backward.default" in printed
        assert "MFU" in printed
        needed = 2 * 4 * (64 * 65 // 2) * 2 * 32  # pairs of a causal kernel, two products
        profile = names["fc"].profile
        assert profile.total("forward").macs == needed
        assert profile.total("backward").macs == 2 * needed
        assert profile.total("recompute").macs == needed // 2
        (formulas,) = [snippet for snippet in code if "@register_flops" in snippet]
        lines = [line for line in formulas.splitlines() if line and "import" not in line]
        assert len(lines) == 6

    def test_triton_kernel_in_a_custom_operator_counts(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        if importlib.util.find_spec("triton") is None or not torch.cuda.is_available():
            without_triton(monkeypatch)
        (code,) = blocks(section(COOKBOOK, "A Triton kernel"))
        run(code, {})
        assert capsys.readouterr().out == f"{8 * 64}\n"

    @pytest.mark.slow
    @pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
    @pytest.mark.filterwarnings("ignore::dispatch_flops.UncountedWarning")
    def test_cpp_extension_is_listed_and_with_its_formula_counted(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        if shutil.which("ninja") is None:
            pytest.skip("no ninja")
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
        (code,) = blocks(section(COOKBOOK, "A C++ extension"))
        run(code, {})
        listed, macs = capsys.readouterr().out.splitlines()[-2:]
        assert listed == "{'myextension.product.default': 1}"
        assert macs == str(3 * 5 * 7)

    @pytest.mark.filterwarnings("ignore::dispatch_flops.UncountedWarning")
    def test_pybind_kernel_is_suspected_and_with_its_formula_counted(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        names: dict[str, Any] = {}
        for code in blocks(section(COOKBOOK, "A pybind kernel in an `autograd.Function`")):
            run(code, names)
        suspected, counted = capsys.readouterr().out.splitlines()
        assert "1 (Scale) ran and holds parameters" in suspected
        assert counted == "8 16"


@pytest.mark.parametrize("path", [README, COOKBOOK], ids=["readme", "cookbook"])
@pytest.mark.usefixtures("small_matrices")
def test_commands_succeed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    files = {"model.py": MODEL_FILE, "ids.py": IDS_FILE, "config.json": CONFIG_FILE}
    for name, text in files.items():
        Path(name).write_text(text, encoding="utf-8")
    model = nn.Linear(3, 5)
    adapted = nn.Sequential(OrderedDict(base_model=nn.Sequential(OrderedDict(model=model))))
    for name, profiled in (("before.json", model), ("after.json", adapted)):
        saved = dispatch_flops.profile_model(profiled, (2, 3))
        Path(name).write_text(saved.to_json(), encoding="utf-8")
    (commands,) = blocks(section(path, "Command line"), "sh")
    for line in commands.splitlines():
        program, *arguments = shlex.split(line, comments=True)
        assert program == "dispatch-flops"
        assert main(arguments) == 0, (line, capsys.readouterr().err)
    written = Profile.from_json(Path("p.json").read_text(encoding="utf-8"))
    assert written.total().macs == 8 * 64 * 256 * 2


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_snippets_import_what_exists(path: Path) -> None:
    for code in python_of(path):
        for node in ast.walk(ast.parse(code)):
            if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("dispatch"):
                continue
            framework = str(node.module).rpartition(".")[2]
            if framework == "lightning" and importlib.util.find_spec(framework) is None:
                continue
            module = importlib.import_module(str(node.module))
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def anchors(path: Path) -> set[str]:
    """Return the anchors that a page's headings get."""
    titles = [heading[2].lower() for heading in headings(path.read_text(encoding="utf-8"))]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        page = path.parent / file if file else path
        assert page.is_file(), target
        assert not anchor or anchor in anchors(page), target
