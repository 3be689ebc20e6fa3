"""Bytes of memory that tensors cover, each distinct element once.

Views of one storage may show the same memory: repeated tensors, dimensions of stride 0, windows
that overlap, a matrix and its transpose. A region is the memory that a strided tensor shows: the
offsets ``start + i1·stride1 + i2·stride2 + ...`` for all indices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dispatch_flops import _torch
from dispatch_flops.operators.tensors import tensors_in

_LARGEST_MASK = 2**30  # bits, for regions that interleave without a common pattern


@dataclass(frozen=True, slots=True)
class Region:
    """Offsets in bytes: progressions of ``(count, stride)``, by rising stride, added to a start."""

    start: int
    steps: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        """The offset behind the last byte."""
        return self.start + sum((count - 1) * stride for count, stride in self.steps) + 1


def nbytes(*values: Any) -> int:
    """Return the bytes of memory that the tensors in ``values`` show, each element once.

    ``values`` may be nested (see ``tensors_in``). Sparse tensors count what they store.
    """
    total = 0
    regions: dict[int, list[Region]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors_in(values)}.values():
        for part in stored_parts(tensor):
            if part.is_nested or part.layout is not torch.strided:
                total += int(part.numel()) * part.element_size()
            elif part.numel():
                regions.setdefault(_torch.storage_address(part), []).append(_region(part))
    return total + sum(map(union_size, regions.values()))


def union_size(regions: Iterable[Region]) -> int:
    """Return how many bytes the regions of one storage cover together."""
    total, cluster, end = 0, list[Region](), 0
    for region in sorted(set(regions), key=lambda region: region.start):
        if cluster and region.start >= end:
            total += _cluster_size(cluster)
            cluster = []
        cluster.append(region)
        end = max(end, region.end)
    return total + (_cluster_size(cluster) if cluster else 0)


@functools.lru_cache(maxsize=4096)  # asked at every call with a tensor that is not contiguous
def has_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if elements of such a tensor share memory, as after ``expand`` or ``unfold``."""
    steps = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1)
    reach = 0
    for stride, size in steps:
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def stored_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensor, or the dense tensors that a sparse one consists of."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def _region(tensor: torch.Tensor) -> Region:
    item = tensor.element_size()
    if tensor.is_contiguous():
        steps: Sequence[tuple[int, int]] = [(int(tensor.numel()) * item, 1)]
    else:
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        steps = [(item, 1), *((int(size), int(stride) * item) for size, stride in pairs)]
    return Region(int(tensor.storage_offset()) * item, _joined(steps))


def _joined(steps: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join progressions that continue or overlap each other.

    {0, s, ..., (n-1)·s} + {0, k·s, ..., (m-1)·k·s} has no gap, and n + (m-1)·k members, if k ≤ n.
    """
    joined: list[tuple[int, int]] = []
    for count, stride in sorted(steps, key=lambda step: step[1]):
        if count == 1 or stride == 0:
            continue
        last, step = joined[-1] if joined else (0, 1)
        times, rest = divmod(stride, step)
        if not rest and times <= last:
            joined[-1] = (last + (count - 1) * times, step)
        else:
            joined.append((count, stride))
    return tuple(joined)


def _cluster_size(regions: list[Region]) -> int:
    """Return how many offsets overlapping regions cover."""
    if any(_covers(region, regions) for region in regions):
        return max(region.end for region in regions) - regions[0].start
    outer = _common_outer(regions)
    if outer is not None:
        inner = [replace(region, steps=region.steps[:-1]) for region in regions]
        return outer * union_size(inner)
    return _count_by_mask(regions)


def _covers(region: Region, regions: list[Region]) -> bool:
    """Return True if a region has no gap and contains all others."""
    return (
        (not region.steps or [stride for _, stride in region.steps] == [1])
        and region.start == min(other.start for other in regions)
        and region.end == max(other.end for other in regions)
    )


def _common_outer(regions: list[Region]) -> int | None:
    """Return how often the regions repeat their pattern side by side; None if they do not."""
    outer = {region.steps[-1] if region.steps else (1, 0) for region in regions}
    if len(outer) > 1:
        return None
    ((count, stride),) = outer
    start = min(region.start for region in regions)
    end = max(region.end for region in regions) - (count - 1) * stride
    return count if end - start <= stride else None


def _count_by_mask(regions: list[Region]) -> int:
    """Count offsets as the bits that are set in an integer, a bit for each block of bytes."""
    start = min(region.start for region in regions)
    block = 0
    for region in regions:
        inner, *rest = region.steps or ((1, 1),)
        runs, strides = (inner[0], rest) if inner[1] == 1 else (1, region.steps)
        block = math.gcd(block, region.start - start, runs, *(stride for _, stride in strides))
    sizes = [math.prod(count for count, _ in region.steps) for region in regions]
    reach = max(region.end for region in regions) - start
    if reach // block > _LARGEST_MASK:
        return min(sum(sizes), reach)
    union = 0
    for region in regions:
        mask = 1
        for count, stride in region.steps:
            count, stride = (count // block, 1) if stride == 1 else (count, stride // block)
            mask = _repeated(mask, count, stride)
        union |= mask << ((region.start - start) // block)
    return union.bit_count() * block


def _repeated(mask: int, count: int, stride: int) -> int:
    """Return the union of ``count`` copies of a bit mask, each shifted by ``stride`` more."""
    done = 1
    while done < count:
        more = min(done, count - done)
        mask |= mask << (more * stride)
        done += more
    return mask
