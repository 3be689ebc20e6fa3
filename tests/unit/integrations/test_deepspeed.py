"""A DeepSpeed engine, played and real, that profiles with this package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dispatch_flops.errors import ConfigError
from dispatch_flops.integrations.deepspeed import EngineProfiler, attach
from tests.helpers.engine import Engine
from tests.helpers.paths import REPOSITORY

B, S, D, H, V = 4, 5, 6, 7, 11
BODY = B * S * (D * H + H * D)
HEAD = B * S * D * V
FORWARD = BODY + HEAD
BACKWARD = 2 * FORWARD  # the embedding's output needs a gradient, so every matmul makes two
PARAMS = V * D + D * H + H + H * D + D
IDS = torch.zeros(B, S, dtype=torch.long)


class Tied(nn.Module):
    """A language model whose head, in the root's own forward, is the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.up = nn.Linear(D, H)
        self.down = nn.Linear(H, D)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.down(F.relu(self.up(self.embedding(ids))))
        return F.linear(hidden, self.embedding.weight)


def trained(steps: int = 4, **options: Any) -> tuple[Engine, EngineProfiler]:
    engine = Engine(Tied(), micro_batch_size=B, **options)
    profiler = attach(engine)
    for _ in range(steps):
        engine.train_step(IDS)
    return engine, profiler


def field(text: str, label: str) -> str:
    """The value of a line of the summary."""
    return next(line for line in text.splitlines() if line.startswith(f"{label}: "))[72:].strip()


