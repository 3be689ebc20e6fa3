"""Profiles built by hand for the tests of analysis and renderers."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from hypothesis import strategies as st

from dispatch_flops.profile import (
    OUTSIDE,
    ModuleNode,
    OpTotal,
    PhaseSeconds,
    Profile,
    RunInfo,
    StepTiming,
)
from dispatch_flops.profile.cost import OpCost, Phase

BATCH = 1024  # of lenet5


def op(
    name: str,
    phase: Phase = "forward",
    *,
    macs: int = 0,
    extra_flops: int = 0,
    n_bytes: tuple[int, int] = (0, 0),
    calls: int = 1,
    **fields: Any,
) -> OpTotal:
    """An operator of known cost: 2 FLOPs per MAC and ``extra_flops``; bytes read and written."""
    read, written = n_bytes
    cost = OpCost(macs=macs, flops=2 * macs + extra_flops, bytes_read=read, bytes_written=written)
    return OpTotal(op=name, phase=phase, calls=calls, cost=cost, **({"dtype": "float32"} | fields))


def unknown(name: str, phase: Phase = "forward", calls: int = 1, **fields: Any) -> OpTotal:
    """An operator without a formula."""
    return OpTotal(
        op=name, phase=phase, calls=calls, uncounted=calls, cost=None, kind="unknown", **fields
    )


def timed(**by_phase: float | None) -> PhaseSeconds:
    """``timed(forward=1.0)``: seconds per phase, of which None is not measured."""
    return PhaseSeconds(cast("dict[Phase, float | None]", by_phase))


def module(
    class_name: str,
    *children: ModuleNode,
    name: str = "",
    parent: str = "",
    own_params: int = 0,
    calls: int = 1,
    latency_s: float | None = None,
    **fields: Any,
) -> ModuleNode:
    """A node whose parameters all are its own or its children's, and trainable.

    Without ``parent`` it is made below the root; ``place`` gives trees their fqns.
    latency_s: of the forward.
    """
    total = own_params + sum(child.total_params for child in children)
    return ModuleNode(
        fqn=f"{parent}.{name}" if parent else name,
        name=name,
        class_name=class_name,
        children=children,
        calls=calls,
        own_params=own_params,
        total_params=total,
        active_params=total,
        trainable_params=total,
        **({"seconds": timed(forward=latency_s)} | fields),
    )


def place(node: ModuleNode, parent: str = "") -> ModuleNode:
    """Return the tree with fqns made of its names (recursive, for shallow trees)."""
    fqn = f"{parent}.{node.name}" if parent else node.name
    children = tuple(place(child, fqn) for child in node.children)
    return dataclasses.replace(node, fqn=fqn, children=children)


def conv(name: str, cin: int, cout: int, side: int, flops_per_s: float) -> ModuleNode:
    macs = BATCH * cout * cin * 5 * 5 * side * side
    bias = BATCH * cout * side * side
    return module(
        "Conv2d",
        name=name,
        own_params=cout * cin * 5 * 5 + cout,
        extra_repr=f"{cin}, {cout}, kernel_size=(5, 5), stride=(1, 1)",
        ops=(op("aten.convolution.default", macs=macs, extra_flops=bias),),
        latency_s=(2 * macs + bias) / flops_per_s,
    )


def linear(name: str, n_in: int, n_out: int, batch: int = BATCH, **fields: Any) -> ModuleNode:
    return module(
        "Linear",
        name=name,
        own_params=n_in * n_out + n_out,
        extra_repr=f"in_features={n_in}, out_features={n_out}, bias=True",
        ops=(op("aten.addmm.default", macs=batch * n_in * n_out),),
        **fields,
    )


def tanh(name: str, latency_s: float) -> ModuleNode:
    return module("Tanh", name=name, ops=(op("aten.tanh.default"),), latency_s=latency_s)


def pool(name: str, elements: int, flops_per_s: float) -> ModuleNode:
    return module(
        "AvgPool2d",
        name=name,
        extra_repr="kernel_size=2, stride=2, padding=0",
        ops=(op("aten.avg_pool2d.default", extra_flops=BATCH * elements),),
        latency_s=BATCH * elements / flops_per_s,
    )


def lenet5() -> Profile:
    """LeNet5 with the latencies and the FLOP conventions of a run of DeepSpeed's profiler."""
    features = module(
        "Sequential",
        conv("0", 1, 6, 28, 1.36110e9),
        tanh("1", 15.23e-3),
        pool("2", 6 * 28 * 28, 793.91e6),
        conv("3", 6, 16, 10, 173.89e9),
        tanh("4", 5.08e-3),
        pool("5", 16 * 10 * 10, 723.06e6),
        conv("6", 16, 120, 1, 29.22e9),
        tanh("7", 290.39e-6),
        name="feature_extractor",
        latency_s=215.89e-3,
    )
    classifier = module(
        "Sequential",
        linear("0", 120, 84, latency_s=298.98e-6),
        tanh("1", 184.77e-6),
        linear("2", 84, 10, latency_s=62.7e-6),
        name="classifier",
        latency_s=575.78e-6,
    )
    root = module(
        "LeNet5",
        features,
        classifier,
        ops=(op("aten._softmax.default", extra_flops=BATCH * 10),),
        latency_s=216.68e-3,
    )
    return Profile(root=place(root))


