"""A fused operator costs what its reference decomposition costs, to the last FLOP.

The few exceptions are listed with the derivation of the difference.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.profiling import TORCH, profile_of
from tests.oracles.decomposing import reference_flops

aten = torch.ops.aten

X, Y, Z = (torch.rand(3, 5, 7) for _ in range(3))
ROW = torch.rand(5)
GRAD = torch.rand(())
MASKS = [[True, True, True], [True, False, False], [True, False, True], [True, True, False]]


def case(op: Any, *args: Any, **kwargs: Any) -> Any:
    label = "-".join(str(arg) for arg in args if not isinstance(arg, torch.Tensor))
    return pytest.param(op, args, kwargs, id=f"{op}-{label}{kwargs or ''}")


def on_meta(op: Any, *args: Any, **kwargs: Any) -> Any:
    """A case whose operator has no kernel for these arguments on the CPU."""
    moved = [arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in args]
    return case(op, *moved, **kwargs)


POINTWISE = [
    *(
        case(op, X)
        for op in (
            aten.frac.default,
            aten.sgn.default,
            aten.sinc.default,
            aten.special_entr.default,
            aten.special_log_ndtr.default,
            aten.logit.default,
            aten.nan_to_num.default,
            aten.isneginf.default,
            aten.isposinf.default,
            aten.deg2rad.default,
            aten.rad2deg.default,
        )
    ),
    *(
        case(op, X, Y)
        for op in (
            aten.heaviside.default,
            aten.floor_divide.default,
            aten.ldexp.Tensor,
            aten.logaddexp.default,
            aten.logaddexp2.default,
            aten.xlogy.Tensor,
            aten.special_xlog1py.default,
            aten.sigmoid_backward.default,
            aten.tanh_backward.default,
            aten.logit_backward.default,
        )
    ),
    case(aten.logit_backward.default, X, Y, 0.1),
    case(aten.logit.default, X, 0.1),
    case(aten.rsub.Tensor, X, Y, alpha=3),
    case(aten.addcmul.default, X, Y, Z),
    case(aten.addcmul.default, X, Y, Z, value=3),
    case(aten.addcdiv.default, X, Y, Z),
    case(aten.lerp.Tensor, X, Y, Z),
    case(aten.mvlgamma.default, X + 2, 3),
    case(aten.native_dropout_backward.default, X, X > 0.5, 2.0),
]

ACTIVATIONS = [
    *(
        case(op, X)
        for op in (
            aten.silu.default,
            aten.mish.default,
            aten.gelu.default,
            aten.elu.default,
            aten.celu.default,
            aten.hardswish.default,
            aten.hardsigmoid.default,
            aten.hardshrink.default,
            aten.softshrink.default,
            aten.leaky_relu.default,
            aten.hardtanh.default,
            aten.softplus.default,
            aten.log_sigmoid_forward.default,
        )
    ),
    *(
        case(op, X, Y)
        for op in (
            aten.silu_backward.default,
            aten.mish_backward.default,
            aten.gelu_backward.default,
            aten.hardswish_backward.default,
            aten.hardsigmoid_backward.default,
            aten._prelu_kernel.default,
        )
    ),
    case(aten.gelu.default, X, approximate="tanh"),
    case(aten.gelu_backward.default, X, Y, approximate="tanh"),
    case(aten.celu.default, X, 2.0),
    case(aten.softplus.default, X, 2.0),
    case(aten.softplus_backward.default, X, Y, 2.0, 20.0),
    case(aten.softplus_backward.default, X, Y, 1.0, 20.0),
    case(aten.elu_backward.default, X, 1.0, 1.0, 1.0, False, Y),
    case(aten.elu_backward.default, X, 1.0, 1.0, 1.0, True, Y),
    case(aten.hardtanh_backward.default, X, Y, -1.0, 1.0),
    case(aten.threshold.default, X, 0.1, 0.2),
    case(aten.threshold_backward.default, X, Y, 0.0),
    case(aten.leaky_relu_backward.default, X, Y, 0.1, False),
    case(aten.log_sigmoid_backward.default, X, Y, Z),
    on_meta(aten.log_sigmoid_backward.default, X, Y, torch.empty(0)),
    case(aten._prelu_kernel_backward.default, X, Y, Z),
    case(aten.rrelu_with_noise_backward.default, X, Y, Z, 0.1, 0.3, True, False),
    case(aten.rrelu_with_noise_backward.default, X, Y, Z, 0.1, 0.3, False, False),
    case(aten.glu.default, torch.rand(3, 14, 5), 1),
    case(aten.glu_backward.default, torch.rand(3, 7, 5), torch.rand(3, 14, 5), 1),
]

SOFTMAX = [
    case(aten._softmax.default, X, 1, False),
    case(aten._log_softmax.default, X, 1, False),
    case(aten._safe_softmax.default, X, 1),
    case(aten._softmax_backward_data.default, X, Y, 1, torch.float32),
    case(aten._log_softmax_backward_data.default, X, Y, 1, torch.float32),
    case(aten.logsumexp.default, X, [0, 2]),
    case(aten.logsumexp.default, X, [1], True),
]

REDUCTIONS = [
    case(aten.nansum.default, X, [1]),
    case(aten.aminmax.default, X, dim=1),
    case(aten.count_nonzero.dim_IntList, X, [1]),
    case(aten.all.dim, X, 1),
    case(aten.trace.default, torch.rand(5, 7)),
    case(aten.std.correction, X, [1]),
    *(
        case(aten.linalg_vector_norm.default, X, order, [1])
        for order in (0.0, 2.0, 3.0, 4.0, 2.5, float("inf"), -float("inf"))
    ),
    case(aten.linalg_vector_norm.default, X[:, :1], 3.0, [1]),
    case(aten.dist.default, X, Y, 3.0),
    case(aten.renorm.default, X, 2.0, 1, 1.0),
]

BATCH = torch.rand(3, 5, 7)
STATS = (torch.rand(5), torch.rand(5))
NORMS = [
    *(
        case(aten.native_batch_norm.default, BATCH, w, b, *stats, train, 0.1, 1e-5)
        for w in (None, ROW)
        for b in (None, ROW)
        for stats, train in ((STATS, True), ((None, None), True), (STATS, False))
    ),
    case(aten._native_batch_norm_legit.no_stats, BATCH, ROW, ROW, True, 0.1, 1e-5),
    case(aten._native_batch_norm_legit_functional.default, BATCH, ROW, ROW, *STATS, True, 0.1, 0.1),
    case(aten._native_batch_norm_legit_no_training.default, BATCH, ROW, ROW, *STATS, 0.1, 1e-5),
    *(
        case(
            aten.native_batch_norm_backward.default,
            *(BATCH, BATCH, w, *STATS, *STATS, train, 1e-5, mask),
        )
        for w in (None, ROW)
        for train in (True, False)
        for mask in MASKS
    ),
    *(
        case(aten.native_layer_norm.default, X, [5, 7], w, b, 1e-5)
        for w in (None, X[0])
        for b in (None, X[0])
    ),
    *(
        on_meta(
            aten.native_layer_norm_backward.default,
            *(X, Y, [7], torch.rand(3, 5, 1), torch.rand(3, 5, 1), w, w, mask),
        )
        for w in (None, torch.rand(7))
        for mask in [*MASKS, [False, True, True], [False, False, True]]
    ),
    case(
        aten.native_layer_norm_backward.default,
        *(X[0, 0], Y[0, 0], [7], torch.rand(1), torch.rand(1), X[0, 0], X[0, 0], [True] * 3),
    ),
    *(case(aten._fused_rms_norm.default, X, [7], w, 1e-5) for w in (None, torch.rand(7))),
    *(
        on_meta(aten._fused_rms_norm_backward.default, X, Y, [7], torch.rand(3, 5, 1), w, mask)
        for w in (None, torch.rand(7))
        for mask in ([True, True], [True, False], [False, True])
    ),
    *(
        on_meta(aten.native_group_norm.default, torch.rand(2, 15, 7), w, b, 2, 15, 7, 3, 1e-5)
        for w in (None, torch.rand(15))
        for b in (None, torch.rand(15))
    ),
    *(
        on_meta(
            aten.native_group_norm_backward.default,
            *(G, G, torch.rand(2, 3), torch.rand(2, 3), w, 2, 15, 7, 3, mask),
        )
        for G in (torch.rand(2, 15, 7),)
        for w in (None, torch.rand(15))
        for mask in [*MASKS, [False, True, True], [False, False, True]]
    ),
    case(aten._weight_norm_interface.default, X, torch.rand(3, 1, 1)),
]

TARGETS = torch.tensor([1, 4, 0])
LOGITS = torch.rand(3, 5)
WEIGHTS = torch.rand(5)
LOSSES = [
    *(
        case(op, X, Y, reduction)
        for op in (
            aten.mse_loss.default,
            aten.smooth_l1_loss.default,
            aten.huber_loss.default,
            aten.soft_margin_loss.default,
        )
        for reduction in (0, 1, 2)
    ),
    *(
        case(aten.binary_cross_entropy.default, X, Y, w, reduction)
        for w in (None, Z)
        for reduction in (0, 1, 2)
    ),
    *(
        case(aten.binary_cross_entropy_with_logits.default, X, Y, w, p, reduction)
        for w in (None, Z)
        for p in (None, torch.rand(7))
        for reduction in (0, 1, 2)
    ),
    *(
        case(aten.nll_loss_forward.default, LOGITS, TARGETS, w, reduction, -100)
        for w in (None, WEIGHTS)
        for reduction in (0, 1, 2)
    ),
    *(
        case(aten.nll_loss_backward.default, g, LOGITS, TARGETS, w, reduction, -100, GRAD)
        for w in (None, WEIGHTS)
        for g, reduction in ((torch.rand(3), 0), (GRAD, 1), (GRAD, 2))
    ),
    case(
        aten.nll_loss2d_forward.default,
        *(torch.rand(2, 5, 3, 7), torch.ones(2, 3, 7, dtype=torch.long), WEIGHTS, 1, -100),
    ),
    *(
        case(op, g, X, Y, reduction, *more)
        for op, more in (
            (aten.mse_loss_backward.default, ()),
            (aten.smooth_l1_loss_backward.default, (1.0,)),
            (aten.huber_loss_backward.default, (1.0,)),
            (aten.soft_margin_loss_backward.default, ()),
        )
        for g, reduction in ((X, 0), (GRAD, 1), (GRAD, 2))
    ),
    *(
        case(aten.binary_cross_entropy_backward.default, GRAD, X, Y, w, reduction)
        for w in (None, Z)
        for reduction in (0, 1, 2)
    ),
    *(
        case(aten.multi_margin_loss.default, LOGITS, TARGETS, p, 1, w, reduction)
        for p in (1, 2)
        for w in (None, WEIGHTS)
        for reduction in (0, 1, 2)
    ),
    *(
        case(aten.multilabel_margin_loss_forward.default, LOGITS, LOGITS.long(), reduction)
        for reduction in (0, 1, 2)
    ),
]

TOKENS = torch.zeros(3, 5, dtype=torch.long)
PLANES = torch.rand(2, 3, 12, 15)
OTHERS = [
    # No padding: every window is whole, and the reference compares nothing more.
    case(aten.max_pool2d_with_indices.default, PLANES, [3, 5], [2, 3]),
    case(aten.adaptive_max_pool2d.default, PLANES, [4, 5]),
    # Windows of one length, 3 each way: the reference pads unequal ones and sums the padding.
    case(aten._adaptive_avg_pool2d.default, torch.rand(2, 3, 7, 9), [3, 4]),
    case(aten.embedding_dense_backward.default, X, TOKENS, 11, -1, False),
    case(aten.embedding_dense_backward.default, X, TOKENS, 11, -1, True),
    case(aten.linspace.default, 0.0, 1.0, 7),
    case(aten.linspace.default, 0.0, 1.0, 1),
    case(aten.logspace.default, 0.0, 1.0, 7),
    case(aten.hann_window.default, 7),
    case(aten.hann_window.periodic, 7, False),
]


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [*POINTWISE, *ACTIVATIONS, *SOFTMAX, *REDUCTIONS, *NORMS, *LOSSES, *OTHERS],
)
def test_formula_equals_decomposition(op: Any, args: Any, kwargs: Any) -> None:
    skip_if_whole(op)
    profile = profile_of(lambda: op(*args, **kwargs), strict=True)
    flops = profile.total().flops + rewritten(op, args)
    assert flops == reference_flops(op, *args, **kwargs)


def skip_if_whole(op: Any) -> None:
    late = ("max_pool2d_with_indices", "adaptive_max_pool2d", "hann_window")
    if TORCH < (2, 13) and op.overloadpacket.__name__ in late:
        pytest.skip("this torch has no decomposition of it")


def rewritten(op: Any, args: Any) -> int:
    """Additional cost of a decomposition in other releases than 2.13; our count is the same."""
    name = op.overloadpacket.__name__
    if TORCH < (2, 13):
        # x - ⌊|x|⌋·sgn x where x - trunc x is now, 1 / (1 + exp(-x)) where sigmoid x is, and
        # exp(-|x|) once more where it was given.
        again = name == "log_sigmoid_backward" and args[2].numel() > 0
        return 3 * args[0].numel() if again or name in ("frac", "silu_backward") else 0
    if TORCH < (2, 14):
        return 0
    if name == "_native_batch_norm_legit_no_training" or (
        name == "native_batch_norm" and args[5] is False
    ):
        return -args[0].shape[1]  # per channel: rsqrt where 1 / sqrt was
    if name == "native_group_norm_backward" and args[-1][0]:
        samples, groups = args[2].shape
        return 2 * samples * groups  # addcmul(-a, b, c), 4 steps, where b·c - a was
    return 0


DIFFERENCES = [
    # A scalar weight: |w|, w >= 1/2, w - 1 on a tensor of one element.
    pytest.param(aten.lerp.Scalar, (X, Y, 0.3), 3, id="lerp by a number"),
    # value·t1 is done on t1's 15 elements, before t2 broadcasts it to 105; we count 105.
    pytest.param(aten.addcmul.default, (X, X[..., :1], Y), 15 - 105, id="addcmul broadcast"),
    # log b and isnan b are done on the one element of b; we count 105.
    pytest.param(aten.xlogy.Tensor, (X, Y[0, 0, 0]), 2 * (1 - 105), id="xlogy broadcast"),
    # Powers of 1, before and after the sum, are the identity.
    pytest.param(aten.linalg_vector_norm.default, (X, 1.0, [1]), 105 + 21, id="1-norm"),
    # 3 x 4 windows of 3 x 3 at stride 2 in 5 x 7 padded by 1: of the 12·9 taps that the
    # reference compares, rows see 2+3+2 and columns 2+3+3+2 elements: 7·10.
    pytest.param(
        aten.max_pool2d_with_indices.default,
        (torch.rand(2, 3, 5, 7), [3, 3], [2, 2], [1, 1]),
        6 * (12 * 9 - 7 * 10),
        id="maximum of the padding",
    ),
    # 8 in windows of 2, 3, 2, 3, 2, each padded to 3, and the padding summed too.
    pytest.param(
        aten._adaptive_avg_pool2d.default,
        (torch.rand(2, 3, 1, 8), [1, 5]),
        6 * (5 * 3 - (2 + 3 + 2 + 3 + 2)),
        id="average of the padding",
    ),
    # On the CPU x·(r·w) + (b - mean·r·w): per element 2 steps, not 4; per channel 3; per group 1.
    pytest.param(
        aten.native_group_norm.default,
        (torch.rand(2, 15, 7), torch.rand(15), torch.rand(15), 2, 15, 7, 3, 1e-5),
        -2 * 210 + 3 * 30 + 6,
        id="group norm on the CPU",
    ),
]


@pytest.mark.parametrize(("op", "args", "difference"), DIFFERENCES)
def test_reference_differs_by_the_derived_amount(op: Any, args: Any, difference: int) -> None:
    skip_if_whole(op)
    profile = profile_of(lambda: op(*args), strict=True)
    assert reference_flops(op, *args) - profile.total().flops == difference
