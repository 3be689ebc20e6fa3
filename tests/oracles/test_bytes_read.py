"""Bytes read, against perturbation: an element is read if changing it can change a result.

The oracle knows no formula. It runs the operator again with one element changed, to NaN and to
other numbers, and compares all results. What the kernel raises on a changed element counts as read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.profiling import profile_of

aten = torch.ops.aten
Call = Callable[..., Any]


def bytes_needed(call: Call, tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the elements whose change is seen in a result."""
    before = results_of(call, tensors)
    total = 0
    for position, tensor in enumerate(tensors):
        for index in range(tensor.numel()):
            for value in other_values(tensor.reshape(-1)[index]):
                changed = tensor.contiguous().clone()
                changed.view(-1)[index] = value
                others = [*tensors[:position], changed, *tensors[position + 1 :]]
                if not same(results_of(call, others), before):
                    total += tensor.element_size()
                    break
    return total


def other_values(element: Tensor) -> Iterator[Any]:
    if element.dtype == torch.bool:
        yield not element
    elif not (element.is_floating_point() or element.is_complex()):
        yield int(element) ^ 1
    else:
        yield from (float("nan"), 3.7, -5.3)


def results_of(call: Call, tensors: Sequence[Tensor]) -> list[Tensor] | None:
    try:
        found = call(*tensors)
    except (RuntimeError, IndexError):
        return None
    return [found] if isinstance(found, Tensor) else list(found)


def same(results: list[Tensor] | None, before: list[Tensor] | None) -> bool:
    if results is None or before is None:
        return results is before
    return all(
        torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(results, before, strict=True)
    )


def counted(call: Call, tensors: Sequence[Tensor]) -> int:
    (row,) = [
        found
        for found in profile_of(call, *tensors).by_operator().values()
        if found.cost is None or found.cost.bytes_read
    ]
    assert row.cost is not None
    return row.cost.bytes_read


def r(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(len(sizes)))


def integers(*values: Any) -> Tensor:
    return torch.tensor(values)


def symmetric(n: int) -> Tensor:
    """A matrix with no element 0 and a Cholesky factor."""
    return r(n, n) @ r(n, n).T + n * torch.eye(n)


def triangular(n: int) -> Tensor:
    return r(n, n) + n * torch.eye(n)


def conv(**options: Any) -> Call:
    """Return aten.convolution with these options, of input, weight and bias."""
    given = {"stride": 1, "padding": 0, "dilation": 1, "transposed": False, "groups": 1, **options}

    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        lists = [as_list(given[name], x) for name in ("stride", "padding", "dilation")]
        transposed, groups = given["transposed"], given["groups"]
        return aten.convolution(x, weight, bias, *lists, transposed, [0] * (x.dim() - 2), groups)

    return call


def conv_backward(mask: str, **options: Any) -> Call:
    """Return aten.convolution_backward with these options, of gradient, input and weight.

    mask: the gradients that are wanted, of "i", "w" and "b".
    """
    given = {"stride": 1, "padding": 0, "dilation": 1, "transposed": False, **options}

    def call(grad: Tensor, x: Tensor, weight: Tensor) -> Any:
        lists = [as_list(given[name], x) for name in ("stride", "padding", "dilation")]
        wanted = [name in mask for name in "iwb"]
        zeros, transposed = [0] * (x.dim() - 2), given["transposed"]
        grads = aten.convolution_backward(
            grad, x, weight, [3], *lists, transposed, zeros, 1, wanted
        )
        return [each for each, is_wanted in zip(grads, wanted, strict=True) if is_wanted]

    return call


def as_list(value: Any, x: Tensor) -> list[int]:
    return [value] * (x.dim() - 2) if isinstance(value, int) else list(value)


