"""Definitions of the matrix products, index by index.

Letters: M rows, N columns, K the contracted size, B a batch size.
An outer product contracts nothing: its products are plain multiplications, no MACs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.oracles.counting import ZERO, Array, dot, elementwise, fill


def mm(a: Array, b: Array) -> Array:
    """c[m,n] = sum over k of a[m,k] b[k,n]."""
    (rows, inner), columns = a.shape, b.shape[1]
    return fill((rows, columns), lambda m, n: dot((a[m, k], b[k, n]) for k in range(inner)))


def bmm(a: Array, b: Array) -> Array:
    """c[i] = a[i] b[i]."""
    return fill(
        (a.shape[0], a.shape[1], b.shape[2]),
        lambda i, m, n: dot((a[i, m, k], b[i, k, n]) for k in range(a.shape[2])),
    )


def matmul(a: Array, b: Array) -> Array:
    """numpy's ``@``: a leading 1 for a vector on the left, a trailing one on the right; the
    batch dimensions broadcast."""
    left, right = a.ndim == 1, b.ndim == 1
    a = a[None, :] if left else a
    b = b[:, None] if right else b
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a = np.broadcast_to(a, batch + a.shape[-2:])
    b = np.broadcast_to(b, batch + b.shape[-2:])

    def cell(*index: int) -> Any:
        *i, m, n = index
        return dot((a[(*i, m, k)], b[(*i, k, n)]) for k in range(a.shape[-1]))

    out = fill((*batch, a.shape[-2], b.shape[-1]), cell)
    if right:
        out = out[..., 0]
    return out[..., 0, :] if left and not right else out[..., 0] if left else out


def dot_product(a: Array, b: Array) -> Array:
    """The sum of a[k] b[k]."""
    return fill((), lambda: dot(zip(a, b, strict=True)))


def mv(a: Array, x: Array) -> Array:
    """y[m] = sum over k of a[m,k] x[k]."""
    return fill(a.shape[:1], lambda m: dot((a[m, k], x[k]) for k in range(a.shape[1])))


def outer(a: Array, b: Array) -> Array:
    """c[m,n] = a[m] b[n]."""
    return fill((a.shape[0], b.shape[0]), lambda m, n: a[m] * b[n])


def addr(c: Array, a: Array, b: Array) -> Array:
    """c[m,n] + a[m] b[n]."""
    return plus(c, outer(a, b))


def plus(a: Array, b: Array) -> Array:
    """a + b, broadcast."""
    return elementwise(lambda x, y: x + y, a, b)


def addmm(c: Array, a: Array, b: Array) -> Array:
    """c + a b."""
    return plus(c, mm(a, b))


def addmv(c: Array, a: Array, x: Array) -> Array:
    """c + a x."""
    return plus(c, mv(a, x))


def baddbmm(c: Array, a: Array, b: Array) -> Array:
    """c + a[i] b[i]."""
    return plus(c, bmm(a, b))


def addbmm(c: Array, a: Array, b: Array) -> Array:
    """c + sum over i of a[i] b[i]: one contraction over i and k together."""
    product = fill(
        (a.shape[1], b.shape[2]),
        lambda m, n: dot(
            (a[i, m, k], b[i, k, n]) for i in range(a.shape[0]) for k in range(a.shape[2])
        ),
    )
    return plus(c, product)


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """y[..., n] = sum over k of x[..., k] weight[n, k], plus bias[n]."""
    y = matmul(x, weight.T)
    return y if bias is None else plus(y, bias)


def bilinear(x: Array, weight: Array, z: Array) -> Array:
    """y[n,o] = sum over j of (sum over i of x[n,i] weight[o,i,j]) z[n,j]: two contractions."""
    (rows, left), (outs, _, right) = x.shape, weight.shape
    half = fill(
        (rows, outs, right),
        lambda n, o, j: dot((x[n, i], weight[o, i, j]) for i in range(left)),
    )
    return fill((rows, outs), lambda n, o: dot((half[n, o, j], z[n, j]) for j in range(right)))


def einsum(equation: str, *operands: Array) -> Array:
    """Operands are contracted two at a time, left to right.

    In each step an index that only one side has and that nothing later uses is summed before
    the product. A step that contracts no index, or only indices of size 1, is a
    multiplication, not a MAC.
    """
    inputs, output = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    result, letters = operands[0], terms[0]
    for position in range(1, len(operands)):
        later = set(output).union(*terms[position + 1 :])
        result, letters = _pair((result, letters), (operands[position], terms[position]), later)
    return _sum_to(result, letters, output)


def _pair(a: tuple[Array, str], b: tuple[Array, str], later: set[str]) -> tuple[Array, str]:
    (x, x_letters), (y, y_letters) = a, b
    x, x_letters = _drop(x, x_letters, later | set(y_letters))
    y, y_letters = _drop(y, y_letters, later | set(x_letters))
    size = _sizes((x, x_letters), (y, y_letters))
    summed = [c for c in x_letters if c in y_letters and c not in later]
    kept = [c for c in dict.fromkeys(x_letters + y_letters) if c in later]

    def at(array: Array, letters: str, place: dict[str, int]) -> Any:
        return array[
            tuple(place[c] if n > 1 else 0 for c, n in zip(letters, array.shape, strict=True))
        ]

    def cell(*index: int) -> Any:
        place = dict(zip(kept, index, strict=True))
        terms = (
            {**place, **dict(zip(summed, inner, strict=True))}
            for inner in np.ndindex(*(size[c] for c in summed))
        )
        factors = ((at(x, x_letters, p), at(y, y_letters, p)) for p in terms)
        if all(size[c] == 1 for c in summed):
            first, second = next(factors)
            return first * second
        return dot(factors)

    return fill((size[c] for c in kept), cell), "".join(kept)


def _sizes(*terms: tuple[Array, str]) -> dict[str, int]:
    size: dict[str, int] = {}
    for array, letters in terms:
        for letter, n in zip(letters, array.shape, strict=True):
            size[letter] = n if size.get(letter, 1) == 1 else size[letter]
    return size


def _drop(array: Array, letters: str, wanted: set[str]) -> tuple[Array, str]:
    keep = "".join(c for c in dict.fromkeys(letters) if c in wanted)
    return _sum_to(array, letters, keep), keep


def _sum_to(array: Array, letters: str, output: str) -> Array:
    """Sum out what the output lacks; a repeated letter takes the diagonal."""
    size = _sizes((array, letters))
    gone = [c for c in dict.fromkeys(letters) if c not in output]

    def cell(*index: int) -> Any:
        place = dict(zip(output, index, strict=True))
        parts = []
        for inner in np.ndindex(*(size[c] for c in gone)):
            place.update(zip(gone, inner, strict=True))
            parts.append(array[tuple(place[c] for c in letters)])
        total = parts[0] if parts else ZERO
        for part in parts[1:]:
            total = total + part
        return total

    return fill((size[c] for c in output), cell)


def grouped_mm(x: Array, weights: Array, ends: Sequence[int]) -> Array:
    """Rows ``ends[g-1]:ends[g]`` of x times weights[g]; rows after the last end are unused."""
    out = []
    for group, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        out.extend(mm(x[start:end], weights[group]))
    return np.array(out, dtype=object).reshape(len(out), weights.shape[2])


def sparse_mm(places: Sequence[tuple[int, int]], entries: Array, rows: int, b: Array) -> Array:
    """c[m,n] = sum over the stored entries a at (m, k) of row m of a b[k,n]."""
    stored = list(zip(places, entries, strict=True))
    return fill(
        (rows, b.shape[1]),
        lambda m, n: dot((a, b[k, n]) for (row, k), a in stored if row == m),
    )
