"""Objects that are not a profile but have one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dispatch_flops.errors import ConfigError, NotProfiledError
from dispatch_flops.profile.profile import Profile

_FIELDS = frozenset(known.name for known in dataclasses.fields(Profile))


class ProfileHolder:
    """Base of a class whose ``profile`` is a ``Profile``.

    What only the profile has is an AttributeError that says so. That is also what a function that
    reads a profile raises if it is given the holder.
    """

    @property
    def profile(self) -> Profile:
        """The profile so far; raises NotProfiledError where there is none."""
        raise NotImplementedError

    def __repr__(self) -> str:
        try:
            found = repr(self.profile)
        except NotProfiledError as error:
            found = str(error)
        return f"<{type(self).__name__}: {found}>"

    if not TYPE_CHECKING:  # where there is ``__getattr__``, mypy accepts every attribute

        def __getattr__(self, name: str) -> Any:
            found = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _FIELDS or (not name.startswith("_") and hasattr(Profile, name)):
                found += "; its profile has it: use or pass .profile"
            raise AttributeError(found, name=name, obj=self)


def check_profile(name: str, given: Any) -> None:
    """Raise ConfigError if an argument is not a profile.

    A holder passes: its own error, where something is read of it, says more.
    """
    if not isinstance(given, Profile | ProfileHolder):
        raise ConfigError(f"{name} is of type {type(given).__name__}; pass a Profile")
