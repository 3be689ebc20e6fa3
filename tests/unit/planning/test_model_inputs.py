"""Inputs of a model that ``build`` made, and their samples and tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops.planning.model_inputs import converted, model_and_inputs, samples_and_tokens

B, S, D = 3, 5, 7


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"x": 1}, ((), {"x": 1})),
        ([1, 2], ((1, 2), {})),
        ((1, 2), ((1, 2), {})),
        (1, ((1,), {})),
    ],
)
def test_inputs_of_a_model_are_by_position_or_by_name(inputs: Any, expected: Any) -> None:
    model = nn.Identity()
    assert model_and_inputs((model, inputs)) == (model, *expected)


def test_another_dtype_is_that_of_floating_point_inputs_alone() -> None:
    found = converted({"ids": torch.ones(2, dtype=torch.int64), "x": [torch.ones(2)]}, torch.half)
    assert (found["ids"].dtype, found["x"][0].dtype) == (torch.int64, torch.half)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ([torch.ones(B, S, dtype=torch.int64)], (B, B * S)),
        ([torch.ones(()), torch.ones(B, S, dtype=torch.int64)], (B, B * S)),
        ([torch.ones(B, S)], (B, None)),
        ([torch.ones(B, S, D, dtype=torch.int64)], (B, None)),
        ([torch.ones(())], (None, None)),
    ],
)
def test_tokens_are_the_elements_of_ids_of_two_dimensions(
    inputs: list[torch.Tensor], expected: tuple[int | None, int | None]
) -> None:
    assert samples_and_tokens(inputs) == expected
