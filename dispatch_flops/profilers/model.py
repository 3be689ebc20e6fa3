"""One run of a model, measured twice: timed without the dispatch mode, then counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from dispatch_flops.counting.eager_stance import eager_stance
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.placement import brought_to, device_name
from dispatch_flops.errors import ConfigError, TargetError
from dispatch_flops.operators.conventions import Causal, Subclass
from dispatch_flops.operators.registry import Formula
from dispatch_flops.operators.tensors import tensors_in
from dispatch_flops.profile import OUTSIDE, ModuleNode, PhaseSeconds, Profile, StepTiming
from dispatch_flops.profilers.counter import FlopCounterMode
from dispatch_flops.profilers.inputs import (
    caller,
    is_compiled,
    make_inputs,
    moved,
    submodule,
    with_backward,
)
from dispatch_flops.profilers.isolation import (
    evaluating,
    garbage_collection_later,
    gradients_kept,
    on_meta,
    random_state_kept,
)
from dispatch_flops.timing.devices import Devices
from dispatch_flops.timing.latencies import (
    fit_to_whole,
    medians,
    spreads,
    time_call,
    within_parents,
)
from dispatch_flops.timing.module_timer import LatencyPass, resolution_s

OWN_PASS = "a pass of its own, without the dispatch mode; the model's without any hook"

OWN_PASS_COMPILED = (
    f"{OWN_PASS}; the whole is the compiled code's, shared out among modules as their eager code "
    "takes it"
)


def profile_model(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: str = "forward",
    backward: bool = False,
    device: str | None = None,
    warm_up: int = 1,
    repeats: int = 1,
    operator_latency: bool = False,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    causal: Causal = "full",
    subclass: Subclass = "executed",
    custom_mapping: Mapping[Any, Formula] | None = None,
    meta_value: float | None = None,
    strict: bool = False,
) -> Profile:
    """The profile of one run of a model.

    input_shape: shape of the only positional input, made of ones in the dtype and on the
        device of the model's first parameter. args, kwargs: the inputs themselves; a model
        without inputs needs none of the three.
    mode: the method to call, ``"forward"`` for the model itself, ``"generate"``, ...
    backward: also run backward from the sum of the floating-point outputs; gradients that
        the model's parameters had are put back afterwards.
    device: "meta" profiles shapes alone: no data, no memory, latency n/a.
    warm_up: runs before anything is measured. repeats: timed runs, of which the median counts.
    operator_latency: also take the time of every operator, in the counting pass.
    ignore_modules: classes of modules whose work, and that of all below them, is left out.
    causal, subclass, custom_mapping, meta_value, strict: as ``FlopCounterMode`` takes them.

    The model runs in evaluation mode; train flags and random state are as before afterwards.
    Raises TargetError for a model or inputs that cannot be used, ConfigError for options,
    UncountedOpsError where ``strict`` asks for it.
    """
    device = None if device is None else str(device)
    _check(model, device, warm_up, repeats)
    ignored = module_classes(ignore_modules)
    counter = FlopCounterMode(
        model,
        display=False,
        custom_mapping=custom_mapping,
        strict=strict,
        causal=causal,
        subclass=subclass,
        meta_value=meta_value,
        latency=operator_latency and device != "meta",
    )
    with ExitStack() as undo:
        undo.enter_context(evaluating(model))
        undo.enter_context(random_state_kept(accelerators_drawn_on(model)))
        if device == "meta":
            undo.enter_context(on_meta(model))
        made_on = device if input_shape is None else device or _brought_to(model)
        inputs = make_inputs(model, input_shape, args, made_on)
        if not isinstance(kwargs or {}, Mapping):
            raise TargetError(f"kwargs is a {type(kwargs).__name__}; pass a dict of named inputs")
        named_inputs = moved(dict(kwargs or {}), device)
        forward = whole = caller(model, mode, inputs, named_inputs)
        if backward:
            given = (tensor for tensor in tensors_in([inputs, named_inputs]) if tensor.is_leaf)
            leaves = [*model.parameters(), *given]
            undo.enter_context(gradients_kept(leaves))
            whole = with_backward(forward, leaves)
        devices = Devices.at("meta") if device == "meta" else Devices.of(model.modules())
        for _ in range(warm_up if devices.computes else 0):
            whole()
        seconds, spread, timing = _measure(
            model, forward, whole if backward else None, devices, repeats
        )
        with counter:
            whole()
    profile = attach_latencies(counter.profile, seconds, timing, spread)
    named = device_name(next(iter(devices.accelerators), devices.type))
    scope = dataclasses.replace(profile.run, device=devices.type, device_name=named)
    notes = profile.notes
    if (method := counter.profile.timing.method) is not None:
        notes += (f"operators' times: {method}",)
    profile = dataclasses.replace(profile, run=scope, notes=notes)
    return without(profile, model, ignored)


def accelerators_drawn_on(model: nn.Module) -> Sequence[torch.device]:
    """The accelerators on which a run may draw: any of CUDA's, once the program uses it."""
    if torch.cuda.is_initialized():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return Devices.of(model.modules()).accelerators


