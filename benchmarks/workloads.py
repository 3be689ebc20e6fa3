"""Whole programs with their true MACs: the tests' models, transformers' models, and programs that
each test one ability of a counter."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import from_transformers
import special_cases
from program import ADDED, SDPA, THREE, Program
from torch import nn

from tests.models import CASES, Case

NOTES = {
    "mixture of experts": ADDED + "; calflops counts the shared perceptron under both its parents",
    **dict.fromkeys(("ViT-B/16", "GPT-2", "BERT-base", "Llama with grouped queries"), SDPA),
}
TRAINING_NOTES = {
    "MobileNetV2": "torch forgets the groups in the gradient of depthwise weights; " + THREE,
    **dict.fromkeys(("GPT-2", "BERT-base", "Llama with grouped queries"), SDPA),
    "ViT-B/16": SDPA + "; " + THREE,
}


def _programs_of(case: Case) -> list[Program]:
    def make() -> nn.Module:
        return case.make().eval()

    forward = Program(
        name=case.name,
        make=make,
        inputs=case.inputs,
        macs=case.macs,
        note=NOTES.get(case.name, ADDED),
    )
    if case.gradient_macs is None:
        return [forward]
    training = replace(
        forward,
        name=f"{case.name}, forward and backward",
        macs=case.macs + case.gradient_macs,
        backward=True,
        note=TRAINING_NOTES.get(case.name, THREE),
    )
    return [forward, training]


GROUPS = {
    "Models in plain torch": [program for case in CASES for program in _programs_of(case)],
    "transformers": from_transformers.programs(),
    "Special cases": [
        p for p in special_cases.PROGRAMS if not p.needs or importlib.util.find_spec(p.needs)
    ],
}