def training_step() -> Profile:
    """Linear(64, 256), ReLU, Linear(256, 64) on 4 rows, trained for one step by 2 of 4 ranks."""
    rows, wide, narrow = 4, 256, 64
    macs = rows * wide * narrow
    moved = (4 * (rows * narrow + wide * narrow + wide), 4 * rows * wide)
    first = module(
        "Linear",
        name="0",
        own_params=narrow * wide + wide,
        extra_repr=f"in_features={narrow}, out_features={wide}, bias=True",
        ops=(
            op("aten.addmm.default", macs=macs, n_bytes=moved),
            op("aten.mm.default", "backward", macs=macs),
            op("aten.sum.dim_IntList", "backward", extra_flops=3 * wide, kind="reduction"),
            op("aten.t.default", kind="free", calls=2),
        ),
        latency_s=38.15e-6,
    )
    middle = module(
        "ReLU",
        name="1",
        ops=(
            op("aten.relu.default", extra_flops=rows * wide, kind="pointwise"),
            op("aten.threshold_backward.default", "backward", extra_flops=rows * wide),
            op("aten.relu.default", "recompute", extra_flops=rows * wide, kind="pointwise"),
        ),
        latency_s=15.74e-6,
    )
    last = module(
        "Linear",
        name="2",
        own_params=narrow * wide + narrow,
        extra_repr=f"in_features={wide}, out_features={narrow}, bias=True",
        ops=(
            op("aten.addmm.default", macs=macs),
            op("aten.mm.default", "backward", macs=2 * macs, calls=2),
            op("aten.sum.dim_IntList", "backward", extra_flops=3 * narrow, kind="reduction"),
        ),
        latency_s=15.02e-6,
    )
    root = module("Sequential", first, middle, last)
    params = root.total_params
    outside = ModuleNode(
        fqn=OUTSIDE,
        name=OUTSIDE,
        class_name="outside",
        ops=(
            op("aten.mse_loss.default", extra_flops=3 * rows * narrow),
            op("aten._foreach_add_.List", "optimizer", extra_flops=2 * params, dtype="bfloat16"),
        ),
    )
    timing = StepTiming(
        seconds=timed(forward=97.51e-6, backward=240.09e-6, optimizer=314.47e-6),
        spread_s=1.5e-6,
        repeats=5,
        method="hooks, device synchronised once",
    )
    scope = RunInfo(
        device="cuda",
        device_name="NVIDIA A100",
        torch_version="2.13.0",
        rank=1,
        world_size=4,
        data_parallel_size=2,
        model_parallel_size=2,
        batch_size=rows,
        causal="half",
    )
    notes = ("the first step was left out",)
    return Profile(root=place(root), outside=outside, timing=timing, run=scope, notes=notes)


def lower_bound() -> Profile:
    """Two operators without a cost: one has no formula, the formula of the other raised."""
    known = linear("known", 3, 5, batch=7, latency_s=2e-3)
    partly = module(
        "Custom",
        name="partly",
        ops=(
            OpTotal(
                op="lib.scan.default",
                phase="forward",
                calls=3,
                uncounted=2,
                cost=OpCost(macs=11, flops=22, bytes_read=13, bytes_written=17),
                error="ValueError: no\nlength | here",
            ),
            unknown("lib.mystery.default", calls=4),
        ),
        latency_s=1e-3,
    )
    return Profile(root=place(module("Net", known, partly, latency_s=3e-3)))


def empty() -> Profile:
    """A model that never ran."""
    return Profile(root=module("Empty", calls=0))


def unmeasured() -> Profile:
    """Containers and a module that never ran: latencies are there only in part."""
    block = module("Block", linear("fc", 2, 3, batch=1, latency_s=1e-3), name="0", latency_s=4e-3)
    skipped = module("Block", linear("fc", 2, 3, batch=0, calls=0), name="1", calls=0)
    layers = module("ModuleList", block, skipped, name="layers", calls=0)
    head = module("Head", name="head", latency_s=0.0)
    return Profile(root=place(module("Net", layers, head)))


HOSTILE_NAMES = (
    "</script><script>alert(1)</script>",
    "\"double\" 'single' `back`",
    "two\nlines\r\n\tand tab",
    "pipe|semi;colon,comma",
    "bare\rreturn",
    "emoji 😀 and \x1b[31mred",
    "=cmd|' /C calc'!A0",
    "line\u2028separator \ud800 surrogate",
    "",
)