def test_attached_engine_profiles_one_step_with_the_roots_own_operators(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine, profiler = trained()
    profile = profiler.profile.check()
    assert engine.flops_profiler is profiler
    assert profile.root.total("forward").macs == FORWARD
    assert profile.root.own("forward").macs == HEAD
    assert profile.root.total("backward").macs == BACKWARD
    assert profile.total("optimizer").flops == 2 * PARAMS  # p += -lr * grad
    assert profile.root.calls == profile.node("up").calls == 1
    assert profile.total_params == PARAMS
    out = capsys.readouterr().out
    assert out.count("Profile Summary at step 2:") == out.count("Profile Summary") == 1
    assert field(out, "batch size per GPU") == str(B)
    assert field(out, "world size") == field(out, "data parallel size") == "1"


def test_attached_engine_times_forward_backward_and_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    profile = trained()[1].profile
    latency = profile.root.latency_s
    assert latency is not None and 0 < latency < 60  # DeepSpeed: the time of day
    below = [child.latency_s for child in profile.root.children]
    assert all(seconds is not None and seconds <= latency for seconds in below)
    assert profile.timing.latency("backward") and profile.timing.latency("optimizer")
    out = capsys.readouterr().out
    for label in ("fwd latency", "bwd latency", "step latency", "iter latency", "samples/second"):
        assert field(out, label) != "n/a"


def test_micro_batches_are_profiled_as_one_step(capsys: pytest.CaptureFixture[str]) -> None:
    _, profiler = trained(micro_batches=3)
    profile = profiler.profile.check()
    assert profile.root.calls == 3
    assert profile.root.total("forward").macs == 3 * FORWARD
    assert profile.root.own("forward").macs == 3 * HEAD
    assert profile.root.total("backward").macs == 3 * BACKWARD
    assert profile.total("optimizer").flops == 2 * PARAMS  # one step; gradients add up outside it
    assert profile.run.batch_size == 3 * B
    assert capsys.readouterr().out.count("Profile Summary") == 1


def test_attached_engine_after_the_step_leaves_no_mode_or_hook() -> None:
    before = torch.nn.modules.module._global_forward_hooks.copy()
    _, profiler = trained(output_file=os.devnull)
    assert not profiler.started
    assert torch.nn.modules.module._global_forward_hooks == before
    assert not _get_current_dispatch_mode_stack()


def test_close_after_an_exception_leaves_no_mode_or_hook() -> None:
    engine, profiler = trained(steps=1)
    with pytest.raises(IndexError):
        engine.train_step(IDS + V)
    profiler.close()
    assert not _get_current_dispatch_mode_stack()
    assert not torch.nn.modules.module._global_forward_hooks


def test_evaluation_before_the_step_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    engine, profiler = trained(steps=1)
    with torch.no_grad():
        engine.module(IDS)
    engine.module.eval()
    engine.module(IDS)
    engine.module.train()
    engine.train_step(IDS)
    assert profiler.profile.root.total("forward").macs == FORWARD
    assert capsys.readouterr().out.count("Profile Summary") == 1


def test_step_in_evaluation_mode_warns_and_prints_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine, _ = trained(steps=1)
    engine.module.eval()
    with pytest.warns(UserWarning, match="step 2 was not profiled"):
        engine.train_step(IDS)
    assert not capsys.readouterr().out


def test_partitioned_parameters_are_counted_whole(capsys: pytest.CaptureFixture[str]) -> None:
    class Partitioned(nn.Module):
        """ZeRO-3: the parameter is empty but for the forward and says what it is."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(0))
            self.weight.ds_numel = H * D  # type: ignore[attr-defined]
            self.weight.group_name = "ep_size_3"  # type: ignore[attr-defined]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.ones(D, H, requires_grad=True)

    engine = Engine(Partitioned(), has_moe_layers=True)
    profiler = attach(engine)
    for _ in range(2):
        engine.train_step(torch.ones(B, D))
    assert profiler.profile.total_params == H * D
    assert profiler.profile.root.total("forward").macs == B * D * H
    assert profiler.profile.run.expert_params == H * D
    assert profiler.profile.run.model_expert_params == 3 * H * D
    assert field(capsys.readouterr().out, "params per GPU") == str(H * D)


class Mixture(nn.Module):
    """A router and two experts of an expert-parallel group, as ``deepspeed.moe`` marks them."""

    enable_expert_tensor_parallelism = False

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.router = nn.Linear(D, 2)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        for parameter in self.experts.parameters():
            parameter.group_name = f"ep_size_{ranks}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.router(x).softmax(-1)
        return sum(gates[:, i : i + 1] * e(x) for i, e in enumerate(self.experts))


ROUTER = D * 2 + 2
EXPERTS = 2 * (D * D + D)


@pytest.mark.parametrize("split", [False, True])
def test_expert_parameters_are_stated_per_rank_and_for_the_model(
    capsys: pytest.CaptureFixture[str], split: bool
) -> None:
    ranks, tensor_parallel = 3, 5
    model = Mixture(ranks)
    model.enable_expert_tensor_parallelism = split
    engine = Engine(model, has_moe_layers=True, mp_world_size=tensor_parallel, world_size=15)
    profiler = attach(engine)
    for _ in range(2):
        engine.train_step(torch.ones(B, D))
    scope = profiler.profile.run
    assert scope.expert_params == EXPERTS
    assert scope.model_expert_params == ranks * EXPERTS * (tensor_parallel if split else 1)
    out = capsys.readouterr().out
    assert field(out, "params per GPU") == str(ROUTER + EXPERTS)
    assert field(out, "   non-expert params of model") == str(tensor_parallel * ROUTER)
    assert field(out, "expert tensor parallelism enabled") == str(split)
    assert field(out, "model parallel size") == "5"


def test_parameter_with_another_group_name_is_not_an_expert() -> None:
    model = Mixture(1)
    for parameter in model.experts.parameters():
        parameter.group_name = "ep_size_many"
    engine = Engine(model, has_moe_layers=True, output_file=os.devnull)
    profiler = attach(engine)
    for _ in range(2):
        engine.train_step(torch.ones(B, D))
    assert profiler.profile.run.expert_params == 0


def test_sequence_parallelism_states_the_shared_group_size(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained(dp_world_size=None, seq_dp_world_size=6, world_size=12)
    out = capsys.readouterr().out
    assert field(out, "world size") == "12"
    assert field(out, "data parallel size") == "6"


def test_attached_engine_with_output_file_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "profile.txt"
    trained(output_file=str(path))
    assert path.read_text().count("Profile Summary") == 1
    assert not capsys.readouterr().out
    trained(output_file="")  # DeepSpeed prints to stdout then
    assert "Profile Summary" in capsys.readouterr().out


def test_autotuner_gets_one_micro_batch() -> None:
    engine, _ = trained(micro_batches=3, autotuning=True, enabled=False)
    arithmetic = 2 * FORWARD + B * S * (H + D) + B * S * H  # MACs, the biases and the ReLU
    assert engine.flops == 3 * arithmetic
    assert engine.fwd_duration is not None and engine.fwd_duration > 0
    assert not _get_current_dispatch_mode_stack()


def test_reset_within_a_step_leaves_no_mode() -> None:
    engine, profiler = trained(steps=1)
    engine.module(IDS)
    assert _get_current_dispatch_mode_stack()
    profiler.reset_profile()
    assert not _get_current_dispatch_mode_stack()


def test_attached_engine_counts_the_flops_that_are_asked_for() -> None:
    engine = Engine(Tied(), micro_batch_size=B)
    profiler = attach(engine, flops="contractions")
    for _ in range(2):
        engine.train_step(IDS)
    assert (profiler.macs, profiler.flops) == (FORWARD, 2 * FORWARD)
    with pytest.raises(ConfigError, match="contractions"):
        attach(engine, flops="most")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="timeout_s=-1: pass seconds of 0 or more"):
        attach(engine, timeout_s=-1)


def test_attach_to_an_engine_that_cannot_be_used_raises_config_error() -> None:
    class PipelineEngine(Engine):
        pass

    with pytest.raises(ConfigError, match="not a DeepSpeed engine"):
        attach(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match='"enabled": true'):
        attach(Engine(Tied(), enabled=False))
    with pytest.raises(ConfigError, match="PipelineEngine never tells"):
        attach(PipelineEngine(Tied()))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_real_engine_prints_one_profile(stage: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    printed = tmp_path / "profile.txt"
    script = REPOSITORY / "tests" / "helpers" / "real_engine.py"
    run = subprocess.run(
        [sys.executable, str(script), str(stage), str(printed)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert printed.read_text().count("Profile Summary at step 2:") == 1


@pytest.mark.slow
def test_deepspeeds_own_test_cases_pass() -> None:
    pytest.importorskip("deepspeed")
    script = REPOSITORY / "tests" / "helpers" / "deepspeed_cases.py"
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=600
    )
    assert run.returncode == 0, run.stderr[-2000:]
