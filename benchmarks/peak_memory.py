"""Peak memory of a training step beside the allocator's peak and other tools.

    python benchmarks/peak_memory.py [--device cuda]

One steady AdamW step per row. ``truth`` is the allocator's peak with what was there before: on the
CPU by its events (torch.profiler with ``profile_memory``), on CUDA by the bytes asked for, in its
statistics. The other columns are differences from it, in percent. ``meta`` is this package's peak
of the same step on the meta device: on the CPU with the state that AdamW has there, for CUDA with
``target="cuda"`` and ``foreach=True``, its default there. ``>=`` marks a peak with workspaces that
are not known, ``~`` one of layers that run by other operators on the meta device.

- MemTracker: torch.distributed._tools; n/a where it raises.
- profiler: the highest sum of categories in ``torch.profiler``'s ``export_memory_timeline``.
- accelerate: the largest figure of ``accelerate estimate-memory`` for training in float32.
- ZeRO-2, ZeRO-3: DeepSpeed's ``estimate_zero{2,3}_model_states_mem_needs`` on one device without
  offload. Both are of mixed precision; the steps here are in float32.
- torchinfo: its estimated total size: inputs, results of layers twice, parameters; n/a where the
  model cannot be called alone.

A tool that is not installed has n/a; ``pip install deepspeed accelerate torchinfo``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from dispatch_flops import FlopCounterMode
from dispatch_flops.profile import MemoryProfile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.llama import CONFIGS, Llama
from tests.helpers.allocator import peak_bytes, peak_bytes_on_cuda
from tests.helpers.training_steps import ON_CPU, ON_CUDA, Loss, Workload, step_of
from tests.models.vision import ResNet

INDEXED = {"cpu": "cpu", "cuda": "cuda:0"}  # as profiles name the devices


def adamw(model: nn.Module, *, foreach: bool | None = None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), foreach=foreach)


def ours(step: Callable[[], None], model: nn.Module, target: Any = "cpu") -> MemoryProfile:
    with FlopCounterMode(model, display=False, memory=True, target=target) as counter:
        step()
    memory = counter.profile.memory
    assert memory is not None
    return memory


def resnet_18() -> tuple[nn.Module, torch.Tensor, Loss]:
    model, x = ResNet((2, 2, 2, 2), 1), torch.randn(8, 3, 128, 128)
    return model, x, lambda: model(x).square().mean()


def first_layers_of_llama() -> tuple[nn.Module, torch.Tensor, Loss]:
    """Eight layers of Llama-3-8B and its vocabulary, 4,096 tokens in bfloat16."""
    config = dataclasses.replace(CONFIGS["8B"], layers=8)
    model = Llama(config).to(torch.bfloat16)
    ids = torch.randint(0, config.vocab, (1, 4096))
    return model, ids, lambda: model(ids).logsumexp(-1).mean()


def on_meta(workload: Workload, device: str) -> tuple[int, str]:
    """Return the peak, of all devices together where it is of the CPU, and a mark."""
    is_cuda = device == "cuda"
    with torch.device("meta"):
        model, x, loss = workload()
    step, _ = step_of(model, x, loss, partial(adamw, foreach=is_cuda or None))
    memory = ours(step, model, device)
    peaks = [found.peak_bytes for found in memory.devices if not is_cuda or found.device == "meta"]
    return sum(peaks), mark_of(memory)


def mark_of(memory: MemoryProfile) -> str:
    return "~ " if memory.is_approximate else ">= " if memory.is_lower_bound else ""


def of_mem_tracker(step: Callable[[], None], model: nn.Module, before: list) -> int | None:
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model, *before)
    try:
        with tracker:
            step()
    except NotImplementedError:
        return None
    peak = tracker.get_tracker_snapshot("peak")
    return max(snapshot["Total"] for snapshot in peak.values())


def of_profiler(step: Callable[[], None], device: str) -> int | None:
    """Return the highest sum of categories; None where the profiler cannot tell them apart."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    options = {"profile_memory": True, "record_shapes": True, "with_stack": True}
    with torch.profiler.profile(activities=activities, **options) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        try:
            profiler.export_memory_timeline(str(path), device=INDEXED[device])
        except Exception as error:  # asserts and look-ups of its own
            print(f"torch.profiler: {type(error).__name__}: {error}", file=sys.stderr)
            return None
        _, sizes = json.loads(path.read_text(encoding="utf-8"))
    return max(map(sum, sizes))


def of_accelerate(model: nn.Module) -> int | None:
    try:
        from accelerate.commands.estimate import estimate_training_usage
        from accelerate.utils import calculate_maximum_sizes
    except ImportError:
        return None
    size, _ = calculate_maximum_sizes(model)
    return max(estimate_training_usage(size, "float32").values())


def of_deepspeed(model: nn.Module) -> list[int | None]:
    try:
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as zero3
        from deepspeed.runtime.zero.stage3 import model_to_params
        from deepspeed.runtime.zero.stage_1_and_2 import (
            estimate_zero2_model_states_mem_needs as zero2,
        )
    except ImportError:
        return [None, None]
    params, largest = model_to_params(model)
    _, at_2 = zero2(params, cpu_offload=False)
    _, at_3, _ = zero3(params, largest, cpu_offload=False, cpu_offload_params=False)
    return [at_2, at_3]


def of_torchinfo(model: nn.Module, x: torch.Tensor) -> int | None:
    try:
        from torchinfo import summary

        found = summary(model, input_data=[x], verbose=0, mode="train", device=x.device)
    except (ImportError, RuntimeError):  # RuntimeError: torchinfo's, of what the model raised
        return None
    return found.total_input + found.total_output_bytes + found.total_param_bytes


def off(value: int | None, truth: int, mark: str = "") -> str:
    return "n/a" if value is None else f"{mark}{100 * (value / truth - 1):+.3f}"


def workloads_on(device: str) -> dict[str, Workload]:
    if device == "cpu":
        return {**ON_CPU, "ResNet-18": resnet_18}
    return {**ON_CUDA, "ResNet-18": resnet_18, "Llama-3-8B, 8 layers": first_layers_of_llama}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=INDEXED, default="cpu")
    device = parser.parse_args().device
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = []
    for name, workload in workloads_on(device).items():
        with torch.device(device):
            model, x, loss = workload()
        step, before = step_of(model, x, loss, adamw)
        truth = (peak_bytes_on_cuda if device == "cuda" else peak_bytes)(step, before)
        memory = ours(step, model)
        mine = next(found for found in memory.devices if found.device == INDEXED[device])
        tracked = of_mem_tracker(step, model, before)
        meta, meta_mark = on_meta(workload, device)
        values = [tracked, of_profiler(step, device), of_accelerate(model)]
        values += [*of_deepspeed(model), of_torchinfo(model, x)]
        shown = [
            off(mine.peak_bytes, truth, mark_of(memory)),
            off(meta, truth, meta_mark),
            *(off(value, truth) for value in values),
        ]
        rows.append([name, f"{truth:,}", *shown])
        print(name, file=sys.stderr)
    header = ["step", "truth, bytes", "ours %", "ours on meta %", "MemTracker %"]
    header += ["profiler %", "accelerate %", "ZeRO-2 %", "ZeRO-3 %", "torchinfo %"]
    print(tabulate(rows, header, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
