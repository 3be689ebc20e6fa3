"""Instructions that counting adds to small programs: figures that no other process disturbs.

    python benchmarks/instructions.py [--only PATTERN]    # needs valgrind and a C compiler

The programs of overhead.py, small enough that nearly all they do is Python and dispatch. Callgrind
counts the instructions of one run, in millions, after runs that have warmed up everything. A run of
it differs from the next by less than 1 %. What no instruction shows, such as what the products of a
large model leave in the processor's caches, is overhead.py's to measure.

- steady: the program once more inside a block that is already entered.
- one shot: entering, running once, leaving and reading the totals; enter and leave are parts of it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from overhead import _adamw, _first_tensor, variants
from tabulate import tabulate
from torch import nn

from dispatch_flops import FlopCounterMode
from dispatch_flops.cli import demo

REQUESTS = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void stop(void) { CALLGRIND_DUMP_STATS; CALLGRIND_STOP_INSTRUMENTATION; }
"""
COMPARED = ("plain", "floor", "floor, hooks", "dispatch_flops", "with memory")
Program = tuple[nn.Module | None, Callable[[], Any]]


def small_bert() -> nn.Module:
    """Return BERT-base of 12 layers with vectors of 48 numbers."""
    demo.WIDTH, demo.INNER, demo.HEADS = 48, 96, 4
    return demo.bert_base()[0].eval()


def bert_forward() -> Program:
    bert, ids = small_bert(), torch.zeros(1, 16, dtype=torch.long)

    def run() -> None:
        with torch.no_grad():
            bert(ids)

    return bert, run


def bert_step() -> Program:
    bert, ids = small_bert(), torch.zeros(1, 16, dtype=torch.long)

    def run() -> None:
        _first_tensor(bert(ids)).sum().backward()
        bert.zero_grad()

    return bert, run


def linears() -> Program:
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(400))), torch.randn(8, 8)

    def run() -> None:
        with torch.no_grad():
            model(x)

    return model, run


def products() -> Program:
    a, b = torch.randn(8, 8), torch.randn(8, 8)

    def run() -> None:
        for _ in range(400):
            torch.mm(a, b)

    return None, run


PROGRAMS: dict[str, Callable[[], Program]] = {
    "400 matmuls 8x8": products,
    "AdamW, 40 parameters": lambda: (None, _adamw().step),
    "small BERT forward": bert_forward,
    "small BERT forward+backward": bert_step,
    "400 linears forward": linears,
}


# -- the process that callgrind runs ---------------------------------------------------------------


def measure(name: str, library: str) -> None:
    """Run a program in every way, and have callgrind write the instructions of each."""
    requests = ctypes.CDLL(library)
    model, run = PROGRAMS[name]()
    torch.set_num_threads(1)
    gc.disable()

    def count(what: str, function: Callable[[], Any]) -> None:
        gc.collect()
        requests.start()
        function()
        requests.stop()
        print(f"counted {what}", flush=True)

    contexts = variants(model)
    for variant in COMPARED:
        context = contexts[variant]

        def once(context: Any = context) -> None:
            with context():
                run()

        once(), once()
        with context():
            run(), run(), run()
            count(f"steady/{variant}", run)
        if model is not None:
            count(f"one shot/{variant}", once)
    if model is not None:
        counter = FlopCounterMode(model, display=False)
        count("one shot/enter", counter.__enter__)
        run()
        count("one shot/leave", lambda: counter.__exit__(None, None, None))
        count("one shot/profile", lambda: counter.profile.root)


# -- the process that prints -----------------------------------------------------------------------


def instructions_of(name: str, library: str, folder: Path) -> dict[str, int]:
    """Return the instructions of each way of running a program."""
    script = "import sys, instructions; instructions.measure(*sys.argv[1:])"
    out = folder / "callgrind.out"
    valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
    ran = subprocess.run(
        [*valgrind, sys.executable, "-c", script, name, library],
        env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    if ran.returncode:
        raise SystemExit(ran.stderr)
    counted = re.findall(r"^counted (.*)$", ran.stdout, re.MULTILINE)
    found = {}
    for number, what in enumerate(counted, start=1):
        written = Path(f"{out}.{number}").read_text()
        found[what] = int(re.findall(r"^(?:totals|summary): (\d+)", written, re.MULTILINE)[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="PATTERN", help="only programs it matches")
    given = parser.parse_args()
    steady, once = [], []
    parts = (*COMPARED, "enter", "leave", "profile")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "requests.c"), str(Path(folder, "requests.so"))
        source.write_text(REQUESTS)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        for name in filter(re.compile(given.only).search, PROGRAMS):
            found = instructions_of(name, library, Path(folder))
            millions = {what: f"{number / 1e6:.2f}" for what, number in found.items()}
            steady.append([name, *(millions[f"steady/{variant}"] for variant in COMPARED)])
            if "one shot/plain" in found:
                once.append([name, *(millions[f"one shot/{part}"] for part in parts)])
    print(tabulate(steady, ["steady, millions", *COMPARED], floatfmt=".2f"))
    print()
    print(tabulate(once, ["one shot, millions", *parts], floatfmt=".2f"))


if __name__ == "__main__":
    main()
