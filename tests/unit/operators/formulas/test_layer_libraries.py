"""Layers of libraries, by operators of their schemas, counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dispatch_flops.errors import UncountedWarning
from tests.helpers.profiling import profile_of
from tests.helpers.stand_ins import nothing, stand_in

T, D = 3, 10
GATED, OUT = torch.ones(T, 2 * D), torch.ones(T, D)


def flops_of(fn: Callable[..., Any], *args: Any, **options: Any) -> int:
    return profile_of(lambda: fn(*args, **options)).total().flops


SILU, GELU = flops_of(F.silu, OUT), flops_of(F.gelu, OUT)
GELU_TANH = flops_of(F.gelu, OUT, approximate="tanh")
# Squares, their mean (a sum and a quotient), epsilon and root per row; the scale and the weight.
RMS_NORM = T * D + (T * D - T + T) + 2 * T + 2 * T * D - T + T - T + T

HEADS, KV_HEADS, SIZE, ROTATED = 4, 2, 6, 4
BOXES, SAMPLES = 5, 2
IMAGE = torch.ones(2, 6, 9, 8)
CONVOLVED = torch.ones(2, 4, 7, 6)
GROUPS = 2
SAMPLED = 2 * 6 * 3 * 3 * 7 * 6

CASES: dict[str, tuple[str, str, Callable[..., Any], tuple[Any, ...], int, int]] = {
    "silu and mul": (
        "_C", "silu_and_mul(Tensor! result, Tensor input) -> ()", nothing, (OUT, GATED),
        0, SILU + T * D,
    ),
    "mul and silu": (
        "_C", "mul_and_silu(Tensor! out, Tensor input) -> ()", nothing, (OUT, GATED),
        0, SILU + T * D,
    ),
    "gelu and mul": (
        "_C", "gelu_and_mul(Tensor! out, Tensor input) -> ()", nothing, (OUT, GATED),
        0, GELU + T * D,
    ),
    "tanh gelu and mul": (
        "_C", "gelu_tanh_and_mul(Tensor! out, Tensor input) -> ()", nothing, (OUT, GATED),
        0, GELU_TANH + T * D,
    ),
    "rms norm": (
        "_C", "rms_norm(Tensor! result, Tensor input, Tensor weight, float epsilon) -> ()",
        nothing, (OUT, torch.ones(T, D), torch.ones(D), 1e-6), 0, RMS_NORM,
    ),
    "fused add rms norm": (
        "_C",
        "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor weight, float epsilon) -> ()",
        nothing, (OUT, torch.ones(T, D), torch.ones(D), 1e-6), 0, RMS_NORM + T * D,
    ),
    "rotary embedding": (
        "_C",
        "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, "
        "Tensor cos_sin_cache, bool is_neox) -> ()",
        nothing,
        (torch.ones(T), torch.ones(T, HEADS * SIZE), torch.ones(T, KV_HEADS * SIZE), SIZE,
         torch.ones(99, ROTATED), True),
        0, 3 * T * (HEADS + KV_HEADS) * ROTATED,
    ),
    "nms": (
        "torchvision", "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        lambda *_: torch.empty(2, dtype=torch.int64),
        (torch.ones(BOXES, 4), torch.ones(BOXES), 0.5),
        # ten pairs; five areas; binary insertion of five scores: 0 + 1 + 2 + 2 + 3 comparisons
        0, 13 * 10 + 3 * BOXES + 8,
    ),
    "roi align": (
        "torchvision",
        "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, "
        "SymInt pooled_width, int sampling_ratio, bool aligned) -> Tensor",
        lambda *_: torch.empty(BOXES, 6, 3, 2),
        (IMAGE, torch.ones(BOXES, 5), 1.0, 3, 2, SAMPLES, False),
        0, BOXES * 6 * 3 * 2 * (4 * 7 + 3 + 1),
    ),
    "position-sensitive roi align": (
        "torchvision",
        "ps_roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, "
        "SymInt pooled_width, int sampling_ratio) -> (Tensor, Tensor)",
        lambda *_: (torch.empty(BOXES, 1, 3, 2), torch.empty(BOXES, 1, 3, 2, dtype=torch.int32)),
        (IMAGE, torch.ones(BOXES, 5), 1.0, 3, 2, SAMPLES),
        0, BOXES * 3 * 2 * (4 * 7 + 3 + 1),
    ),
    "roi align, backward": (
        "torchvision",
        "_roi_align_backward(Tensor grad, Tensor rois, float spatial_scale, SymInt pooled_height, "
        "SymInt pooled_width, SymInt batch_size, SymInt channels, SymInt height, SymInt width, "
        "int sampling_ratio, bool aligned) -> Tensor",
        lambda *_: torch.empty(2, 6, 9, 8),
        (torch.ones(BOXES, 6, 3, 2), torch.ones(BOXES, 5), 1.0, 3, 2, 2, 6, 9, 8, SAMPLES, False),
        # each of 4 samples adds (gradient · weight / 4) to four neighbours
        0, BOXES * 6 * 3 * 2 * 4 * 4 * (1 + 1 + 1),
    ),
    "deformable convolution, backward": (
        "torchvision",
        "_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset, "
        "Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, "
        "SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups, "
        "bool use_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        lambda grad, image, weight, offset, mask, bias, *_: tuple(
            torch.empty_like(t) for t in (image, weight, offset, mask, bias)
        ),
        (CONVOLVED, IMAGE, torch.ones(4, 6 // GROUPS, 3, 3), torch.ones(2, 18, 7, 6),
         torch.ones(2, 9, 7, 6), torch.ones(4), 1, 1, 0, 0, 1, 1, GROUPS, 1, True),
        2 * (2 * 4 * 7 * 6 * 3 * 3 * 3),
        2 * 2 * (2 * 4 * 7 * 6 * 3 * 3 * 3)
        # image: to four neighbours sample · weight · mask, summed
        + SAMPLED * 4 * (2 + 1)
        # offset: in two directions a slope (5) · sample · mask, summed
        + SAMPLED * 2 * (5 + 2 + 1) - 2 * 18 * 7 * 6
        # mask: the value (7) · sample, summed; bias
        + SAMPLED * (7 + 1 + 1) - 2 * 9 * 7 * 6 + 2 * 4 * 7 * 6 - 4
        # the masked values again, for the gradient of the weight
        + SAMPLED * (7 + 1),
    ),
    "deformable convolution": (
        "torchvision",
        "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
        "int stride_h, int stride_w, int pad_h, int pad_w, int dilation_h, int dilation_w, "
        "int groups, int offset_groups, bool use_mask) -> Tensor",
        lambda *_: CONVOLVED.clone(),
        (IMAGE, torch.ones(4, 6 // GROUPS, 3, 3), torch.ones(2, 18, 7, 6), torch.ones(2, 9, 7, 6),
         torch.ones(4), 1, 1, 0, 0, 1, 1, GROUPS, 1, True),
        2 * 4 * 7 * 6 * 3 * 3 * 3,
        2 * (2 * 4 * 7 * 6 * 3 * 3 * 3) + 8 * SAMPLED + 2 * 4 * 7 * 6,
    ),
    "all reduce": (
        "deepspeed", "inference_all_reduce(Tensor self) -> Tensor", torch.empty_like, (OUT,), 0, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_operator_of_the_librarys_schema_costs_what_is_counted_by_hand(case: str) -> None:
    library, schema, kernel, args, macs, flops = CASES[case]
    with stand_in(library, schema, kernel) as op:
        profile = profile_of(op, *args)
    assert not profile.uncounted_ops()
    assert (profile.total().macs, profile.total().flops) == (macs, flops)


def test_rms_norm_costs_what_torchs_own_does() -> None:
    x = torch.ones(T, D)
    with torch.inference_mode():
        own = flops_of(torch.ops.aten._fused_rms_norm, x, [D], torch.ones(D), 1e-6)
    assert own == RMS_NORM


def test_roi_align_with_samples_by_box_is_listed() -> None:
    library, schema, kernel, args, _, _ = CASES["roi align"]
    adaptive = (*args[:5], -1, False)
    with (
        stand_in(library, schema, kernel) as op,
        pytest.warns(UncountedWarning, match="depends on the boxes"),
    ):
        profile_of(op, *adaptive)


PAGED = (
    "paged_attention_v1(Tensor! out, Tensor query, Tensor key_cache, Tensor value_cache, "
    "int num_kv_heads, float scale, Tensor block_tables, Tensor seq_lens, int block_size, "
    "int max_seq_len, Tensor? alibi_slopes, str kv_cache_dtype, Tensor k_scale, Tensor v_scale, "
    "int tp_rank, int blocksparse_local_blocks, int blocksparse_vert_stride, "
    "int blocksparse_block_size, int blocksparse_head_sliding_step) -> ()"
)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_paged_attention_counts_the_lengths_that_are_at_hand(device: str) -> None:
    """Lengths on a device count as the longest one."""
    longest = 7
    lengths = torch.arange(longest - T + 1, longest + 1, dtype=torch.int32, device=device)
    keys = sum(range(longest - T + 1, longest + 1)) if device == "cpu" else T * longest
    query = torch.ones(T, HEADS, SIZE)
    cache: Tensor = torch.ones(11, KV_HEADS, SIZE, 16)
    tables, scale = torch.ones(T, 1), torch.ones(1)
    args = (torch.empty_like(query), query, cache, cache, KV_HEADS, 1.0, tables, lengths, 16,
            longest, None, "auto", scale, scale, 0, 0, 0, 0, 0)  # fmt: skip
    with stand_in("_C", PAGED, nothing) as op:
        total = profile_of(op, *args).total()
    pairs, rows = HEADS * keys, T * HEADS
    assert total.macs == pairs * 2 * SIZE
    assert total.flops == 2 * total.macs + (rows + pairs) * SIZE + 6 * pairs - 2 * rows
    assert total.bytes_read == 4 * (query.numel() + 2 * keys * KV_HEADS * SIZE)
    assert total.bytes_written == 4 * query.numel()


CHANNELS, LENGTH, WIDTH = 5, 7, 4
SEQUENCES = torch.ones(2, CHANNELS, LENGTH)
KERNEL, BIAS = torch.ones(CHANNELS, WIDTH), torch.ones(CHANNELS)
N = SEQUENCES.numel()
CAUSAL = (
    "_causal_conv1d_fwd_cpp(Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, "
    "Tensor? initial_states, Tensor(a5!) out, Tensor(a6!)? final_states_out, "
    "bool silu_activation) -> ()"
)
CAUSAL_BACKWARD = (
    "_causal_conv1d_bwd_cpp(Tensor x, Tensor weight, Tensor? bias, Tensor dout, Tensor? seq_idx, "
    "Tensor? initial_states, Tensor(a6!)? dfinal_states, Tensor(a7!) dx, Tensor(a8!) dweight, "
    "Tensor(a9!)? dbias, Tensor(a10!) dinitial_states, bool silu_activation) -> ()"
)
CAUSAL_UPDATE = (
    "_causal_conv1d_update_cpp(Tensor x, Tensor(a1!) conv_state, Tensor weight, Tensor? bias, "
    "Tensor(a4!) out, bool silu_activation, Tensor? cache_seqlens, Tensor? conv_state_indices) "
    "-> ()"
)


def test_causal_convolution_costs_a_product_per_tap_the_bias_and_the_activation() -> None:
    out, states = torch.ones_like(SEQUENCES), torch.ones(2, CHANNELS, WIDTH - 1)
    with stand_in("DaoAILab", CAUSAL, nothing) as op:
        plain = profile_of(op, SEQUENCES, KERNEL, None, None, None, out, None, False).total()
        full = profile_of(op, SEQUENCES, KERNEL, BIAS, None, states, out, states, True).total()
    assert (plain.macs, plain.flops) == (N * WIDTH, 2 * N * WIDTH)
    assert (plain.bytes_read, plain.bytes_written) == (4 * (N + CHANNELS * WIDTH), 4 * N)
    assert full.flops == 2 * N * WIDTH + N + flops_of(F.silu, SEQUENCES)
    read = N + CHANNELS * WIDTH + CHANNELS + states.numel()
    assert (full.bytes_read, full.bytes_written) == (4 * read, 4 * (N + states.numel()))


@pytest.mark.parametrize("silu", [False, True])
def test_causal_convolution_backward_recomputes_for_the_activation_alone(silu: bool) -> None:
    grads = (torch.ones(2, CHANNELS, LENGTH), torch.ones(CHANNELS, WIDTH), torch.ones(CHANNELS))
    states = torch.ones(2, CHANNELS, WIDTH - 1)
    args = (SEQUENCES, KERNEL, BIAS, SEQUENCES.clone(), None, None, None, *grads, states, silu)
    with stand_in("DaoAILab", CAUSAL_BACKWARD, nothing) as op:
        profile = profile_of(op, *args)
    own, again = profile.total("forward"), profile.total("recompute")
    activation = flops_of(torch.ops.aten.silu_backward, SEQUENCES, SEQUENCES)
    assert own.macs == 2 * N * WIDTH
    assert own.flops == 4 * N * WIDTH + N - CHANNELS + silu * activation
    assert (again.macs, again.flops) == (silu * N * WIDTH, silu * (2 * N * WIDTH + N))
    assert own.bytes_read == 4 * (2 * N + CHANNELS * WIDTH + CHANNELS)
    assert own.bytes_written == 4 * (N + CHANNELS * WIDTH + CHANNELS + states.numel())


def test_causal_convolution_update_moves_the_states_that_it_uses() -> None:
    state, x, out = torch.ones(2, CHANNELS, 11), torch.ones(2, CHANNELS), torch.ones(2, CHANNELS)
    new, lengths = 2 * CHANNELS, torch.ones(2, dtype=torch.int32)
    weights = CHANNELS * WIDTH
    with stand_in("DaoAILab", CAUSAL_UPDATE, nothing) as op:
        moved = profile_of(op, x, state, KERNEL, None, out, False, None, None).total()
        circle = profile_of(op, x, state, KERNEL, None, out, False, lengths, None).total()
    assert moved.macs == circle.macs == new * WIDTH
    assert moved.bytes_read == 4 * (new + weights + state.numel())
    assert moved.bytes_written == 4 * (new + state.numel())
    assert circle.bytes_read == 4 * (new + weights + 2 + new * (WIDTH - 1))
    assert circle.bytes_written == 4 * (new + new)
