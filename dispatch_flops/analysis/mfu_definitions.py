"""The numerators of MFU that papers use: counted FLOPs, contractions alone, 6N, and 6N + 12LdT.

N is the number of parameters, L of layers, d the width of attention (heads x head size) and T the
length of a sequence. Two papers that measure the same run disagree where their numerators do.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, get_args

from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import ModuleNode, OpTotal, Profile
from dispatch_flops.profile.cost import FLOPS_PER_MAC, MODEL_PHASES, OpCost

MfuDefinition = Literal[
    "all", "contractions", "6N", "6N without embedding", "6N+12LdT",
    "6N+12LdT without embedding", "6N+6LdT", "6N+6LdT without embedding",
]  # fmt: skip

# FLOPs of attention for each layer, channel, position and token: scores and values take 2 MACs,
# and backward twice as many. A causal mask keeps half of them.
# Source: PaLM, arXiv 2204.02311, appendix B; llm-foundry, scripts/train/benchmarking.
_ATTENTION = {"6N": 0, "6N+12LdT": 12, "6N+6LdT": 6}
_WITHOUT = " without embedding"


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenSizes:
    """Sizes of a transformer and its step; None where the profile is read.

    params: of the model. embedding_params: of these, those of look-up tables.
    layers, width: number of attention layers, and heads x head size.
    tokens: of the step, for each device. sequence: tokens in a sequence.
    """

    params: int | None = None
    embedding_params: int | None = None
    layers: int | None = None
    width: int | None = None
    tokens: int | None = None
    sequence: int | None = None


def ops_of_definition(
    profile: Profile, definition: MfuDefinition, given: GivenSizes
) -> list[OpTotal]:
    """Return the operators whose FLOPs are the numerator of MFU by this definition.

    For "6N" and its variants that is one operator, in the dtype of most multiply-accumulates.

    Raises ConfigError for an unknown definition, and for a size that is neither given nor
    readable from the profile.
    """
    if definition not in get_args(MfuDefinition):
        names = ", ".join(map(repr, get_args(MfuDefinition)))
        raise ConfigError(
            f"definition={definition!r:.60} is not a definition of MFU; choose {names}"
        )
    model = [op for op in profile.op_totals() if op.phase in MODEL_PHASES]
    if definition == "all":
        return model
    if definition == "contractions":
        return [_contraction(op) for op in model]
    flops = _closed_form(profile, definition, given)
    dtype = _main_dtype(model)
    cost = OpCost(flops=flops)
    return [OpTotal(op=definition, phase=MODEL_PHASES[0], dtype=dtype, calls=1, cost=cost)]


def _contraction(op: OpTotal) -> OpTotal:
    macs = op.cost.macs if op.cost else 0
    cost = None if op.cost is None else OpCost(macs=macs, flops=FLOPS_PER_MAC * macs)
    return OpTotal(
        op=op.op, phase=op.phase, dtype=op.dtype, calls=op.calls, cost=cost, uncounted=op.uncounted
    )


def _main_dtype(ops: list[OpTotal]) -> str | None:
    macs: Counter[str | None] = Counter()
    for op in ops:
        macs[op.dtype] += op.cost.macs if op.cost else 0
    return macs.most_common(1)[0][0] if macs else None


def _closed_form(profile: Profile, definition: str, given: GivenSizes) -> int:
    sizes = _Sizes(profile, definition, given)
    per_token = _ATTENTION[definition.removesuffix(_WITHOUT)]
    params = sizes.params
    if definition.endswith(_WITHOUT):
        params -= sizes.embedding_params
    attention = 0
    if per_token:
        attention = per_token * sizes.layers * sizes.width * sizes.sequence
    return sizes.tokens * (6 * params + attention)


class _Sizes:
    """The sizes that a definition needs, each given or read from the profile."""

    def __init__(self, profile: Profile, definition: str, given: GivenSizes) -> None:
        self._profile = profile
        self._definition = definition
        self._given = given

    @property
    def params(self) -> int:
        return self._known("params", self._profile.total_params or None, "the model has none")

    @property
    def embedding_params(self) -> int:
        tables = _embeddings(self._profile)
        found = sum(node.own_params for node in tables)
        held = sum(node.own_params for node in self._profile.root.walk())
        if held != self._profile.total_params:
            return self._known("embedding_params", None, "several modules share a parameter")
        return self._known("embedding_params", found or None, "no module is an Embedding")

    @property
    def layers(self) -> int:
        families = _repeated(self._profile.root)
        found = families[0] if len(families) == 1 else None
        return self._known("layers", found, "the modules are not one stack of equal layers")

    @property
    def width(self) -> int:
        widths = {
            shape[-1]
            for node in _embeddings(self._profile)
            for shape in node.output_shapes or ()
            if shape
        }
        found = widths.pop() if len(widths) == 1 else None
        shown = f"its Embeddings have outputs of width {', '.join(map(str, sorted(widths)))}"
        why = shown if widths else "no Embedding shows an output width"
        return self._known("width", found, f"{why}; it is heads x head size")

    @property
    def tokens(self) -> int:
        shape = self._ids()
        if (self._profile.run.world_size or 1) > 1:
            return self._known(
                "tokens", None, "the run has several ranks; divide those of a step by the ranks"
            )
        return self._known("tokens", shape[0] * shape[1] if shape else None, self._why_no_ids())

    @property
    def sequence(self) -> int:
        shape = self._ids()
        return self._known("sequence", shape[1] if shape else None, self._why_no_ids())

    def _why_no_ids(self) -> str:
        calls = self._profile.root.calls
        if calls > 1:
            return f"the model was called {calls} times, and only the first call's inputs are known"
        return "no input of the model is known to be token ids of shape [batch, sequence]"

    def _ids(self) -> tuple[int, ...] | None:
        """Return the shape of the token ids: the only integer input of two dimensions, or None.

        Other calls, such as those of other micro-batches, may have inputs of other shapes.
        """
        if self._profile.root.calls > 1:
            return None
        shapes = {
            tensor.shape
            for tensor in self._profile.run.inputs or ()
            if tensor.dtype in ("int64", "int32") and tensor.shape and len(tensor.shape) == 2
        }
        found = shapes.pop() if len(shapes) == 1 else None
        return found if found and min(found) > 0 else None

    def _known(self, name: str, found: int | None, why: str) -> int:
        given: int | None = getattr(self._given, name)
        if given is not None:
            if type(given) is not int or given < 0:
                raise ConfigError(f"{name}={given!r:.60}: pass a whole number of at least 0")
            return given
        if found is None:
            raise ConfigError(
                f"the definition {self._definition!r} needs {name}, which the profile does not "
                f"show ({why}); pass {name}="
            )
        return found


_CONTAINERS = ("ModuleDict", "ModuleList")


def _embeddings(profile: Profile) -> list[ModuleNode]:
    return [node for node in profile.root.walk() if node.class_name.endswith("Embedding")]


def _repeated(root: ModuleNode) -> list[int]:
    """Return the lengths of the outermost stacks: sibling modules of one class with children.

    Containers that are not called, such as two ModuleLists, are not layers.
    """
    found = []
    stack = [root]
    while stack:
        node = stack.pop()
        inner = (child.class_name for child in node.children if child.children)
        blocks = Counter(name for name in inner if name not in _CONTAINERS)
        stacked = [count for count in blocks.values() if count > 1]
        found.extend(stacked)
        stack.extend(c for c in node.children if blocks.get(c.class_name, 0) < 2)
    return found
