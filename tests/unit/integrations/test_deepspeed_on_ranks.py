"""DeepSpeed engines on several ranks, played and real: rank 0 has the merged profiles."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dispatch_flops import Profile
from dispatch_flops.distributed import ClusterProfile
from dispatch_flops.integrations.deepspeed import EngineProfiler, attach
from tests.helpers.engine import Engine
from tests.helpers.paths import REPOSITORY
from tests.helpers.ranks import run_on_ranks

B, IN, OUT = 2, 3, 5
MICRO_BATCHES = 7
FORWARD = B * IN * OUT


def _attached(**options: Any) -> tuple[Engine, EngineProfiler, torch.Tensor]:
    """Return an engine of this rank with inputs of which rank r has r + 1 times as many rows."""
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    engine = Engine(
        nn.Linear(IN, OUT),
        micro_batches=MICRO_BATCHES,
        micro_batch_size=B,
        global_rank=rank,
        world_size=world_size,
        dp_world_size=world_size,
    )
    return engine, attach(engine, **options), torch.ones((rank + 1) * B, IN)


def second_step() -> dict[str, Any]:
    """Profile the second of three steps."""
    engine, profiler, x = _attached()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for _ in range(3):
            engine.train_step(x)
    return {
        "cluster": profiler.cluster and profiler.cluster.to_json(),
        "profile": profiler.profile.to_json(),
        "printed": printed.getvalue(),
        "started": profiler.started,
        "has_own_step": "step" in vars(engine),
        "pre_hooks": len(engine.module._forward_pre_hooks),
        "modes": len(_get_current_dispatch_mode_stack()),
    }


def second_step_in_evaluation_mode() -> Any:
    engine, profiler, x = _attached()
    engine.train_step(x)
    engine.module.eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.train_step(x)
    return [str(warning.message) for warning in caught], profiler.started, profiler.cluster


def step_of_an_engine_whose_step_is_replaced() -> Any:
    """A framework may have set a ``step`` of its own on the engine."""
    rank = distributed.get_rank()
    engine = Engine(nn.Linear(IN, OUT), global_rank=rank, output_file=os.devnull)
    own, calls = engine.step, []
    engine.step = replaced = lambda: calls.append(own())  # type: ignore[method-assign]
    profiler = attach(engine)
    for _ in range(3):
        engine.train_step(torch.ones(B, IN))
    return len(calls), engine.step is replaced, profiler.profile.total("forward").macs


def step_that_raises_once() -> Any:
    """An input that does not fit ends the profiled step; then it is run again."""
    engine, profiler, x = _attached()
    engine.train_step(x)
    with contextlib.suppress(RuntimeError):
        engine.train_step(torch.ones(B, IN + 1))
    profiler.close()
    modes = len(_get_current_dispatch_mode_stack())
    with contextlib.redirect_stdout(io.StringIO()):
        engine.train_step(x)
    return modes, profiler.profile.root.total("forward").macs


def step_in_which_rank_1_dies() -> Any:
    engine, profiler, x = _attached(timeout_s=3)
    engine.train_step(x)
    if distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.redirect_stdout(io.StringIO()):
        engine.train_step(x)
    cluster = profiler.cluster
    assert cluster is not None
    return list(cluster.ranks), cluster.missing, cluster.notes, cluster.total("forward").macs


WORKLOADS = [
    second_step,
    second_step_in_evaluation_mode,
    step_of_an_engine_whose_step_is_replaced,
    step_that_raises_once,
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    names = [workload.__name__ for workload in WORKLOADS]
    return run_on_ranks(__file__, names, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
def test_engines_on_two_ranks_merge_their_profiles_on_rank_0(results: Any) -> None:
    first, second = results.of("second_step")
    cluster = ClusterProfile.from_json(first["cluster"])
    assert second["cluster"] is None
    for rank, result in enumerate((first, second)):
        profile = cluster.ranks[rank]
        assert profile == Profile.from_json(result["profile"])
        assert profile.run.rank == rank and profile.run.world_size == 2
        assert profile.run.step == 2
        assert profile.run.batch_size == MICRO_BATCHES * B
        # the input needs no gradient, so backward has the product of the weight's gradient alone
        macs = MICRO_BATCHES * (rank + 1) * FORWARD
        assert profile.total("forward").macs == profile.total("backward").macs == macs
        assert profile.total("optimizer").flops == 2 * (IN * OUT + OUT)  # p += -lr * grad
    assert cluster.straggler("macs") == 1
    assert not cluster.missing


@pytest.mark.slow
def test_rank_0_alone_prints_the_merged_ranks(results: Any) -> None:
    first, second = results.of("second_step")
    assert first["printed"].count("Profile Summary at step 2:") == 1
    assert "\n2 of 2 ranks\n" in first["printed"]
    assert second["printed"] == ""


@pytest.mark.slow
def test_engine_after_the_step_is_as_before(results: Any) -> None:
    for result in results.of("second_step"):
        assert not result["started"] and not result["has_own_step"]
        assert result["pre_hooks"] == 1  # the engine's own
        assert result["modes"] == 0


@pytest.mark.slow
def test_step_in_evaluation_mode_merges_nothing(results: Any) -> None:
    first, second = results.of("second_step_in_evaluation_mode")
    assert len(first[0]) == 1 and "step 2 was not profiled" in first[0][0]
    assert first[1:] == (False, None)
    assert second == ([], False, None)


@pytest.mark.slow
def test_step_of_the_engine_that_was_replaced_is_called_and_kept(results: Any) -> None:
    for result in results.of("step_of_an_engine_whose_step_is_replaced"):
        assert result == (3, True, FORWARD)


@pytest.mark.slow
def test_step_is_profiled_again_after_an_exception_in_it(results: Any) -> None:
    for rank, (modes, macs) in enumerate(results.of("step_that_raises_once")):
        assert modes == 0
        assert macs == MICRO_BATCHES * (rank + 1) * FORWARD


@pytest.mark.slow
@pytest.mark.whole
def test_a_rank_that_died_is_missing_in_the_merged_profile(tmp_path: Path) -> None:
    workload = "step_in_which_rank_1_dies"
    (result,) = run_on_ranks(__file__, [workload], 2, tmp_path, killed=1).of(workload)
    note = "no profile arrived from rank 1 within 3 s"
    assert result == ([0], (1,), (note,), MICRO_BATCHES * FORWARD)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_real_engines_on_two_ranks_print_one_merged_profile(stage: int, tmp_path: Path) -> None:
    """The program asserts MACs, parameters and communication of both ranks."""
    pytest.importorskip("deepspeed")
    printed = tmp_path / "profile.txt"
    script = REPOSITORY / "tests" / "helpers" / "real_engine.py"
    torchrun = "torch.distributed.run --standalone --nproc-per-node 2"
    run = subprocess.run(
        [sys.executable, "-m", *torchrun.split(), str(script), str(stage), str(printed)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    text = printed.read_text()
    assert text.count("Profile Summary at step 2:") == 1
    assert "\n2 of 2 ranks\n" in text
