"""What the figures of a plan assume, in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch

from dispatch_flops.analysis.efficiency import why_no_peak
from dispatch_flops.analysis.machines import Link, Machine
from dispatch_flops.profile import MemoryProfile, Profile
from dispatch_flops.profile.mesh_positions import DATA_DIMS, SHARING_DIMS, STAGE_DIMS
from dispatch_flops.renderers.text import first_names


def of_sharding(
    mesh: Mapping[str, int],
    *,
    is_job: bool,
    dtype: torch.dtype | None = None,
    mixed_precision: bool = False,
) -> Iterator[str]:
    """Yield who shards the model over the mesh, and how."""
    dims = " x ".join(f"{name} {size}" for name, size in mesh.items())
    count = math.prod(mesh.values())
    yield f"{count} devices, mesh {dims}; ranks are numbered along the last dimension first"
    if is_job:
        yield "the job builds, shards and runs its model; its second step is counted"
    if not is_job and "tp" in mesh:
        yield "tp: parallelize_module by the tensor-parallel plan that the model states"
    if not is_job and "dp" in mesh:
        yield (
            "dp: FSDP2, fully_shard of each layer of the model's stacks, then of the root; "
            + _precision(dtype, mixed_precision)
        )
    if mesh.keys() <= {*DATA_DIMS, *SHARING_DIMS}:
        own = [name for name in mesh if name in DATA_DIMS]
        yield f"ranks have samples of their own along {', '.join(own) or 'no dimension'}"
    if any(name in STAGE_DIMS for name in mesh):
        yield (
            "no time in which a pipeline stage waits for another is included: of p stages, 1F1B "
            "with m micro-batches waits (p - 1) / m of the time of its work"
        )


def _precision(dtype: torch.dtype | None, mixed_precision: bool) -> str:
    if not mixed_precision:
        return "no mixed precision: gathered, computed and reduced in the parameters' dtype"
    return (
        f"mixed precision: float32 parameters, gradients and state; gathered and computed in "
        f"{str(dtype).removeprefix('torch.')}, reduced in float32"
    )


def of_machine(profiles: Iterable[Profile], machine: Machine) -> Iterator[str]:
    """Yield which of the machine's figures these runs lack, so that times are not known."""
    without_peak = why_no_peak((op for run in profiles for op in run.op_totals()), machine)
    if without_peak:
        yield f"times are not known where {without_peak}: give the machine one"
    if machine.bytes_per_s is None:
        yield (
            f"times with bytes are not known: no bandwidth (bytes_per_s) of {machine.name} is known"
        )


def of_unknown_costs(profiles: Iterable[Profile]) -> Iterator[str]:
    """Yield which operators these runs count nothing for, and what that does to the figures."""
    names = sorted({name for run in profiles for name in run.uncounted_ops()})
    if names:
        yield (
            f"no cost is known for {first_names(names)}: FLOPs, bytes and times are lower bounds, "
            "and MFU is of what was counted"
        )


def of_communication(machine: Machine) -> Iterator[str]:
    """Yield how communication is timed."""
    yield (
        f"nodes of {machine.devices_per_node} devices, ranks in order; within: "
        f"{_link_text(machine.node_link)}; between, of each device: "
        f"{_link_text(machine.network_link)}"
    )
    yield (
        "a collective takes its calls x latency + bus bytes (nccl-tests) at the link's rate; a "
        "group over nodes has the network links of its ranks of a node together"
    )
    yield (
        "communication is hidden by computing, and links within and between nodes work at the "
        "same time, except in the time with nothing hidden"
    )


def _link_text(link: Link | None) -> str:
    if link is None:
        return "unknown"
    latency = "latency not known, left out"
    if link.latency_s is not None:
        latency = f"{link.latency_s * 1e6:g} us"
    name = f"{link.name}, " if link.name else ""
    return f"{name}{link.bytes_per_s / 1e9:g} GB/s, {latency}"


def of_memory(memories: Iterable[MemoryProfile | None]) -> Iterator[str]:
    """Yield what the peaks of these runs leave out."""
    known = [memory for memory in memories if memory is not None]
    decomposed = sorted({name for memory in known for name in memory.decomposed})
    if decomposed:
        yield (
            f"memory is approximate: {', '.join(decomposed)} ran on the meta device by other "
            "operators than a device's kernels"
        )
    bounds = [memory for memory in known if memory.is_lower_bound]
    unseen = sorted({name for memory in bounds for name in memory.unseen})
    if unseen:
        yield (
            "memory is a lower bound: an unknown workspace is allocated by kernels of "
            f"{first_names(unseen)}"
        )
    yield "memory: blocks rounded to 512 bytes; without fragmentation and the driver's own part"
