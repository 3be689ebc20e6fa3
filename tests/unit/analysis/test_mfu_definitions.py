"""Each definition of MFU against its closed form, on a hand-built profile with round peaks."""

from __future__ import annotations

import dataclasses

import pytest

from dispatch_flops.analysis import mfu
from dispatch_flops.analysis.machines import Machine
from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import ModuleNode, Profile, RunInfo
from dispatch_flops.profile.run_info import TensorInput
from tests.helpers.trees import linear, module, op, place

# Sizes without a common factor, so that no two products agree by chance.
LAYERS, WIDTH, VOCABULARY, BATCH, SEQUENCE = 5, 7, 11, 2, 13
TOKENS = BATCH * SEQUENCE
EMBEDDING, HEAD, LAYER = VOCABULARY * WIDTH, WIDTH * VOCABULARY + VOCABULARY, WIDTH * 3 + 3
PARAMS = EMBEDDING + HEAD + LAYERS * LAYER
PEAK = 1000.0
MACHINE = Machine(name="test", flops_per_s={"bfloat16": PEAK, "float32": 100.0})
SECONDS = 3.0


def block(index: int) -> ModuleNode:
    return module("Block", linear("fc", WIDTH, 3, batch=0), name=str(index))


def embedding(**fields: object) -> ModuleNode:
    shape = ((BATCH, SEQUENCE, WIDTH),)
    return module("Embedding", name="embed", own_params=EMBEDDING, output_shapes=shape, **fields)


def rotary() -> ModuleNode:
    """What gives the rotations of a head of size 3, as in Llama; its heads may be any number."""
    shape = (1, SEQUENCE, 3)
    return module("RotaryEmbedding", name="rotary", output_shapes=(shape, shape))


def transformer(*changed: ModuleNode, stacks: int = 1, calls: int = 1, **run: object) -> Profile:
    """A transformer whose operators have 17 MACs in bfloat16 and 19 other FLOPs in float32."""
    stack = [
        module("ModuleList", *map(block, range(LAYERS)), name=f"layers{i}") for i in range(stacks)
    ]
    ops = (
        op("aten.mm.default", macs=17, dtype="bfloat16"),
        op("aten.mm.default", "backward", macs=34, dtype="bfloat16"),
        op("aten.mm.default", "recompute", macs=17, dtype="bfloat16"),
        op("aten.gelu.default", extra_flops=19),
    )
    children = changed or (embedding(), *stack, linear("head", WIDTH, VOCABULARY, batch=0))
    ids = TensorInput(name="ids", shape=(BATCH, SEQUENCE), dtype="int64", device="cpu")
    root = module("Net", *children, ops=ops, calls=calls)
    return Profile(root=place(root), run=RunInfo(**{"inputs": (ids,), **run}))


ATTENTION = LAYERS * WIDTH * SEQUENCE


@pytest.mark.parametrize(
    ("definition", "flops_per_token"),
    [
        ("6N", 6 * PARAMS),
        ("6N without embedding", 6 * (PARAMS - EMBEDDING)),
        ("6N+12LdT", 6 * PARAMS + 12 * ATTENTION),
        ("6N+12LdT without embedding", 6 * (PARAMS - EMBEDDING) + 12 * ATTENTION),
        ("6N+6LdT", 6 * PARAMS + 6 * ATTENTION),
        ("6N+6LdT without embedding", 6 * (PARAMS - EMBEDDING) + 6 * ATTENTION),
    ],
)
def test_mfu_of_a_closed_form_reads_its_sizes_from_the_profile(
    definition, flops_per_token: int
) -> None:
    expected = TOKENS * flops_per_token / (PEAK * SECONDS)
    assert mfu(transformer(), MACHINE, SECONDS, definition=definition) == pytest.approx(expected)


