"""Whole programs with their truth in MACs: the zoo of the tests, transformers' models, and
programs that ask something in particular of a counter."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import from_transformers
import in_particular
from program import ADDED, SDPA, THREE, Program
from torch import nn

from tests.models import CASES, Case

ZOO_NOTES = {
    "mixture of experts": ADDED + "; calflops counts the shared perceptron under both its parents",
    **dict.fromkeys(("ViT-B/16", "GPT-2", "BERT-base", "Llama with grouped queries"), SDPA),
}
ZOO_TRAINING_NOTES = {
    "MobileNetV2": "torch forgets the groups in the gradient of depthwise weights; " + THREE,
    **dict.fromkeys(("GPT-2", "BERT-base", "Llama with grouped queries"), SDPA),
    "ViT-B/16": SDPA + "; " + THREE,
}


def _zoo(case: Case) -> list[Program]:
    def make() -> nn.Module:
        return case.make().eval()

    forward = Program(
        name=case.name,
        make=make,
        inputs=case.inputs,
        macs=case.macs,
        note=ZOO_NOTES.get(case.name, ADDED),
    )
    if case.gradient_macs is None:
        return [forward]
    training = replace(
        forward,
        name=f"{case.name}, forward and backward",
        macs=case.macs + case.gradient_macs,
        backward=True,
        note=ZOO_TRAINING_NOTES.get(case.name, THREE),
    )
    return [forward, training]


GROUPS = {
    "Models in plain torch": [program for case in CASES for program in _zoo(case)],
    "transformers": from_transformers.programs(),
    "In particular": [
        p for p in in_particular.PROGRAMS if not p.needs or importlib.util.find_spec(p.needs)
    ],
}