STEP, WIDE = {"stride": 3}, {"padding": 3}
X, W, G = r(1, 2, 11, 7), r(3, 2, 2, 2), r(1, 3, 4, 2)
TURNED = {"stride": 3, "padding": 3, "transposed": True}
XT, WT, GT = r(1, 2, 4, 3), r(2, 3, 2, 2), r(1, 3, 5, 2)
LINE, TAPS = r(1, 2, 5), r(3, 2, 2)
Case = tuple[Call, tuple[Tensor, ...]]
CASES: dict[str, Case] = {
    # -- windows that are further apart than wide
    "max_pool2d": (lambda x: aten.max_pool2d_with_indices(x, [2, 2], [3, 3]), (r(1, 2, 11, 13),)),
    "max_pool2d, padded and dilated": (
        lambda x: aten.max_pool2d_with_indices(x, [2, 3], [3, 5], [1, 1], [2, 1]),
        (r(1, 2, 11, 13),),
    ),
    "max_pool2d, dilated by its stride": (
        lambda x: aten.max_pool2d_with_indices(x, [2, 2], [3, 3], [0, 0], [3, 1]),
        (r(1, 2, 11, 13),),
    ),
    "avg_pool2d with the kernel's stride": (
        lambda x: aten.avg_pool2d(x, [2, 3]),
        (r(1, 2, 11, 13),),
    ),
    "max_pool2d, overlapping": (
        lambda x: aten.max_pool2d_with_indices(x, [3, 3], [2, 2]),
        (r(1, 2, 8, 10),),
    ),
    "max_pool3d": (
        lambda x: aten.max_pool3d_with_indices(x, [2, 1, 2], [3, 2, 3]),
        (r(1, 1, 5, 5, 7),),
    ),
    "avg_pool2d": (
        lambda x: aten.avg_pool2d(x, [2, 2], [3, 3], [1, 0], True),
        (r(1, 2, 11, 13),),
    ),
    "avg_pool2d without a batch": (lambda x: aten.avg_pool2d(x, [2, 2], [3, 3]), (r(2, 11, 13),)),
    "avg_pool3d": (lambda x: aten.avg_pool3d(x, [2, 1, 2], [3, 2, 3]), (r(1, 1, 5, 5, 7),)),
    "adaptive_avg_pool2d": (lambda x: aten._adaptive_avg_pool2d(x, [3, 2]), (r(1, 2, 7, 5),)),
    "adaptive_max_pool2d": (lambda x: aten.adaptive_max_pool2d(x, [3, 2]), (r(1, 7, 5),)),
    "avg_pool2d_backward": (
        lambda g, x: aten.avg_pool2d_backward(g, x, [2, 2], [3, 3], [0, 0], False, True, None),
        (r(1, 2, 2, 2), r(1, 2, 7, 5)),
    ),
    "im2col": (lambda x: aten.im2col(x, [2, 2], [1, 1], [1, 0], [3, 3]), (r(1, 2, 7, 5),)),
    "im2col, dilated": (lambda x: aten.im2col(x, [2, 2], [2, 1], [0, 1], [5, 3]), (r(2, 9, 7),)),
    "col2im": (lambda x: aten.col2im(x, [7, 5], [2, 2], [1, 1], [1, 0], [3, 3]), (r(1, 8, 6),)),
    "col2im, overlapping": (
        lambda x: aten.col2im(x, [4, 5], [2, 2], [1, 1], [1, 0], [1, 1]),
        (r(1, 4, 20),),
    ),
    # -- convolution
    "convolution": (conv(**STEP), (X, W, r(3))),
    "convolution, dilated": (conv(stride=(5, 3), padding=(0, 2), dilation=(2, 1)), (X, W)),
    "convolution, taps over padding alone": (conv(padding=1), (r(1, 2, 1, 2), r(3, 2, 3, 3))),
    "convolution of groups": (conv(stride=4, padding=1, groups=2), (r(2, 4, 11), r(6, 2, 3))),
    "convolution in 3 dimensions": (conv(**STEP), (r(1, 1, 5, 7, 8), r(2, 1, 2, 1, 2))),
    "transposed convolution that crops": (conv(**TURNED), (XT, WT)),
    "transposed convolution, overlapping": (
        conv(padding=1, transposed=True),
        (r(1, 2, 5), r(2, 3, 3)),
    ),
    "transposed convolution that crops taps": (
        conv(padding=2, transposed=True),
        (r(1, 2, 1), r(2, 3, 5)),
    ),
    "convolution_backward": (conv_backward("iw", **STEP), (G, X, W)),
    "convolution_backward, all": (conv_backward("iwb", **STEP), (G, X, W)),
    "convolution_backward to input": (conv_backward("i", **STEP), (G, X, W)),
    "convolution_backward to weight": (conv_backward("w", **STEP), (G, X, W)),
    "convolution_backward to bias": (conv_backward("b", **STEP), (G, X, W)),
    "convolution_backward, wide padding": (conv_backward("iw", **WIDE), (r(1, 3, 10), LINE, TAPS)),
    "convolution_backward to input, wide padding": (
        conv_backward("i", **WIDE),
        (r(1, 3, 10), LINE, TAPS),
    ),
    "convolution_backward to input, taps over padding alone": (
        conv_backward("i", padding=2),
        (r(1, 3, 1), r(1, 2, 1), r(3, 2, 5)),
    ),
    "transposed convolution_backward": (conv_backward("iw", **TURNED), (GT, XT, WT)),
    "transposed convolution_backward, all": (conv_backward("iwb", **TURNED), (GT, XT, WT)),
    "transposed convolution_backward to input": (conv_backward("i", **TURNED), (GT, XT, WT)),
    "transposed convolution_backward to weight": (conv_backward("w", **TURNED), (GT, XT, WT)),
    # -- interpolation
    "nearest": (lambda x: aten.upsample_nearest2d(x, [3, 2]), (r(1, 2, 11, 7),)),
    "nearest, larger": (lambda x: aten.upsample_nearest2d(x, [13, 9]), (r(1, 2, 11, 7),)),
    "nearest, twice": (lambda x: aten.upsample_nearest1d(x, [10], 2.0), (r(1, 2, 5),)),
    "nearest by a factor": (lambda x: aten.upsample_nearest1d(x, [6], 1.3), (r(1, 2, 5),)),
    "nearest by a factor that keeps the size": (
        lambda x: aten.upsample_nearest1d(x, [10], 1.05),
        (r(1, 2, 10),),
    ),
    "nearest beyond the end": (lambda x: aten.upsample_nearest1d(x, [4], 0.5), (r(1, 2, 5),)),
    "nearest in 3 dimensions": (
        lambda x: aten.upsample_nearest3d(x, [2, 1, 3]),
        (r(1, 1, 5, 3, 4),),
    ),
    "nearest-exact": (lambda x: aten._upsample_nearest_exact2d(x, [3, 2]), (r(1, 2, 11, 7),)),
    "nearest_backward": (
        lambda g: aten.upsample_nearest2d_backward(g, [3, 2], [1, 2, 11, 7]),
        (r(1, 2, 3, 2),),
    ),
    "linear": (lambda x: aten.upsample_linear1d(x, [3], False), (r(1, 2, 17),)),
    "linear by a factor": (lambda x: aten.upsample_linear1d(x, [3], False, 0.2), (r(1, 2, 17),)),
    "linear of the beginning": (
        lambda x: aten.upsample_linear1d(x, [1], False, 2.0),
        (r(1, 2, 5),),
    ),
    "bilinear": (lambda x: aten.upsample_bilinear2d(x, [3, 2], False), (r(1, 2, 17, 13),)),
    "bilinear, aligned": (lambda x: aten.upsample_bilinear2d(x, [3, 2], True), (r(1, 2, 17, 13),)),
    "bilinear, larger": (lambda x: aten.upsample_bilinear2d(x, [13, 11], False), (r(1, 2, 5, 7),)),
    "bicubic": (lambda x: aten.upsample_bicubic2d(x, [2, 1], False), (r(1, 1, 17, 13),)),
    "bicubic, aligned": (lambda x: aten.upsample_bicubic2d(x, [2, 2], True), (r(1, 1, 17, 13),)),
    "antialiased": (lambda x: aten._upsample_bilinear2d_aa(x, [3, 2], False), (r(1, 1, 17, 13),)),
    # -- triangles
    "trace": (aten.trace, (r(5, 7),)),
    "tril": (aten.tril, (r(5, 7),)),
    "triu": (lambda x: aten.triu(x, 1), (r(5, 7),)),
    "solve_triangular": (
        lambda a, b: aten.linalg_solve_triangular(a, b, upper=True),
        (triangular(5), r(5, 3)),
    ),
    "triangular_solve, which returns a copy of the matrix": (
        lambda a, b: aten.triangular_solve(b, a),
        (triangular(5), r(5, 3)),
    ),
    "solve_triangular, unit diagonal": (
        lambda a, b: aten.linalg_solve_triangular(a, b, upper=False, unitriangular=True),
        (triangular(5), r(5, 3)),
    ),
    "cholesky": (lambda a: aten.linalg_cholesky_ex(a)[0], (symmetric(5),)),
    "cholesky, upper": (lambda a: aten.linalg_cholesky_ex(a, upper=True)[0], (symmetric(5),)),
    "cholesky_inverse": (aten.cholesky_inverse, (torch.linalg.cholesky(symmetric(5)),)),
    "cholesky_solve": (aten.cholesky_solve, (r(5, 3), torch.linalg.cholesky(symmetric(5)))),
    "eigvalsh": (lambda a: aten._linalg_eigh(a, "L", False)[0], (symmetric(4),)),
    "ldl_factor": (lambda a: aten.linalg_ldl_factor_ex(a)[0], (symmetric(4),)),
    "householder_product": (aten.linalg_householder_product, (r(5, 3), r(3))),
    # -- shapes, picks and the rest
    "layer_norm": (
        lambda *x: aten.native_layer_norm(x[0], [7], *x[1:], 1e-5),
        (r(3, 7), r(7), r(7)),
    ),
    "batch_norm, evaluation": (
        lambda *x: aten.native_batch_norm(*x, False, 0.1, 1e-5)[0],
        (r(2, 3, 5), r(3), r(3), r(3), r(3).abs() + 1),
    ),
    "softmax": (lambda x: aten._softmax(x, 1, False), (r(3, 7),)),
    "mm": (aten.mm, (r(3, 5), r(5, 7))),
    "addmm with beta 0": (lambda *x: aten.addmm(*x, beta=0), (r(3, 7), r(3, 5), r(5, 7))),
    "nll_loss": (
        lambda x, t: aten.nll_loss_forward(x, t, None, 1, -100)[0],
        (r(5, 7), integers(1, 3, 0, 6, 2)),
    ),
    "embedding": (aten.embedding, (r(11, 3), integers(1, 3, 7))),
    "index_select": (lambda x, i: aten.index_select(x, 1, i), (r(5, 7), integers(1, 4))),
    "gather": (lambda x, i: aten.gather(x, 1, i), (r(2, 7), integers([1, 3], [0, 2]))),
    "take": (aten.take, (r(5, 7), integers(1, 3))),
    "index": (lambda x, i: aten.index(x, [i]), (r(5, 7), integers(1, 3))),
    "scatter_add": (
        lambda x, i, s: aten.scatter_add(x, 1, i, s),
        (r(2, 7), integers([1, 3], [0, 2]), r(3, 5)),
    ),
    "scatter": (
        lambda x, i, s: aten.scatter(x, 1, i, s),
        (r(2, 7), integers([1, 3], [0, 2]), r(3, 5)),
    ),
    "scatter of a number": (
        lambda x, i: aten.scatter(x, 1, i, 2.0),
        (r(2, 7), integers([1, 3], [0, 2])),
    ),
    "scatter, adding": (
        lambda x, i, s: aten.scatter(x, 1, i, s, reduce="add"),
        (r(2, 7), integers([1, 3], [0, 2]), r(3, 5)),
    ),
    "scatter_reduce": (
        lambda x, i, s: aten.scatter_reduce(x, 1, i, s, "sum"),
        (r(2, 7), integers([1, 3], [0, 2]), r(3, 5)),
    ),
    "scatter_reduce without self": (
        lambda x, i, s: aten.scatter_reduce(x, 1, i, s, "sum", include_self=False),
        (r(2, 7), integers([1, 3], [0, 2]), r(3, 5)),
    ),
    "index_copy": (
        lambda x, i, s: aten.index_copy(x, 1, i, s),
        (r(2, 7), integers(1, 3, 4), r(2, 3)),
    ),
    "index_fill": (lambda x, i: aten.index_fill(x, 1, i, 2.0), (r(2, 7), integers(1, 3, 4))),
    "index_reduce without self": (
        lambda x, i, s: aten.index_reduce(x, 1, i, s, "prod", include_self=False),
        (r(2, 7), integers(1, 3, 4), r(2, 3)),
    ),
    "index_put": (
        lambda x, i, v: aten.index_put(x, [None, i], v),
        (r(2, 7), integers(1, 3, 4), r(2, 3)),
    ),
    "index_put by a mask, with a value for each": (
        lambda x, mask, v: aten.index_put(x, [mask], v),
        (r(3, 2), torch.tensor([[True, False], [False, False], [True, True]]), r(3)),
    ),
    "index_put, adding": (
        lambda x, i, v: aten.index_put(x, [None, i], v, True),
        (r(2, 7), integers(1, 3, 4), r(2, 3)),
    ),
    "put": (aten.put, (r(2, 7), integers(1, 3, 10), r(3))),
    "select_scatter": (lambda x, s: aten.select_scatter(x, s, 0, 1), (r(5, 7), r(7))),
    "constant_pad": (lambda x: aten.constant_pad_nd(x, [-1, 2, -2, 0]), (r(5, 7),)),
    "reflection_pad": (lambda x: aten.reflection_pad1d(x, [2, -3]), (r(2, 7),)),
    "cdist": (lambda a, b: aten._cdist_forward(a, b, 2.0, None), (r(3, 5), r(4, 5))),
    "cumsum": (lambda x: aten.cumsum(x, 1), (r(3, 7),)),
    "unfold_backward": (lambda g: aten.unfold_backward(g, [7], 0, 2, 3), (r(2, 2),)),
    "max_unpool": (
        lambda x, i: aten.max_unpool2d(x, i, [4, 4]),
        (r(1, 1, 2, 2), integers([[[0, 3], [10, 12]]])),
    ),
}


