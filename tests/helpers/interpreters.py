"""Interpreters that start with torch imported, which is what takes longest in a short program.

Each is forked from a process that has imported torch and nothing of the package or of its tests.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

TIMEOUT_S = 300


def run_python(
    *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python -c CODE ...`` or ``python -m MODULE ...`` and return its exit code and output.

    env: the whole environment of the program. Of Python's own variables it may set PYTHONPATH.
    """
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "stdout"), Path(folder, "stderr")
        err.touch()
        job = {
            "arguments": arguments,
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "outputs": [str(out), str(err)],
        }
        too_long = threading.Timer(TIMEOUT_S, os.killpg, (server.pid, signal.SIGKILL))
        too_long.start()
        try:
            server.stdin.write(json.dumps(job) + "\n")
            server.stdin.flush()
            answer = server.stdout.readline()
        finally:
            too_long.cancel()
        errors = err.read_text(encoding="utf-8")
        if not answer:
            _server.cache_clear()
            raise AssertionError(f"the program ran longer than {TIMEOUT_S} s: {errors}")
        return subprocess.CompletedProcess(
            arguments, int(answer), out.read_text(encoding="utf-8"), errors
        )


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Start the process that forks; it is one of this test process and ends with it."""
    server = subprocess.Popen(
        [sys.executable, "-P", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(server.communicate)
    return server


def _serve() -> None:
    """Fork for each line of stdin, a job, and answer with the exit code of the fork."""
    import torch  # noqa: F401

    gc.freeze()  # a fork that collects garbage would copy every page of memory

    for line in sys.stdin:
        fork = os.fork()
        if fork == 0:
            _run(**json.loads(line))
            return  # and end as every interpreter does
        _, status = os.waitpid(fork, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(arguments: list[str], cwd: str, env: dict[str, str], outputs: list[str]) -> None:
    """Run a program in this process, as the interpreter's own options ``-c`` and ``-m`` do."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for descriptor, path in enumerate([os.devnull, *outputs]):
        mode = os.O_WRONLY | os.O_CREAT if descriptor else os.O_RDONLY
        os.dup2(os.open(path, mode), descriptor)
    faulthandler.enable()
    option, program, *rest = arguments
    first = "" if option == "-c" else cwd
    sys.path[:0] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [option, *rest]
    if option == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(main))


if __name__ == "__main__":
    _serve()
