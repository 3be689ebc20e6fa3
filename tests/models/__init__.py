"""Test models, each with its closed form."""

from __future__ import annotations

from tests.models import language, special, vision
from tests.models.case import Case as Case

CASES: tuple[Case, ...] = (*vision.CASES, *language.CASES, *special.CASES)