def _brought_to(model: nn.Module) -> str | None:
    """Where a model computes whose first parameter need not say so; None for any other."""
    return next(map(str, brought_to(model.modules())), None)


def _check(model: Any, device: str | None, warm_up: int, repeats: int) -> None:
    if not isinstance(model, nn.Module):
        raise TargetError(f"model is a {type(model).__name__}; pass an nn.Module")
    if device not in (None, "meta"):
        raise TargetError(
            f'device={device!r}: only "meta" is converted to; for any other device move the model '
            "and its inputs there first"
        )
    for name, value, least in (("warm_up", warm_up, 0), ("repeats", repeats, 1)):
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"{name}={value!r}: pass an int of at least {least}")


def module_classes(given: Any) -> tuple[type[nn.Module], ...]:
    """The classes of modules to leave out: a list of them, one, or None for none."""
    classes = () if given is None else (given,) if isinstance(given, type) else given
    if isinstance(classes, (str, nn.Module)) or not all(
        isinstance(cls, type) and issubclass(cls, nn.Module) for cls in classes
    ):
        raise TargetError(f"{given!r:.100}: name modules to leave out by class, such as nn.Linear")
    return tuple(classes)


def attach_latencies(
    profile: Profile,
    seconds: Mapping[str, float],
    timing: StepTiming,
    spread: Mapping[str, float] | None = None,
) -> Profile:
    """The profile with forward latencies ``{fqn: seconds}`` and the timing of the whole.

    spread: ``{fqn: share}`` of the latency by which runs vary, where there were several.
    """
    shares = spread or {}

    def change(node: ModuleNode) -> ModuleNode:
        latency_s = seconds.get(node.fqn)
        if latency_s is None:
            return node
        share = shares.get(node.fqn)
        spread_s = None if share is None else share * latency_s
        timed = PhaseSeconds({**node.seconds, "forward": latency_s})
        return dataclasses.replace(node, seconds=timed, latency_spread_s=spread_s)

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
            return dataclasses.replace(node, ops=(), seconds=PhaseSeconds(), latency_spread_s=None)
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
) -> tuple[dict[str, float], dict[str, float], StepTiming]:
    """Forward latency per module and by what share runs of it vary, and the timing of the whole
    (``both``: with backward), without the mode."""
    if not devices.computes:
        return {}, {}, StepTiming(method="n/a: tensors without data take no time")
    if both is not None:
        forward()  # the warm-up ran backward too: memory that its graph held is found anew
    whole, spread = time_call(forward, devices=devices, repeats=repeats)
    backward_s = None
    if both is not None:
        backward_s = max(time_call(both, devices=devices, repeats=repeats)[0] - whole, 0.0)
    passes = []
    for _ in range(repeats):
        names = ModuleNames([model])
        # The hooks' own objects make garbage collection due that the model alone would not.
        with (
            eager_stance(),
            garbage_collection_later(),
            LatencyPass(names, devices=devices) as clock,
        ):
            devices.synchronize()
            forward()
        passes.append(clock.seconds())
    seconds = within_parents(fit_to_whole(medians(passes), "", whole), names)
    return (
        seconds,
        spreads(passes),
        StepTiming(
            seconds=PhaseSeconds({"forward": whole, "backward": backward_s}),
            spread_s=spread,
            repeats=repeats,
            method=OWN_PASS_COMPILED if is_compiled(model) else OWN_PASS,
            resolution_s=resolution_s(devices),
        ),
    )
