"""A profile as named numbers for loggers.

W&B and MLflow take the dict of ``scalars``; ``log_tensorboard`` writes it to TensorBoard.
"""

from __future__ import annotations

from typing import Protocol

from dispatch_flops.analysis.efficiency import machine_of
from dispatch_flops.analysis.figures import by_depth
from dispatch_flops.analysis.headline import headline
from dispatch_flops.analysis.latency import phase_seconds
from dispatch_flops.analysis.machines import Machine
from dispatch_flops.analysis.operators import phases_of
from dispatch_flops.profile import Profile
from dispatch_flops.profile.tree import check_depth
from dispatch_flops.renderers.text import one_line
from dispatch_flops.units import ratio

__all__ = ["log_tensorboard", "scalars"]

_DEFAULT_DEPTH = 3


class Writer(Protocol):
    """A ``torch.utils.tensorboard.SummaryWriter``, or another object with ``add_scalar``."""

    def add_scalar(
        self, tag: str, scalar_value: float, global_step: int | None = None, /
    ) -> object: ...


def scalars(
    profile: Profile, machine: Machine | None = None, *, depth: int | None = _DEFAULT_DEPTH
) -> dict[str, float]:
    """Return ``{"flops/total": ..., "mfu": ..., "depth/1/BertEncoder/flops": ...}``.

    Holds totals, phases, rates, utilisation, and inclusive figures of the classes at each depth.
    What is not known has no entry. Counts are exact ints, times are in seconds. An entry that ends
    in ``is_lower_bound`` is 1 if the utilisation leaves out work, else 0.

    machine: whose peaks MFU and HFU refer to; None takes the profile's device.
    depth: deepest level of classes; the model is level 0, and None takes all levels.

    Raises ConfigError for a depth that is not a level.

        wandb.log(scalars(profile))
    """
    check_depth(depth)
    top = headline(profile, machine_of(profile, machine))
    found: dict[str, float | None] = {
        "params/total": top.params,
        "params/trainable": top.trainable_params,
        "params/active": top.active_params,
        "macs/total": top.macs,
        "flops/total": top.hardware_flops,
        "flops/model": top.model_flops,
        "bytes/total": top.bytes_total,
        "latency_s/total": top.seconds,
        "flops_per_s": ratio(top.hardware_flops, top.seconds),
        "mfu": top.mfu,
        "hfu": top.hfu,
        "mfu_is_lower_bound": None if top.mfu is None else int(top.mfu_is_lower_bound),
        "hfu_is_lower_bound": None if top.hfu is None else int(top.hfu_is_lower_bound),
        "uncounted_calls": sum(profile.uncounted_ops().values()),
    }
    seconds = phase_seconds(profile)
    for phase in phases_of(profile):
        cost = profile.total(phase)
        found[f"macs/{phase}"], found[f"flops/{phase}"] = cost.macs, cost.flops
        found[f"latency_s/{phase}"] = seconds[phase]
    found |= _per_depth(profile, depth)
    return {name: value for name, value in found.items() if value is not None}


def log_tensorboard(
    profile: Profile,
    writer: Writer,
    step: int,
    *,
    machine: Machine | None = None,
    prefix: str = "dispatch_flops/",
) -> None:
    """Write every scalar of the profile with ``writer.add_scalar(tag, value, step)``.

    machine: as in ``scalars``. prefix: put before each name.

    Example::

        from torch.utils.tensorboard import SummaryWriter

        scalars.log_tensorboard(profile, SummaryWriter("runs/demo"), step=100)
    """
    for name, value in scalars(profile, machine).items():
        writer.add_scalar(prefix + name, value, step)


def _per_depth(profile: Profile, deepest: int | None) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    end = None if deepest is None else deepest + 1
    for depth, classes in enumerate(by_depth(profile.root)[:end]):
        for name, figures in classes.items():
            stem = f"depth/{depth}/{one_line(name).replace('/', '_')}"
            found[f"{stem}/params"] = figures.params
            found[f"{stem}/macs"] = figures.cost.macs
            found[f"{stem}/flops"] = figures.cost.flops
            found[f"{stem}/latency_s"] = figures.latency_s
    return found
