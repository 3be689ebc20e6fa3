"""Gathering, scattering, embeddings and segments.

Picking elements moves data without arithmetic and reads only what it picks. Accumulating is one
operation per added element. In-place forms touch only the addressed elements; functional forms
copy the rest, and read the addressed elements only to combine them with others. Which positions
repeat is data: they count as distinct, up to the size of the tensor.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dispatch_flops.operators.access import states_bytes
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.formulas.partial_access import picked_bytes
from dispatch_flops.operators.formulas.pointwise import per_element
from dispatch_flops.operators.formulas.reduction import vector_norm
from dispatch_flops.operators.memory import nbytes
from dispatch_flops.operators.numbers import depends_on_numbers, tells_apart
from dispatch_flops.operators.registry import declare_free, register_flops
from dispatch_flops.operators.tensors import is_inexact
from dispatch_flops.profile.cost import OpCost, contraction

Tensor = torch.Tensor
_MASKS = (torch.bool, torch.uint8)


# Picking ---------------------------------------------------------------------------------


def _pick(*args: Any, out: Tensor, **kwargs: Any) -> OpCost:
    """Bytes: reads the indices, and as much of the source as it writes, at most all of it."""
    sources = [*args, *kwargs.values()]
    tensors = [i for i, value in enumerate(sources) if isinstance(value, torch.Tensor)]
    source = sources.pop(tensors[0])
    return OpCost(
        bytes_read=nbytes(sources) + picked_bytes(source, out.numel()), bytes_written=nbytes(out)
    )


declare_free(
    ops("gather", "index_select", "index", "_unsafe_index", "take", "embedding"),
    "picks elements, without arithmetic",
    formula=_pick,
)


def _unsafe_masked_index(
    self: Tensor, mask: Tensor, indices: Any, fill: Any, *, out: Tensor, **_: Any
) -> OpCost:
    return _pick(self, mask, indices, out=out)


declare_free(
    ops("_unsafe_masked_index"), "picks elements under a mask", formula=_unsafe_masked_index
)


# Putting ---------------------------------------------------------------------------------


def update(
    self: Tensor,
    others: Any,
    out: Any,
    *,
    touched: int,
    steps: int = 0,
    sources: int | None = None,
    replaces: bool | None = None,
    certain: int | None = None,
) -> OpCost:
    """Cost of writing ``touched`` elements of ``self``, with ``steps`` real FLOPs each.

    In place, only the touched elements are written. Otherwise the rest of ``self`` is read, and
    all of the result written.

    sources: the bytes read of ``others``, where that is not all of them.
    replaces: True if the touched elements of ``self`` are not read. Default: without ``steps``.
    certain: how many elements are touched at least, where ``touched`` is an upper bound.
    """
    flops = touched * steps if is_inexact(self) else 0
    sources = nbytes(others) if sources is None else sources
    replaces = not steps if replaces is None else replaces
    in_place = out is self
    certain = touched if certain is None else certain
    read = 0 if in_place else max(self.numel() - certain, 0)
    read += 0 if replaces else touched
    return OpCost(
        flops=flops,
        bytes_read=sources + picked_bytes(self, read),
        bytes_written=picked_bytes(self, touched) if in_place else nbytes(out),
    )


def _sum_steps(self: Tensor) -> int:
    return per_element("add", complex_numbers=self.is_complex())


@register_flops(ops("scatter_add"))
@states_bytes
def scatter_add(
    self: Tensor, dim: int, index: Tensor, src: Tensor, *, out: Any, **_: Any
) -> OpCost:
    """self[index] += src: one sum per index."""
    return _scatter(self, index, src, out, steps=_sum_steps(self))


def _scatter(
    self: Tensor,
    index: Tensor,
    src: Tensor | None,
    out: Any,
    *,
    steps: int,
    replaces: bool | None = None,
) -> OpCost:
    """One element of ``src`` for each index: a source larger than the index is not read whole."""
    count = index.numel()
    read = nbytes(index) + picked_bytes(src, count)
    return update(self, (), out, touched=count, steps=steps, sources=read, replaces=replaces)


@register_flops(ops("scatter"), by_name=True)
@states_bytes
def scatter(
    *,
    self: Tensor,
    index: Tensor,
    src: Tensor | None = None,
    reduce: str | None = None,
    out: Any,
    **_: Any,
) -> OpCost:
    """self[index] = src; with ``reduce`` "add" or "multiply" one operation per index."""
    name = {"add": "add", "multiply": "mul"}.get(str(reduce))
    steps = 0 if name is None else per_element(name, complex_numbers=self.is_complex())
    return _scatter(self, index, src, out, steps=steps)


@register_flops(ops("scatter_reduce"))
@states_bytes
def scatter_reduce(
    self: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
    out: Any,
    **_: Any,
) -> OpCost:
    """One sum, product, maximum or minimum per index; a mean then divides every element."""
    steps = _reduction_steps(self, reduce)
    cost = _scatter(self, index, src, out, steps=steps, replaces=not include_self)
    return cost + OpCost(flops=_mean_divisions(self, reduce))


def _reduction_steps(self: Tensor, reduce: str) -> int:
    return per_element("mul" if reduce == "prod" else "add", complex_numbers=self.is_complex())


def _mean_divisions(self: Tensor, reduce: str) -> int:
    if reduce != "mean" or not is_inexact(self):
        return 0
    return self.numel() * (2 if self.is_complex() else 1)


@register_flops(ops("index_add"))
@tells_apart(1)
@states_bytes
def index_add(
    self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1, out: Any, **_: Any
) -> OpCost:
    """self[index] += alpha·source: one sum per source element, a product if alpha is not 1."""
    product = per_element("mul", complex_numbers=self.is_complex()) if alpha != 1 else 0
    steps = _sum_steps(self) + product
    return update(self, (index, source), out, touched=source.numel(), steps=steps)


@register_flops(ops("index_reduce"))
@states_bytes
def index_reduce(
    self: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
    out: Any,
    **_: Any,
) -> OpCost:
    """One operation per source element; a mean then divides every element."""
    cost = update(
        self, (index, source), out,
        touched=source.numel(), steps=_reduction_steps(self, reduce), replaces=not include_self,
    )  # fmt: skip
    return cost + OpCost(flops=_mean_divisions(self, reduce))


@register_flops(ops("index_copy"))
@states_bytes
def index_copy(
    self: Tensor, dim: int, index: Tensor, source: Tensor, *, out: Any, **_: Any
) -> OpCost:
    """self[index] = source."""
    return update(self, (index, source), out, touched=source.numel())


@register_flops(ops("index_fill"))
@states_bytes
def index_fill(self: Tensor, dim: int, index: Tensor, value: Any, *, out: Any, **_: Any) -> OpCost:
    """self[index] = value, whole slices."""
    slices = self.numel() // self.shape[dim] if self.numel() and self.dim() else 1
    return update(self, (index, value), out, touched=index.numel() * slices)


@register_flops(ops("put"))
@states_bytes
def put(
    self: Tensor, index: Tensor, source: Tensor, accumulate: bool = False, *, out: Any, **_: Any
) -> OpCost:
    """self.flatten()[index] = source, or += source."""
    steps = _sum_steps(self) if accumulate else 0
    return update(self, (index, source), out, touched=index.numel(), steps=steps)


def addressed(self: Tensor, indices: Any, values: Tensor, *, at_least: bool = False) -> int:
    """Return how many elements of ``self`` the index tensors address.

    A mask selects as many elements as there are values for them, or as the index tensors next to
    it have. If neither tells, the number is data, and the mask's size is an upper bound.

    at_least: return the lower bound instead.
    """
    kept: list[int] = []  # sizes of the dimensions without an index
    masks: list[int] = []
    given: list[torch.Size] = []
    axis = 0
    for index in indices:
        is_mask = index is not None and index.dtype in _MASKS
        if index is None:
            kept.append(self.shape[axis])
        elif is_mask:
            masks.append(index.numel())
        else:
            given.append(index.shape)
        axis += index.dim() if is_mask else 1
    kept += self.shape[axis:]
    common: list[int] = list(torch.broadcast_shapes(*given))
    if masks and (not common or common[-1] == 1):
        bound = 0 if at_least else min(masks)
        common[-1:] = [_places(values, len(kept) - _kept_before(indices), bound)]
    return math.prod(common) * math.prod(kept)


def _places(values: Tensor, after: int, bound: int) -> int:
    """Return the size of the dimension before the last ``after`` ones, or ``bound`` if it is 1."""
    axis = values.dim() - after - 1
    size: int = values.shape[axis] if axis >= 0 else 1
    return bound if size == 1 else size


def _kept_before(indices: Any) -> int:
    """Return the number of dimensions before the indexed one: leading ones without an index.

    It is 0 if dimensions between two indices have none: the indexed one then moves to the front.
    """
    given = [place for place, index in enumerate(indices) if index is not None]
    return given[0] if given[-1] - given[0] == len(given) - 1 else 0


@register_flops(ops("index_put", "_unsafe_index_put", "_index_put_impl"))
@states_bytes
def index_put(
    self: Tensor,
    indices: Any,
    values: Tensor,
    accumulate: bool = False,
    *_: Any,
    out: Any,
    **__: Any,
) -> OpCost:
    """self[indices] = values, or += values with one sum per addressed element."""
    steps = _sum_steps(self) if accumulate else 0
    touched = addressed(self, indices, values)
    certain = addressed(self, indices, values, at_least=True)
    return update(self, (indices, values), out, touched=touched, steps=steps, certain=certain)


@register_flops(ops("_unsafe_masked_index_put_accumulate"))
@states_bytes
def unsafe_masked_index_put_accumulate(
    self: Tensor, mask: Tensor, indices: Any, values: Tensor, *, out: Any, **_: Any
) -> OpCost:
    """self[indices] += values where the mask holds (else 0 is added): one sum per value."""
    others = (mask, indices, values)
    return update(self, others, out, touched=values.numel(), steps=_sum_steps(self))


# Embeddings ------------------------------------------------------------------------------


@register_flops(ops("embedding_dense_backward"), by_name=True)
def embedding_dense_backward(
    *, grad_output: Tensor, scale_grad_by_freq: bool, out: Tensor, **_: Any
) -> int:
    """grad[T, D] added to the rows of weight[V, D]: T·D; divided by how often each occurs: T·D.

    Source: torch._decomp.
    """
    return grad_output.numel() * (2 if scale_grad_by_freq else 1)


@register_flops(ops("embedding_renorm"))
@states_bytes
@depends_on_numbers
def embedding_renorm(
    self: Tensor, indices: Tensor, max_norm: float, norm_type: float, *, out: Any, **_: Any
) -> OpCost:
    """Per row used: its norm (2·D if Euclidean), a comparison 1, scaling by max_norm/(norm + eps)
    D + 2.

    Which rows repeat and which exceed the norm is data: all T are counted, an upper bound.
    Source: embedding_renorm_cpu_, aten/src/ATen/native/Embedding.cpp.
    """
    width, times = self.shape[1], indices.numel()
    moved = picked_bytes(self, times * width)
    return OpCost(
        flops=vector_norm(times * width, times, norm_type) + times * (width + 3),
        bytes_read=nbytes(indices) + moved,
        bytes_written=moved,
    )


_BAG_MEAN, _BAG_MAX = 1, 2


@register_flops(ops("_embedding_bag", "_embedding_bag_forward_only"), by_name=True)
def embedding_bag(
    *,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    mode: int = 0,
    per_sample_weights: Tensor | None = None,
    out: Any,
    **_: Any,
) -> OpCost:
    """T rows of weight[V, D] in B bags: sums (or maxima) (T-B)·D, weights T·D, mean B·D.

    Empty bags and the padding index are data: no bag is assumed to be empty.
    """
    rows, result = indices.numel() * weight.shape[1], out[0]
    flops = max(rows - result.numel(), 0)
    flops += rows if per_sample_weights is not None else 0
    flops += result.numel() if mode == _BAG_MEAN else 0
    read = picked_bytes(weight, rows) + nbytes(indices, offsets, per_sample_weights)
    return OpCost(flops=flops, bytes_read=read, bytes_written=nbytes(out))


@register_flops(ops("_embedding_bag_dense_backward", "_embedding_bag_backward"), by_name=True)
def embedding_bag_backward(
    *,
    grad: Tensor,
    indices: Tensor,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Tensor | None,
    out: Tensor,
    **_: Any,
) -> int:
    """grad[B, D] of each bag added to the T rows in it: T·D; weights, mean and frequency T·D
    each. Maximum: added to one row per element, B·D. (A sparse gradient is summed
    later.)
    """
    if mode == _BAG_MAX:
        return grad.numel()
    passes = 1 + (per_sample_weights is not None) + (mode == _BAG_MEAN) + scale_grad_by_freq
    return indices.numel() * grad.shape[1] * passes


@register_flops(ops("_embedding_bag_per_sample_weights_backward"))
def embedding_bag_per_sample_weights_backward(
    grad: Tensor, weight: Tensor, indices: Tensor, *_: Any, out: Tensor, **__: Any
) -> OpCost:
    """The gradient of a bag times the row, for each of T rows: T·D MACs."""
    return contraction(indices.numel() * weight.shape[1])


# Segments --------------------------------------------------------------------------------


@register_flops(ops("segment_reduce"))
def segment_reduce(data: Tensor, reduce: str, *_: Any, out: Tensor, **__: Any) -> int:
    """n numbers in m segments: n-m; a mean divides: m. Empty segments are data: none is assumed."""
    n, m = data.numel(), out.numel()
    return max(n - m, 0) + (m if reduce == "mean" else 0)


@register_flops(ops("_segment_reduce_backward"))
def segment_reduce_backward(
    grad: Tensor, output: Tensor, data: Tensor, reduce: str, *_: Any, out: Tensor, **__: Any
) -> int:
    """sum: the gradient is passed on, 0. mean: divided, n. max, min: each number compared with
    the result n, ties counted and divided n. prod: grad·result/number 2·n.
    Source: aten/src/ATen/native/SegmentReduce.cpp.
    """
    return data.numel() * {"sum": 0, "mean": 1, "prod": 2}.get(reduce, 2)
