"""Test models, each with its closed form beside it."""

from __future__ import annotations

from zoo import language, special, vision
from zoo.case import Case as Case

CASES: tuple[Case, ...] = (*vision.CASES, *language.CASES, *special.CASES)