def test_mfu_of_a_closed_form_takes_integer_inputs_alone_for_token_ids() -> None:
    mask = TensorInput(name="mask", shape=(BATCH, 3), dtype="float32", device="cpu")
    masked = transformer(inputs=(*(transformer().run.inputs or ()), mask))
    assert mfu(masked, MACHINE, SECONDS, definition="6N") == pytest.approx(
        TOKENS * 6 * PARAMS / (PEAK * SECONDS)
    )


def test_mfu_of_all_flops_takes_the_peak_of_each_dtype() -> None:
    least = 2 * (17 + 34) / PEAK + 19 / 100.0
    assert mfu(transformer(), MACHINE, SECONDS) == pytest.approx(least / SECONDS)
    assert mfu(transformer(), MACHINE, SECONDS, definition="all") == mfu(
        transformer(), MACHINE, SECONDS
    )


def test_mfu_of_contractions_leaves_out_other_flops_and_recomputation() -> None:
    found = mfu(transformer(), MACHINE, SECONDS, definition="contractions")
    assert found == pytest.approx(2 * (17 + 34) / PEAK / SECONDS)


def test_mfu_of_a_closed_form_prefers_the_sizes_given() -> None:
    found = mfu(
        transformer(), MACHINE, SECONDS, definition="6N+12LdT without embedding", params=101,
        embedding_params=23, layers=29, width=31, tokens=37, sequence=41,
    )  # fmt: skip
    assert found == pytest.approx(37 * (6 * (101 - 23) + 12 * 29 * 31 * 41) / (PEAK * SECONDS))


@pytest.mark.parametrize(
    ("profile", "definition", "message"),
    [
        (transformer(), "7N", "definition='7N' is not a definition of MFU; choose 'all'"),
        (transformer(inputs=None), "6N", "needs tokens, which the profile does not show"),
        (transformer(inputs=()), "6N+12LdT", r"pass (tokens|sequence)="),
        (transformer(inputs=()), "6N", "no input of the model is known to be token ids"),
        (transformer(world_size=4), "6N", "divide those of a step by the ranks"),
        (transformer(calls=3), "6N", r"called 3 times.*pass tokens="),
        (transformer(stacks=2), "6N+12LdT", "not one stack of equal layers"),
        (
            transformer(embedding(), *map(block, range(LAYERS)), rotary()),
            "6N+12LdT",
            r"needs width.*have outputs of width 3, 7; it is heads x head size\); pass width=",
        ),
        (
            transformer(linear("head", 2, 3)),
            "6N without embedding",
            "no module is an Embedding",
        ),
    ],
)
def test_mfu_without_a_size_says_which_to_pass(profile, definition, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mfu(profile, MACHINE, SECONDS, definition=definition)


def test_mfu_without_embedding_of_shared_parameters_asks_for_their_number() -> None:
    shared = transformer()
    root = dataclasses.replace(shared.root, total_params=PARAMS - EMBEDDING)
    tied = dataclasses.replace(shared, root=root)
    with pytest.raises(ConfigError, match="several modules share a parameter"):
        mfu(tied, MACHINE, SECONDS, definition="6N without embedding")


def test_mfu_of_micro_batches_does_not_read_their_length_from_the_first() -> None:
    with pytest.raises(ConfigError, match=r"called 3 times.*pass sequence="):
        mfu(transformer(calls=3), MACHINE, SECONDS, definition="6N+12LdT", tokens=3 * TOKENS)


def test_mfu_of_a_closed_form_refuses_a_size_that_is_not_a_number() -> None:
    with pytest.raises(ConfigError, match=r"layers=2.5: pass a whole number"):
        mfu(transformer(), MACHINE, SECONDS, definition="6N+12LdT", layers=2.5)  # type: ignore[arg-type]


def test_mfu_of_a_closed_form_without_a_peak_is_none() -> None:
    machine = Machine(name="test", flops_per_s={"float32": 100.0})
    assert mfu(transformer(), machine, SECONDS, definition="6N") is None
