"""The whole profile as JSON: ``Profile.from_json`` reads it back to an equal profile."""

from __future__ import annotations

from dispatch_flops.profile import Profile


def render(profile: Profile, *, indent: int | None = 2) -> str:
    """JSON text with a schema name and version."""
    return profile.to_json(indent=indent)