@pytest.mark.filterwarnings(
    "ignore:The reduce argument of torch.scatter",
    "ignore:index_reduce",
    "ignore:torch.triangular_solve is deprecated",  # torch 2.15
)
@pytest.mark.parametrize("case", CASES)
def test_bytes_read_are_those_whose_change_changes_a_result(case: str) -> None:
    call, tensors = CASES[case]
    assert counted(call, tensors) == bytes_needed(call, tensors)


# What counts as read though no change of it was seen: bytes, and why they count.
MORE: dict[str, tuple[Case, int]] = {
    # a kernel may leave the product out, and NaN in it: aten documents this for beta alone
    "addmm with alpha 0": (
        (lambda *x: aten.addmm(*x, alpha=0), (r(3, 7), r(3, 5), r(5, 7))),
        4 * (3 * 5 + 5 * 7),
    ),
    # how many elements a mask replaces is data: all of the original may be needed
    "masked_fill": (
        (
            lambda x, mask: aten.masked_fill(x, mask, 1.0),
            (r(3, 2), torch.tensor([[True, False], [False, False], [True, True]])),
        ),
        4 * 3,
    ),
    "index_put by a mask": (
        (
            lambda x, mask, v: aten.index_put(x, [mask], v),
            (r(3, 2), torch.tensor([[True, False], [False, False], [True, True]]), r(1)),
        ),
        4 * 3,
    ),
    # rows of the padding index are left out, and which these are is data
    "embedding_dense_backward": (
        (
            lambda g, i: aten.embedding_dense_backward(g, i, 11, 3, False),
            (r(3, 3), integers(1, 3, 7)),
        ),
        4 * 3,
    ),
    # the imaginary part of a real number, in the first of each row's elements
    "_fft_c2r": (
        (lambda x: aten._fft_c2r(torch.view_as_complex(x), [1], 0, 5), (r(3, 5, 2),)),
        4 * 3,
    ),
}


@pytest.mark.parametrize("case", MORE)
def test_bytes_read_include_what_must_be_touched_without_changing_a_result(case: str) -> None:
    (call, tensors), more = MORE[case]
    assert counted(call, tensors) == bytes_needed(call, tensors) + more
