"""An engine that drives a flops profiler as DeepSpeed's does, without DeepSpeed.

It follows ``deepspeed.runtime.engine`` 0.19.8, which profiles on rank 0 alone. Hooks on the root
start the profiler before its forward and stop it afterwards. The profiler is asked to print after
every micro-batch, when the step counter has already advanced. ``profile_step`` is the number of
steps before the profiled one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Engine:
    """An engine, with the attributes that a profiler reads from DeepSpeed's."""

    def __init__(
        self,
        module: nn.Module,
        *,
        micro_batches: int = 1,
        micro_batch_size: int = 4,
        enabled: bool = True,
        autotuning: bool = False,
        output_file: str | None = None,
        **known: Any,
    ) -> None:
        self.module = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        self.flops_profiler: Any = None
        self.flops: int | None = None
        self.fwd_duration: float | None = None
        self.global_rank = 0
        self.world_size = 1
        self.dp_world_size: int | None = 1
        self.mp_world_size: int | None = 1
        self.has_moe_layers = False
        self.global_steps = self.micro_steps = 0
        self._micro_batches = micro_batches
        self._micro_batch_size = micro_batch_size
        self._enabled = enabled
        self._autotuning = autotuning
        self._output_file = output_file
        self.__dict__.update(known)
        module.register_forward_pre_hook(lambda *_: self._before_forward())
        module.register_forward_hook(lambda *_: self._after_forward())

    def flops_profiler_enabled(self) -> bool:
        return self._enabled or self._autotuning

    def flops_profiler_profile_step(self) -> int:
        return 1

    def flops_profiler_recompute_fwd_factor(self) -> float:
        return 0.0

    def autotuning_enabled(self) -> bool:
        return self._autotuning

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % self._micro_batches == 0

    def gradient_accumulation_steps(self) -> int:
        return self._micro_batches

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._micro_batch_size

    def train_step(self, *inputs: Any) -> None:
        """Run one optimizer step with all its micro-batches."""
        for _ in range(self._micro_batches):
            self.module(*inputs).sum().backward()
            self.step()

    def step(self) -> None:
        due = self._is_due()  # before the step counter advances
        if self.is_gradient_accumulation_boundary():
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.global_steps += 1
        if due:
            self._report()
        self.micro_steps += 1

    def _report(self) -> None:
        if self._autotuning:
            self.flops = self.flops_profiler.get_total_flops() * 3
            self.fwd_duration = self.flops_profiler.get_total_duration()
        else:
            self.flops_profiler.print_model_profile(
                profile_step=self.global_steps,
                module_depth=-1,
                top_modules=1,
                detailed=True,
                output_file=self._output_file,
            )
        self.flops_profiler.end_profile()

    def _is_due(self) -> bool:
        is_next = self.global_steps == self.flops_profiler_profile_step()
        return self.flops_profiler_enabled() and is_next and self.global_rank == 0

    def _before_forward(self) -> None:
        if self._is_due():
            self.flops_profiler.start_profile(ignore_list=None)

    def _after_forward(self) -> None:
        if self._is_due():
            self.flops_profiler.stop_profile()
