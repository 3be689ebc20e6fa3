"""25 questions of a new user, answered by four tools: what is typed, how long it takes, the answer.

    pip install -c tests/constraints.txt '.[test,peers]'
    python benchmarks/tasks.py > benchmarks/results/tasks.md

Each answer is computed by a command of its own and compared with a truth that is derived by hand.
The exit status is 1 if one of this package's answers is wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tabulate import tabulate
from task_list import NET, TASKS, Task

OURS = "dispatch_flops"
TOOLS = (OURS, "torchinfo", "fvcore", "deepspeed")
REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a tool answered, the seconds that the command computed, and the lines typed."""

    text: str
    is_right: bool
    seconds: float
    lines: int

    def __str__(self) -> str:
        typed = f"{self.lines} line{'s' if self.lines > 1 else ''}, {self.seconds:.1f} s"
        return typed if self.is_right else f"**{self.text}** ({typed})"


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "net.py").write_text(NET)
        idle_s = answer_of(TASKS[0], "", folder).seconds
        found = [{tool: ask(task, tool, folder) for tool in TOOLS} for task in TASKS]
    print(text_of(found, idle_s))
    wrong = [
        task.question
        for task, answers in zip(TASKS, found, strict=True)
        if not (answers[OURS] and answers[OURS].is_right)
    ]
    for question in wrong:
        print(f"{OURS} differs from the truth: {question}", file=sys.stderr)
    return 1 if wrong else 0


def ask(task: Task, tool: str, folder: Path) -> Answer | None:
    """Return a tool's answer; None if it cannot answer."""
    code = task.ours if tool == OURS else task.others.get(tool)
    print(f"{task.question} {tool}", file=sys.stderr)
    return None if code is None else answer_of(task, code, folder)


def answer_of(task: Task, code: str, folder: Path) -> Answer:
    is_command = code.startswith("dispatch-flops")
    if is_command:
        run = code.replace("dispatch-flops", f"{sys.executable} -m dispatch_flops")
        command = ["bash", "-c", run]
    else:
        (folder / "typed.py").write_text(f"from net import *\n{code}\n")
        command = [sys.executable, "-W", "ignore", "typed.py"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    start = cpu_s()
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    seconds = cpu_s() - start
    text = (done.stdout.strip() or done.stderr.strip() or " ").splitlines()[-1]
    if task.truths == ("status 1",):
        failed_as_meant = is_command or "AssertionError" in done.stderr
        text = f"status {done.returncode}" if failed_as_meant else text
    seen = done.stdout if task.reads else text
    is_right = any(truth in seen if task.reads else truth == seen for truth in task.truths)
    lines = len([line for line in code.splitlines() if line.strip()])
    return Answer(text=text[:40], is_right=is_right, seconds=seconds, lines=lines)


def cpu_s() -> float:
    """Return the seconds that ended commands computed; other load does not lengthen them."""
    times = os.times()
    return times.children_user + times.children_system


def text_of(found: list[dict[str, Answer | None]], idle_s: float) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", *TOOLS[1:]))
    rows = [
        [number, task.question, *(answer or "cannot" for answer in answers.values())]
        for number, (task, answers) in enumerate(zip(TASKS, found, strict=True), 1)
    ]
    summary = [
        [
            tool,
            sum(bool(a[tool] and a[tool].is_right) for a in found),
            sum(bool(a[tool] and not a[tool].is_right) for a in found),
            sum(a[tool] is None for a in found),
        ]
        for tool in TOOLS
    ]
    parts = [
        "# 25 questions of a new user",
        f"Made by `python benchmarks/tasks.py`. {versions}; CPU.",
        "A small transformer, its input and helpers are given; everything else is typed, imports "
        "included. Seconds are those that the whole command computes, once, because the machine is "
        f"shared. A first command that only imports torch and the model took {idle_s:.1f}, so "
        "tenths of a second mean nothing. Bold answers are not "
        "the truth, which is derived from the sizes. *cannot*: the tool has no such figure; a "
        "formula or a calculation of the user's own is not considered.",
        "The questions were chosen by this project. Other tools were made for fewer of them: "
        "torchinfo shows shapes and parameters, fvcore and DeepSpeed's profiler count forward "
        "passes.",
        tabulate(summary, ["", "right", "not the truth", "cannot"], tablefmt="github"),
        tabulate(rows, ["", "question", *TOOLS], tablefmt="github", disable_numparse=True),
        *remarks(found),
        "## What is typed",
        *(typed(number, task) for number, task in enumerate(TASKS, 1)),
    ]
    return "\n\n".join(parts)


def remarks(found: list[dict[str, Answer | None]]) -> list[str]:
    """Return where another tool answers right with as few lines or fewer."""
    rows = []
    for number, answers in enumerate(found, 1):
        ours = answers[OURS]
        for tool in TOOLS[1:]:
            theirs = answers[tool]
            if ours and theirs and theirs.is_right and theirs.lines <= ours.lines:
                rows.append([number, tool, theirs.lines, ours.lines])
    headers = ["question", "tool", "its lines", "ours"]
    table = tabulate(rows, headers, tablefmt="github", disable_numparse=True)
    return ["## Where another tool answers as well", table]


def typed(number: int, task: Task) -> str:
    parts = [f"### {number}. {task.question}"]
    for tool, code in {OURS: task.ours, **task.others}.items():
        language = "sh" if code.startswith("dispatch-flops") else "python"
        parts.append(f"{tool}:\n\n```{language}\n{code}\n```")
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
