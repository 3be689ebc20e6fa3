"""Measure the target that the options name: what ``profile``, ``demo`` and ``sweep`` share."""

from __future__ import annotations

import dataclasses
import sys
from argparse import Namespace
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from dispatch_flops.cli.output import print_progress
from dispatch_flops.errors import DispatchFlopsError, TargetError
from dispatch_flops.profile import Profile

if TYPE_CHECKING:
    from dispatch_flops.cli.targets import Inputs, PreparedModel


def measure(options: Namespace, variables: Mapping[str, Any]) -> Profile:
    """Build and run the target of the options, and return its profile.

    variables: sizes in --input-shape and keyword arguments of factories, by name.
    What the user's code prints goes to stderr. Raises TargetError for any error in it.
    """
    if getattr(options, "optimizer", None) is not None and not options.train:
        raise TargetError("--optimizer is that of a training step; add --train")
    if options.target_device is not None and options.device != "meta":
        raise TargetError(
            f"--target-device is for --device meta; on {options.device}, attention is counted as "
            "the kernel that runs, so omit it"
        )
    with redirect_stdout(sys.stderr):
        profile = _profile(options, _prepare(options, variables))
    run = dataclasses.replace(profile.run, command=getattr(options, "command_line", None))
    return dataclasses.replace(profile, run=run)


def _prepare(options: Namespace, variables: Mapping[str, Any]) -> PreparedModel:
    from dispatch_flops.cli.targets import parse_shape, prepare

    return prepare(
        options.target,
        shapes=[parse_shape(text) for text in options.input_shape],
        inputs=options.inputs,
        dtype=options.dtype,
        device=options.device,
        variables=variables,
        notify=print_progress,
    )


def _profile(options: Namespace, prepared: PreparedModel) -> Profile:
    import torch

    from dispatch_flops.cli.targets import raise_target_error
    from dispatch_flops.profilers.model import profile_model
    from dispatch_flops.profilers.training_step import profile_training_step

    model: Any = torch.compile(prepared.model) if options.compile else prepared.model
    shared: dict[str, Any] = {
        "args": prepared.inputs.args,
        "kwargs": prepared.inputs.kwargs,
        "warm_up": options.warm_up,
        "repeats": options.repeats,
        "mode": options.mode,
        "causal": options.causal,
        "flops": options.flops,
        "target": options.target_device or "cpu",
        "memory": options.memory,
        "device": "meta" if options.device == "meta" else None,
        "notify": print_progress,
    }
    try:
        if options.train:
            return profile_training_step(
                model,
                optimizer=options.optimizer or "sgd",
                latency=options.operator_latency,
                **shared,
            )
        return profile_model(
            model, backward=options.backward, operator_latency=options.operator_latency, **shared
        )
    except DispatchFlopsError:
        raise
    except (Exception, SystemExit) as error:
        hint = hint_for(error, options, prepared.inputs)
        raise_target_error(f"running {options.target}", error, hint)


def hint_for(error: BaseException, options: Namespace, inputs: Inputs) -> str:
    """Return what the user may try after an error of the model; "" if nothing is known."""
    if not inputs.args and not inputs.kwargs:
        return "the model was called without inputs: add --input-shape or --inputs"
    if not options.input_shape and not options.inputs and options.target.startswith("hf:"):
        names = ", ".join(inputs.kwargs)
        return f"the model was called with default inputs ({names}): add --input-shape or --inputs"
    if "'indices'" in str(error) and "float" in str(error).lower():  # torch.float32 on meta
        return "token ids need an integer dtype: --input-shape 1,128:int64"
    return ""
