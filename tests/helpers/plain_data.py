"""Compare plain data with the objects that it was written from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dispatch_flops.analysis.planned_cluster import PlannedRank


def differences(data: Any, thing: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the data that are not what the object's attributes and methods return."""
    if isinstance(thing, PlannedRank) and not isinstance(data, dict):
        thing = thing.rank
    thing = thing() if callable(thing) else thing
    if isinstance(data, dict):
        if isinstance(thing, Mapping):
            assert data.keys() == thing.keys(), path
        for key, value in data.items():
            of = thing[key] if isinstance(thing, Mapping) else getattr(thing, key)
            yield from differences(value, of, f"{path}.{key}")
    elif isinstance(data, list):
        assert len(data) == len(thing), path
        for index, (value, of) in enumerate(zip(data, thing, strict=True)):
            yield from differences(value, of, f"{path}[{index}]")
    elif data != thing:
        yield f"{path}: {data!r} is not {thing!r}"


def figures(thing: Any) -> set[str]:
    """Return the public names of an object that are not methods, less the machine."""
    names = (name for name in dir(thing) if not name.startswith("_") and name != "machine")
    return {name for name in names if not callable(getattr(thing, name))}


def leaves(data: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is neither a dict nor a list, with the key that is nearest to it."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from leaves(value, key)
    elif isinstance(data, list):
        for value in data:
            yield from leaves(value, name)
    else:
        yield name, data
