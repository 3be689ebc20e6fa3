"""The package, its tests and README.md keep to plain words."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.helpers.paths import REPOSITORY

SUFFIXES = {".css", ".html", ".js", ".md", ".py"}

# Phrases to avoid, as regular expressions that begin at a word, and what to write instead.
PHRASES = {
    r"(?<!\bthere )(?:is|are|was|were) no (?!longer|more|need|such)\w+": "is not a ...",
    r"hangs? on\b": "depends on",
    r"kills? nobody\b": "never interrupts the program",
    r"without a word\b": "silently",
    r"nobody\b": "no one, not reachable",
    r"at the user's wish\b": "excluded by ignore_modules",
    r"let go by\b": "skipped",
    r"has had enough\b": "closes the pipe",
    r"dies? of\b": "raises",
    r"stands? still\b": "excludes, is paused",
    r"whose work\b": "attribute",
    r"the books\b": "the recorded costs",
    r"booked\b": "recorded",
    r"at work\b": "running",
    r"(?<!\.)all else\b": "everything else",
    r"unnoted\b": "discarded_params",
}
# Metaphors to avoid in what ships; an oracle of the tests may tally.
METAPHORS = {
    r"ledgers?\b": "aggregation",
    r"tall(?:y|ies)\b": "counts, totals",
}


def violations(path: str, text: str) -> Iterator[str]:
    """Yield every phrase to avoid in ``text``, with its surroundings and what to write instead."""
    phrases: Mapping[str, str] = PHRASES if path.startswith("tests/") else PHRASES | METAPHORS
    line = re.sub(r"\s+(?:#:?\s+)?", " ", text)  # a phrase may go on in the next line's comment
    line = line.lower()
    for match in one_of(*phrases).finditer(line):
        instead = next(phrases[p] for p in phrases if one_of(p).match(line, match.start()))
        seen = line[max(0, match.start() - 25) : match.end() + 10]
        yield f"{path}: ...{seen}... (rather: {instead})"


@functools.cache
def one_of(*phrases: str) -> re.Pattern[str]:
    """Return one pattern of all phrases, which reads a text once."""
    return re.compile(rf"\b(?:{'|'.join(phrases)})")


def files() -> Iterator[Path]:
    yield REPOSITORY / "README.md"
    for folder in ("dispatch_flops", "tests"):
        for path in sorted((REPOSITORY / folder).rglob("*")):
            if path.suffix in SUFFIXES and path != Path(__file__):
                yield path


def test_text_has_no_phrase_to_avoid() -> None:
    found = [
        sentence
        for path in files()
        for sentence in violations(
            path.relative_to(REPOSITORY).as_posix(), path.read_text(encoding="utf-8")
        )
    ]
    if found:
        pytest.fail("\n".join([f"{len(found)} phrases to avoid:", *found]), pytrace=False)


@pytest.mark.parametrize(
    "text",
    [
        "The root is no module.",
        "This hangs on the device.",
        "# a file that hangs\n    # on another",
        "0, without a word",
        "Booked under the root",
        "The ledger",
    ],
)
def test_violations_finds_a_phrase(text: str) -> None:
    assert len(list(violations("dispatch_flops/a.py", text))) == 1


@pytest.mark.parametrize(
    "text", ["There is no peak.", "It is no longer there.", "It is not a module.", "the notebooks"]
)
def test_violations_accepts_plain_words(text: str) -> None:
    assert not list(violations("dispatch_flops/a.py", text))
