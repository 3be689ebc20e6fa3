"""Overhead of the working tree against another revision's, in one interleaved run.

    python benchmarks/overhead.py --against REVISION [--only PATTERN]

Two processes, one per import root, run the same programs in turns on one core. What counts is the
processor time that counting adds to the bare program, which runs just before it: the median over
all turns of three pairs of processes, with garbage collection off. A figure that is more than 10 %
above the other revision's is measured again, in seven pairs. The exit status is 1 if it is above
10 % again.
"""

from __future__ import annotations

import gc
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PROGRAMS = ("10,000 adds 8x8", "BERT-base b1 s16 forward", "1,000 linears forward")
LIMIT = 1.10
TURNS = 15
ROUNDS, MORE_ROUNDS = 3, 7
ROUNDING_S = 20e-6  # of differences between two runs of one program

# -- a worker: measures the dispatch_flops that it can import ---------------------------------


def run_plain(model: Any, run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def run_steady(model: Any, run: Callable[[], Any]) -> float:
    from dispatch_flops import FlopCounterMode

    with FlopCounterMode(model, display=False):
        run()
        start = time.process_time()
        run()
        return time.process_time() - start


def run_once(model: Any, run: Callable[[], Any]) -> float:
    """Return the seconds of entering, running, leaving and reading the totals."""
    from dispatch_flops import FlopCounterMode

    counter = FlopCounterMode(model, display=False)
    start = time.process_time()
    with counter:
        run()
    counter.get_total_macs(), counter.get_total_flops()
    return time.process_time() - start


def run_whole(model: Any, run: Callable[[], Any]) -> float:
    """Return the seconds of ``run_once``, with all of the profile's tree."""
    from dispatch_flops import FlopCounterMode

    counter = FlopCounterMode(model, display=False)
    start = time.process_time()
    with counter:
        run()
    counter.get_total_macs(), counter.profile.root.total()
    return time.process_time() - start


MEASURES = {
    "plain": run_plain,
    "steady": run_steady,
    "one shot": run_once,
    "whole profile": run_whole,
}


def work() -> None:
    """Answer each line ``[program, measure]`` with the seconds of one run."""
    import overhead  # the file beside this one
    import torch

    import dispatch_flops

    torch.set_num_threads(1)
    overhead.keep_freed_memory()
    programs = overhead.workloads()
    for model, run, _ in (programs[name] for name in PROGRAMS):
        run_whole(model, run)
    print(json.dumps(dispatch_flops.__file__), flush=True)
    for line in sys.stdin:
        program, measure = json.loads(line)
        model, run, _ = programs[program]
        gc.collect()
        gc.disable()
        seconds = MEASURES[measure](model, run)
        gc.enable()
        print(json.dumps(seconds), flush=True)


# -- the comparison ---------------------------------------------------------------------------


@contextmanager
def revision_root(revision: str) -> Iterator[Path]:
    """Extract the package as it was at a revision; the working tree stays as it is."""
    command = ["git", "-C", str(ROOT), "archive", revision, "dispatch_flops"]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)


class Worker:
    """A process that measures the package below ``root``, on one processor core."""

    def __init__(self, root: Path, core: int | None) -> None:
        self._process = subprocess.Popen(
            # -P: the current folder may hold the package, too
            [sys.executable, "-P", "-c", "import overhead_gate; overhead_gate.work()"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(root), str(HERE)))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if core is not None:
            os.sched_setaffinity(self._process.pid, {core})
        found = Path(self._answer())
        if not found.is_relative_to(root):
            raise SystemExit(f"the worker imported {found}, which is not below {root}")

    def seconds(self, program: str, measure: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([program, measure]) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with exit status {self._process.wait()}")
        return json.loads(line)


def added_seconds(
    roots: tuple[Path, Path], core: int | None, program: str, measure: str, rounds: int
) -> tuple[float, float]:
    """Return the seconds that the package below each root adds to the bare program.

    That is the median of the rounds' medians. Each round has two new workers, for where a process
    happens to have its tensors makes a difference to it.
    """
    added: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        workers = Worker(roots[0], core), Worker(roots[1], core)
        differences: tuple[list[float], list[float]] = ([], [])
        for turn in range(TURNS):
            for side in (0, 1) if turn % 2 else (1, 0):
                plain = workers[side].seconds(program, "plain")
                differences[side].append(workers[side].seconds(program, measure) - plain)
        for side, worker in enumerate(workers):
            added[side].append(median(differences[side]))
            worker.stop()
    before, after = (max(median(seconds), ROUNDING_S) for seconds in added)
    return before, after


def compare(revision: str, only: str = "") -> int:
    """Print the overhead of both; return 1 if the working tree's is more than 10 % higher."""
    core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    rows, slower = [], []
    with revision_root(revision) as root:
        for program in filter(re.compile(only).search, PROGRAMS):
            for measure in (name for name in MEASURES if name != "plain"):
                compared = (root, ROOT), core, program, measure
                before, after = added_seconds(*compared, rounds=ROUNDS)
                if is_slower(before, after):
                    before, after = added_seconds(*compared, rounds=MORE_ROUNDS)
                if is_slower(before, after):
                    slower.append(f"{program}, {measure}")
                ratio = f"{after / before:.2f}"
                rows.append([program, measure, f"{before * 1e3:.2f}", f"{after * 1e3:.2f}", ratio])
                print(f"{program}: {measure}", file=sys.stderr)
    print(tabulate(rows, ["program", "added ms", revision, "working tree", "ratio"]))
    for name in slower:
        print(f"more than {LIMIT - 1:.0%} slower than {revision}: {name}", file=sys.stderr)
    return 1 if slower else 0


def is_slower(before: float, after: float) -> bool:
    """Return True if the overhead grew by more than 10 %, and by more than a run varies."""
    return after > LIMIT * before and after - before > ROUNDING_S
