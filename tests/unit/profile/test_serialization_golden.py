"""The JSON of a saved profile, to the byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given

from dispatch_flops.profile import Profile
from tests.helpers.trees import SMALL, profiles


@pytest.mark.parametrize("name", ["training_step", "hostile", "lower_bound"])
def test_json_of_small_profiles_matches_golden_files(
    name: str, golden: Callable[[str, str], None]
) -> None:
    golden(f"{name}.json", SMALL[name]().check().to_json(indent=2) + "\n")


@given(profiles)
def test_json_of_any_profile_is_read_back_equal(profile: Profile) -> None:
    assert Profile.from_json(profile.to_json(indent=2)) == profile
