"""Samples and tokens of a job, from the inputs that its ranks were called with."""

from __future__ import annotations

import pytest

from dispatch_flops.planning.meshes import observed_samples, of_all_ranks
from dispatch_flops.profile import ModuleNode, Profile, RunInfo, TensorInput

B, S, CALLS = 3, 5, 7


def called_with(shape: tuple[int, ...] | None, dtype: str = "int64", calls: int = CALLS) -> Profile:
    found = TensorInput(name="x", shape=shape, dtype=dtype, device="cpu")
    return Profile(
        root=ModuleNode(fqn="", class_name="Net", calls=calls), run=RunInfo(inputs=(found,))
    )


IDS = called_with((B, S))


@pytest.mark.parametrize(
    ("profiles", "expected"),
    [
        ([IDS], (B * CALLS, B * S * CALLS)),
        ([called_with((B, S), "float32"), IDS], (B * CALLS, None)),
        ([called_with((B, S, 2))], (B * CALLS, None)),
        ([Profile(root=ModuleNode(fqn="", class_name="Net", calls=1)), IDS], (21, 105)),
        ([called_with(None), called_with(()), called_with((2, 2), calls=0), IDS], (21, 105)),
        ([], (None, None)),
    ],
)
def test_samples_are_those_of_all_micro_batches_of_the_first_rank_that_shows_them(
    profiles: list[Profile], expected: tuple[int | None, int | None]
) -> None:
    assert observed_samples(profiles) == expected


def test_samples_of_all_ranks_are_those_of_each_position_along_the_dimensions_of_data() -> None:
    assert of_all_ranks((B, None), {"pp": 2, "dp_shard": 4, "tp": 8}) == (4 * B, None)
    assert of_all_ranks((B, B * S), {"dp": 4, "cp": 2}) == (None, None)
