"""Overhead of the working tree against another revision's, in one interleaved run.

    python benchmarks/overhead.py --against REVISION [--only PATTERN]

Two processes, one per import root, run the same programs in turns on one core. What counts is the
processor time that counting adds to the bare program, which runs just before it: the median over
all turns of three pairs of processes, with garbage collection off. A figure that is more than 10 %
above the other revision's is measured again, in seven pairs. The exit status is 1 if it is above
10 % again. With one figure in doubt, it took eight minutes.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
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
    "steady": run_steady,
    "one shot": run_once,
    "whole profile": run_whole,
}


def work() -> None:
    """Answer each line ``[program, measure]`` with the seconds that counting adds to one run."""
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
        bare = run_plain(model, run)
        added = MEASURES[measure](model, run) - bare
        gc.enable()
        print(json.dumps(added), flush=True)


# -- the comparison ---------------------------------------------------------------------------


@contextmanager
def revision_root(revision: str) -> Iterator[Path]:
    """Extract the package as it was at a revision; the working tree stays as it is."""
    command = ["git", "-C", str(ROOT), "archive", revision, "dispatch_flops"]
    archived = subprocess.run(command, capture_output=True)
    if archived.returncode:
        raise SystemExit(f"git has no package at {revision}: {archived.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as files:
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

    def added_seconds(self, program: str, measure: str) -> float:
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


Case = tuple[str, str]  # a program and a measure


def added_seconds(
    roots: tuple[Path, Path], cases: Sequence[Case], rounds: int
) -> dict[Case, tuple[float, float]]:
    """Return the seconds that the package below each root adds to the bare programs.

    That is the median of the rounds' medians. Each round has two new workers, for where a process
    happens to have its tensors makes a difference to it.
    """
    medians: dict[Case, tuple[list[float], list[float]]] = {case: ([], []) for case in cases}
    for number in range(rounds if cases else 0):
        with workers(roots) as pair:
            for case in cases:
                added: tuple[list[float], list[float]] = ([], [])
                for turn in range(TURNS):
                    for side in (0, 1) if turn % 2 else (1, 0):
                        added[side].append(pair[side].added_seconds(*case))
                for side in (0, 1):
                    medians[case][side].append(median(added[side]))
        print(f"pair of processes {number + 1} of {rounds}", file=sys.stderr)
    return {
        case: (max(median(before), ROUNDING_S), max(median(after), ROUNDING_S))
        for case, (before, after) in medians.items()
    }


@contextmanager
def workers(roots: tuple[Path, Path]) -> Iterator[tuple[Worker, Worker]]:
    """Start a worker for each root, both on one core."""
    core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    pair = Worker(roots[0], core), Worker(roots[1], core)
    yield pair
    for worker in pair:
        worker.stop()


def compare(revision: str, only: str = "") -> int:
    """Print the overhead of both; return 1 if the working tree's is more than 10 % higher."""
    cases = [*product(filter(re.compile(only).search, PROGRAMS), MEASURES)]
    if not cases:
        raise SystemExit(f"no program matches {only!r}; there are {', '.join(PROGRAMS)}")
    with revision_root(revision) as root:
        added = added_seconds((root, ROOT), cases, ROUNDS)
        doubted = [case for case in cases if is_slower(*added[case])]
        added |= added_seconds((root, ROOT), doubted, MORE_ROUNDS)
    rows = [
        [*case, f"{before * 1e3:.2f}", f"{after * 1e3:.2f}", f"{after / before:.2f}"]
        for case, (before, after) in added.items()
    ]
    print(tabulate(rows, ["program", "added ms", revision, "working tree", "ratio"]))
    slower = [case for case in cases if is_slower(*added[case])]
    for program, measure in slower:
        print(
            f"more than {LIMIT - 1:.0%} slower than {revision}: {program}, {measure}",
            file=sys.stderr,
        )
    return 1 if slower else 0


def is_slower(before: float, after: float) -> bool:
    """Return True if the overhead grew by more than 10 %, and by more than a run varies."""
    return after > LIMIT * before and after - before > ROUNDING_S
