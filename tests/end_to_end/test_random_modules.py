"""Random models count what their modules state, in every module and phase.

A budget of models by default, 1,000 with ``--whole``. A model is made from its number alone.
"""

from __future__ import annotations

import warnings
from random import Random

import pytest
import torch

from dispatch_flops import FlopCounterMode
from tests.helpers.attributing import work_of
from tests.helpers.random_modules import random_model, run

MODELS, ALL_MODELS = 40, 1_000


def difference(seed: int) -> str:
    """Return what is counted otherwise than stated in the model of that number; "" for nothing."""
    torch.manual_seed(seed)
    model, x, statements = random_model(Random(seed))
    with warnings.catch_warnings(), FlopCounterMode(model, display=False) as counter:
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        run(model, x, statements)
    stated, counted = statements.table(), work_of(counter.profile.check())
    if stated == counted:
        return ""
    lines = [
        f"{fqn or 'the model'}: stated {stated.get(fqn)}, counted {counted.get(fqn)}"
        for fqn in sorted(stated.keys() | counted.keys())
        if stated.get(fqn) != counted.get(fqn)
    ]
    return "\n".join([f"model {seed}", *lines])


@pytest.mark.slow
def test_random_models_count_what_their_modules_state(request: pytest.FixtureRequest) -> None:
    models = ALL_MODELS if request.config.getoption("--whole") else MODELS
    differences = list(filter(None, map(difference, range(models))))
    assert not differences, "\n\n".join(differences[:10])
