"""Versions and version requirements as Cargo and RustSec write them.

Requirements are read as ranges by order alone, as RustSec's own tools do: Cargo's rule that hides pre-releases from a resolver
would hide a vulnerable pre-release from this check too.
"""

from __future__ import annotations

import re
from functools import total_ordering

VERSION = re.compile(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?(?:-([0-9A-Za-z.-]+))?(?:\+[0-9A-Za-z.-]+)?")
COMPARATOR = re.compile(r"(>=|<=|>|<|=|\^|~)?\s*(\S+)")


class BadVersion(ValueError):
    """Text that is no version or no requirement."""


@total_ordering
class Version:
    """A version, ordered as Semantic Versioning 2.0.0 orders them; build metadata does not count."""

    def __init__(self, major: int, minor: int, patch: int, pre: str = ""):
        self.numbers = (major, minor, patch)
        self.pre = pre

    @classmethod
    def parse(cls, text: str) -> Version:
        found = VERSION.fullmatch(text.strip())
        if not found:
            raise BadVersion(f"expected a version such as 1.2.3, got {text!r}")
        major, minor, patch, pre = found.groups()
        return cls(int(major), int(minor or 0), int(patch or 0), pre or "")

    def key(self) -> tuple:
        # A release comes after all of its pre-releases; numbers come before words.
        parts = [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in self.pre.split(".") if part]
        return (self.numbers, not self.pre, parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and self.key() == other.key()

    def __lt__(self, other: Version) -> bool:
        return self.key() < other.key()

    def __hash__(self) -> int:
        return hash((self.numbers, self.pre))


def first_after(numbers: tuple[int, int, int], place: int) -> Version:
    """The lowest version, pre-releases included, in which the number at `place` is one more."""
    kept = [*numbers[:place], numbers[place] + 1, 0, 0][:3]
    return Version(*kept, "0")


def written(text: str) -> int:
    """How many of a version's three numbers were written."""
    return text.split("-")[0].split("+")[0].count(".") + 1


def compatible(version: Version, text: str) -> Version:
    """Where `^` ends: at the next version that may break, by the first number that is not zero."""
    places = range(min(written(text), 3))
    significant = next((place for place in places if version.numbers[place]), places[-1])
    return first_after(version.numbers, significant)


def one_matches(comparator: str, version: Version) -> bool:
    found = COMPARATOR.fullmatch(comparator.strip())
    if comparator.strip() == "*":
        return True
    if not found:
        raise BadVersion(f"expected a requirement such as >= 1.2.3, got {comparator!r}")
    operator, text = found.group(1) or "^", found.group(2)
    bound = Version.parse(text)
    if operator == "^":
        return bound <= version < compatible(bound, text)
    if operator == "~":
        return bound <= version < first_after(bound.numbers, min(written(text), 2) - 1)
    if operator == "=" and written(text) < 3:
        return bound <= version < first_after(bound.numbers, written(text) - 1)
    return {
        "=": version == bound,
        ">=": version >= bound,
        ">": version > bound,
        "<=": version <= bound,
        "<": version < bound,
    }[operator]


def matches(requirement: str, version: Version) -> bool:
    """Whether a version meets all comparators of a requirement, which commas part."""
    return all(one_matches(comparator, version) for comparator in requirement.split(","))
