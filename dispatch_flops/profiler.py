"""The DeepSpeed-compatible face: ``get_model_profile`` and ``FlopsProfiler``.

Names, parameters, defaults, return values and the three printed parts are DeepSpeed's, so
that changing the import is all its users do; numbers are right where its are not.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from dispatch_flops import units
from dispatch_flops.analysis import latency_of
from dispatch_flops.clock import LatencyPass, fit_to_whole, resolution_s, time_call
from dispatch_flops.counter import FlopCounterMode
from dispatch_flops.devices import Devices
from dispatch_flops.errors import NotProfiledError, TargetError
from dispatch_flops.names import ModuleNames
from dispatch_flops.renderers import aggregated, deepspeed
from dispatch_flops.running import (
    caller,
    evaluating,
    gradients_kept,
    is_compiled,
    make_inputs,
    moved,
    on_meta,
    random_state_kept,
    submodule,
    tensors_in,
    with_backward,
)
from dispatch_flops.stance import eager_stance
from dispatch_flops.tree import OUTSIDE, ModuleNode, Profile, StepTiming

OWN_PASS = "a pass of its own, without the dispatch mode; the model's without any hook"

OWN_PASS_COMPILED = (
    f"{OWN_PASS}; the whole is the compiled code's, shared out among modules as their eager code "
    "takes it"
)


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | Path | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
    func_name: str | None = None,
    *,
    device: str | None = None,
    repeats: int = 1,
    fold: bool = False,
    causal: str = "full",
    operator_latency: bool = False,
) -> tuple[Any, Any, Any]:
    """FLOPs, MACs and parameters of a model's forward pass (or of another of its methods).

    input_shape: shape of the only positional input, made of ones in the dtype and on the
        device of the model's first parameter. args, kwargs: the inputs themselves; a model
        without inputs needs none of the three.
    print_profile, detailed, module_depth, top_modules, output_file, fold: what is printed,
        and where to (a file instead of stdout).
    warm_up: runs before anything is measured. repeats: timed runs, of which the median counts.
    as_string: "426.52 MMACs" instead of 426516480.
    ignore_modules: classes of modules whose work, and that of all below them, is left out.
    mode, func_name: the method to call, ``"forward"`` for the model itself, ``"generate"``, ...
    device: "meta" profiles shapes alone: no data, no memory, latency n/a.
    operator_latency: also take the time of every operator, in the counting pass.

    The model runs in evaluation mode; train flags and random state are as before afterwards.
    Raises TargetError for inputs that cannot be used.
    Returns ``(flops, macs, params)``.
    """
    profile = profile_model(
        model,
        input_shape,
        args,
        kwargs,
        warm_up=warm_up,
        ignore_modules=ignore_modules,
        mode=func_name or mode,
        device=device,
        repeats=repeats,
        causal=causal,
        operator_latency=operator_latency,
    )
    if print_profile:
        text = deepspeed.render(
            profile,
            profile_step=warm_up,
            module_depth=module_depth,
            top_modules=top_modules,
            detailed=detailed,
            fold=fold,
        )
        show(text, output_file)
    total = profile.root.total("forward")
    params = profile.total_params
    if not as_string:
        return total.flops, total.macs, params
    return (
        units.number_to_string(total.flops),
        units.macs_to_string(total.macs),
        units.params_to_string(params),
    )


def profile_model(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    warm_up: int = 1,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
    device: str | None = None,
    repeats: int = 1,
    causal: str = "full",
    backward: bool = False,
    operator_latency: bool = False,
) -> Profile:
    """The ``Profile`` behind ``get_model_profile``; parameters as there.

    backward: also run backward from the sum of the floating-point outputs; gradients that
        the model's parameters had are put back afterwards.
    """
    if not isinstance(model, nn.Module):
        raise TargetError(f"model is a {type(model).__name__}; pass an nn.Module")
    if device not in (None, "meta"):
        raise TargetError(
            f'device={device!r}: only "meta" is converted to; for any other device move the model '
            "and its inputs there first"
        )
    with ExitStack() as undo:
        undo.enter_context(evaluating(model))
        undo.enter_context(random_state_kept(model))
        if device == "meta":
            undo.enter_context(on_meta(model))
        inputs = make_inputs(model, input_shape, args, device)
        named_inputs = moved(dict(kwargs or {}), device)
        forward = run = caller(model, mode, inputs, named_inputs)
        where = Devices.at("meta") if device == "meta" else Devices.of(model.modules())
        if backward:
            given = (tensor for tensor in tensors_in([inputs, named_inputs]) if tensor.is_leaf)
            leaves = [*model.parameters(), *given]
            undo.enter_context(gradients_kept(leaves))
            run = with_backward(forward, leaves)
        for _ in range(warm_up if where.type != "meta" else 0):
            run()
        latency, timing = _measure(model, forward, run if backward else None, where, repeats)
        operator_latency = operator_latency and where.type != "meta"
        with FlopCounterMode(
            model,
            display=False,
            causal=causal,  # type: ignore[arg-type]
            latency=operator_latency,
        ) as counter:
            run()
        profile = with_latency(counter.profile, latency, timing)
        if device == "meta":
            scope = dataclasses.replace(profile.scope, device="meta", device_name=None)
            profile = dataclasses.replace(profile, scope=scope)
        if operator_latency:
            note = f"operators' times: {counter.profile.timing.method}"
            profile = dataclasses.replace(profile, notes=(*profile.notes, note))
    return without(profile, model, ignore_modules or ())


class FlopsProfiler:
    """Profiles part of a program, such as one step of a training loop.

        prof = FlopsProfiler(model)
        prof.start_profile()
        loss = model(batch)
        prof.stop_profile()
        prof.print_model_profile()
        prof.end_profile()

    model: the module to profile. ds_engine: a DeepSpeed engine, which knows world size, batch
    size and the latencies of backward and step. recompute_fwd_factor: what DeepSpeed's estimate
    adds to the backward pass for activation checkpointing; counted recomputation needs none.

    Counting and timing share the pass; the profiler's own time is measured and taken off.
    """

    def __init__(
        self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TargetError(f"model is a {type(model).__name__}; pass an nn.Module")
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._counter: FlopCounterMode | None = None
        self._ignored: Sequence[type[nn.Module]] = ()
        self._profile: Profile | None = None

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Start counting and timing. ignore_list: classes of modules to leave out."""
        if self._counter is not None:
            self.stop_profile()
        self._ignored = tuple(ignore_list or ())
        counter = FlopCounterMode(self.model, display=False, latency=True)
        counter.__enter__()
        self._counter = counter
        self._profile = None
        self.started = True

    def stop_profile(self) -> None:
        """Stop counting and timing; the numbers stay until the next start."""
        counter, self._counter = self._counter, None
        if counter is None:
            return
        counter.__exit__(None, None, None)
        profile = without(counter.profile, self.model, self._ignored)
        self._profile = profile

    def reset_profile(self) -> None:
        """Forget what was counted; while profiling, count from here on."""
        ignored, running = self._ignored, self._counter is not None
        self.stop_profile()
        self._profile = None
        if running:
            self.start_profile(list(ignored))

    def end_profile(self) -> None:
        """Stop, if still running. Nothing was written on the model, so nothing is cleaned up."""
        self.stop_profile()
        self.started = False

    @property
    def profile(self) -> Profile:
        """The frozen profile; raises NotProfiledError before anything was profiled."""
        if self._counter is not None:
            return without(self._counter.profile, self.model, self._ignored)
        if self._profile is None:
            raise NotProfiledError(
                "nothing is profiled yet: call start_profile(), run the model, then ask"
            )
        return self._profile

    def amend_scope(self, **known: Any) -> None:
        """Add what the caller knows of the run: fields of ``Scope``, such as ``batch_size``."""
        profile = self.profile
        self._profile = dataclasses.replace(
            profile, scope=dataclasses.replace(profile.scope, **known)
        )

    def get_total_flops(self, as_string: bool = False) -> Any:
        """FLOPs of the model's forward pass."""
        total = self.profile.root.total("forward").flops
        return units.number_to_string(total) if as_string else total

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiply-accumulates of the model's forward pass."""
        total = self.profile.root.total("forward").macs
        return units.macs_to_string(total) if as_string else total

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds of the model's forward pass; None (as a string "n/a") if it was not run."""
        total = latency_of(self.profile.root)
        return units.duration_to_string(total) if as_string else total

    def get_total_params(self, as_string: bool = False) -> Any:
        """Elements of the model's distinct parameters."""
        total = self.profile.total_params
        return units.params_to_string(total) if as_string else total

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | Path | None = None,
        fold: bool = False,
    ) -> None:
        """Print the three parts and the operator table, to stdout or to ``output_file``."""
        text = deepspeed.render(
            self.profile,
            profile_step=profile_step,
            module_depth=module_depth,
            top_modules=top_modules,
            detailed=detailed,
            fold=fold,
        )
        show(text, output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the part that aggregates modules by class at each depth."""
        print(aggregated.render(self.profile, module_depth=module_depth, top_modules=top_modules))


def with_latency(profile: Profile, seconds: Mapping[str, float], timing: StepTiming) -> Profile:
    """The profile with forward latencies ``{fqn: seconds}`` and the timing of the whole."""

    def change(node: ModuleNode) -> ModuleNode:
        if node.fqn not in seconds:
            return node
        return dataclasses.replace(node, latency_s=seconds[node.fqn])

    return dataclasses.replace(profile.map_nodes(change), timing=timing)


def without(profile: Profile, model: nn.Module, classes: Sequence[type[nn.Module]]) -> Profile:
    """The profile less the work of modules of these classes and of all below them.

    Their parameters stay.
    """
    ignored = [
        node.fqn
        for node in (profile.root.walk() if classes else ())
        if type(submodule(model, node.fqn)) in classes
    ]
    if not ignored:
        return profile
    prefixes = tuple(f"{fqn}." for fqn in ignored)

    def change(node: ModuleNode) -> ModuleNode:
        below = node.fqn.startswith(prefixes)
        if below or node.fqn in ignored or ("" in ignored and not node.fqn.startswith(OUTSIDE)):
            return dataclasses.replace(node, ops=(), latency_s=None, backward_latency_s=None)
        return node

    note = f"left out at the user's wish: {', '.join(fqn or 'the model' for fqn in ignored)}"
    changed = profile.map_nodes(change)
    return dataclasses.replace(changed, notes=(*profile.notes, note))


def _measure(
    model: nn.Module,
    forward: Callable[[], Any],
    both: Callable[[], Any] | None,
    devices: Devices,
    repeats: int,
) -> tuple[dict[str, float], StepTiming]:
    """Forward latency per module, and of the whole (``both``: with backward), without the mode."""
    if devices.type == "meta":
        return {}, StepTiming(method="n/a: the meta device computes nothing")
    if both is not None:
        forward()  # the warm-up ran backward too: memory that its graph held is found anew
    whole, spread = time_call(forward, devices=devices, repeats=repeats)
    backward_s = None
    if both is not None:
        backward_s = max(time_call(both, devices=devices, repeats=repeats)[0] - whole, 0.0)
    passes = []
    for _ in range(repeats):
        names = ModuleNames([model])
        with eager_stance(), LatencyPass(names, devices=devices) as clock:
            devices.synchronize()
            forward()
        passes.append(clock.seconds())
    median = statistics.median_low([seconds.get("", 0.0) for seconds in passes])
    seconds = next(p for p in passes if p.get("", 0.0) == median)
    return fit_to_whole(seconds, "", whole), StepTiming(
        forward_s=whole,
        backward_s=backward_s,
        spread_s=spread,
        repeats=repeats,
        method=OWN_PASS_COMPILED if is_compiled(model) else OWN_PASS,
        resolution_s=resolution_s(devices),
    )


def show(text: str, output_file: str | Path | None) -> None:
    """To the file, its folder made if need be, or to stdout; TargetError where it cannot be."""
    if output_file is None:
        print(text)
        return
    path = Path(output_file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise TargetError(f"output_file={str(path)!r}: {error.strerror or error}") from error