def hostile() -> Profile:
    """Names, classes and descriptions that try to be markup."""
    children = [
        module(
            name,
            name=name or "nameless",
            extra_repr=f"first {name}\nsecond",
            ops=(op(f"lib.{name}", macs=index + 1),),
        )
        for index, name in enumerate(HOSTILE_NAMES)
    ]
    return Profile(root=place(module("Root\n)", *children)), notes=("a note\nof two lines",))


def shared() -> Profile:
    """One Linear held by two parents: it is under the one that called it, with its params once."""
    used = linear("fc", 100, 100, batch=3, latency_s=3e-3)
    first = module("Holder", used, name="first", latency_s=3e-3)
    second = module("Holder", name="second", latency_s=0.0)
    return Profile(root=place(module("Shared", first, second, latency_s=4e-3)))


def encoder(layers: int = 12) -> Profile:
    """Identical layers, as a transformer's; the embedding before them differs."""

    def layer(index: int) -> ModuleNode:
        hidden = [linear(name, 5, 7, batch=3, latency_s=1e-3) for name in ("query", "key")]
        mlp = module("Sequential", *(linear(str(i), 7, 5, batch=3) for i in range(2)), name="mlp")
        return module("Layer", *hidden, mlp, name=str(index), latency_s=(index + 1) * 1e-3)

    stack = module("ModuleList", *(layer(i) for i in range(layers)), name="layer", calls=0)
    embedding = module("Embedding", name="embedding", own_params=11 * 5, extra_repr="11, 5")
    return Profile(root=place(module("Encoder", embedding, stack, latency_s=90e-3)))


def varying(fqn: str) -> Profile:
    """Three layers, of which one takes a third more or less from run to run."""

    def change(node: ModuleNode) -> ModuleNode:
        if node.fqn != fqn:
            return node
        return dataclasses.replace(node, latency_spread_s=(node.latency_s or 0.0) / 3)

    return encoder(3).map_nodes(change)


def deep(levels: int) -> Profile:
    """A chain far deeper than Python's stack, with one FLOP per level."""
    node: ModuleNode | None = None
    for level in reversed(range(levels)):
        node = ModuleNode(
            fqn=str(level) if level else "",
            name="0" if level else "",
            class_name="Level",
            calls=1,
            ops=(op("aten.neg.default", extra_flops=1),),
            children=() if node is None else (node,),
        )
    assert node is not None
    return Profile(root=node)


def wide(modules: int) -> Profile:
    """A flat model; its modules have 1, 2, 3, ... MACs."""
    children = [
        module("Leaf", name=str(i), own_params=1, ops=(op("aten.dot.default", macs=i + 1),))
        for i in range(modules)
    ]
    return Profile(root=module("Wide", *children))


SMALL = {
    "lenet5": lenet5,
    "training_step": training_step,
    "lower_bound": lower_bound,
    "empty": empty,
    "unmeasured": unmeasured,
    "hostile": hostile,
    "shared": shared,
    "encoder": encoder,
}

# -- any profile --------------------------------------------------------------------------------

_counts = st.integers(0, 10**15)
_costs = st.builds(OpCost, macs=_counts, flops=_counts, bytes_read=_counts, bytes_written=_counts)
_seconds = st.none() | st.floats(0, 1e3)
_phases: st.SearchStrategy[Phase] = st.sampled_from(
    ["forward", "backward", "recompute", "optimizer"]
)
_known = st.builds(
    OpTotal,
    op=st.sampled_from(["aten.mm.default", "aten.add.Tensor", "x|y;z\n"]),
    phase=_phases,
    dtype=st.sampled_from([None, "float32", "bfloat16"]),
    calls=st.integers(0, 9),
    cost=_costs,
)
_unknown = st.builds(unknown, st.sampled_from(["lib.a", "lib.b"]), _phases, st.integers(1, 9))
_ops = st.lists(_known | _unknown, max_size=3).map(tuple)


def _nodes(children: st.SearchStrategy[tuple[ModuleNode, ...]]) -> st.SearchStrategy[ModuleNode]:
    return st.builds(
        lambda kids, **fields: module(fields.pop("class_name"), *kids, **fields),
        children,
        class_name=st.sampled_from(["Linear", "Block", "a\nb"]),
        own_params=st.integers(0, 10**12),
        calls=st.integers(0, 3),
        ops=_ops,
        latency_s=_seconds,
        extra_repr=st.text(max_size=5),
    )


def _number(children: list[ModuleNode]) -> tuple[ModuleNode, ...]:
    return tuple(dataclasses.replace(child, name=str(i)) for i, child in enumerate(children))


_trees = st.recursive(
    _nodes(st.just(())),
    lambda below: _nodes(st.lists(below, max_size=3).map(_number)),
    max_leaves=8,
)
profiles: st.SearchStrategy[Profile] = st.builds(
    lambda root, ops: Profile(
        root=place(root),
        outside=ModuleNode(fqn=OUTSIDE, name=OUTSIDE, class_name="outside", ops=ops),
    ),
    _trees,
    _ops,
)
