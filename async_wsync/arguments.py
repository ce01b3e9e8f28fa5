"""Checks of what a caller gives us, where it enters. All of them raise ValueError and name the argument."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

__all__ = [
    "MOST_SECONDS",
    "at_least",
    "factor",
    "flag",
    "function",
    "kind",
    "lifetime",
    "names",
    "one_of",
    "options",
    "patterns",
    "seconds",
    "text",
    "url",
]

#: A year. Beyond it clocks and timers overflow, each at a place of its own.
MOST_SECONDS = 366 * 24 * 3600.0


def seconds(what: str, value: Any, *, zero: bool = False, none: bool = False) -> None:
    """A length of time: a finite number above 0 (``zero``: or 0; ``none``: or None) and of at most a year."""
    if none and value is None:
        return
    bound = "at least 0" if zero else "above 0"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{what} must be a number of seconds, {bound}, got {value!r}")
    if value == math.inf:
        raise ValueError(f"{what} must be finite, got {value!r}: every wait has a deadline, of a year at most")
    if not (value >= 0 if zero else value > 0):
        raise ValueError(f"{what} must be {bound} seconds, got {value!r}")
    if value > MOST_SECONDS:
        raise ValueError(f"{what} must be at most a year ({MOST_SECONDS:.0f} seconds), got {value!r}")


def at_least(what: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{what} must be an int of at least {least}, got {value!r}")


def one_of(what: str, value: Any, allowed: tuple[str, ...], *, none: bool = False) -> Any:
    """``value``, which must be one of these words (``none``: or None)."""
    if none and value is None:
        return value
    if not isinstance(value, str) or value not in allowed:
        words = ", ".join([*map(repr, allowed), *(["None"] if none else [])])
        raise ValueError(f"{what} must be one of {words}, got {value!r}")
    return value


def lifetime(value: Any) -> None:
    """How long a Ray actor lives: as long as who made it, or, "detached", until it is killed."""
    one_of("lifetime", value, ("detached", "non_detached"), none=True)


def flag(what: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{what} must be True or False, got {value!r}")


def text(what: str, value: Any, *, none: bool = False) -> None:
    """A string that is not empty (``none``: or None)."""
    if none and value is None:
        return
    if not isinstance(value, str) or not value:
        raise ValueError(f"{what} must be a string that is not empty, got {value!r}")


def names(what: str, value: Any) -> list[str]:
    """Strings, in an iterable that is not itself a string."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ValueError(f"{what} must be a list of strings, got {value!r}")
    found = list(value)
    for item in found:
        if not isinstance(item, str):
            raise ValueError(f"{what} must hold strings only, got {item!r}")
    return found


def options(
    what: str, value: Any, *, known: Iterable[str] | None = None, reserved: Iterable[str] = ()
) -> dict[str, Any]:
    """Keyword arguments as a dict, of names that are ``known`` (None: any will do) and not ``reserved``."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a dict of keyword arguments, got {value!r}")
    for name in value:
        if not isinstance(name, str) or name in reserved or (known is not None and name not in known):
            wanted = f": choose among {', '.join(known)}" if known is not None else ""
            raise ValueError(f"{what} can't have {name!r}{wanted}")
    return dict(value)


def function(what: str, value: Any, *, none: bool = True) -> None:
    """Something to call (``none``: or None)."""
    if not (callable(value) or (none and value is None)):
        raise ValueError(f"{what} must be a function, got {value!r}")


def kind(what: str, value: Any, of: type[Any], *, none: bool = False) -> None:
    """An instance of this class (``none``: or None)."""
    if not (isinstance(value, of) or (none and value is None)):
        raise ValueError(f"{what} must be a {of.__name__}, got {value!r}")


def url(what: str, value: Any) -> None:
    if not isinstance(value, str) or not value.startswith(("http://", "https://")):
        raise ValueError(f"{what} must start with http:// or https://, got {value!r}")


def patterns(what: str, value: Any) -> tuple[str, ...]:
    """Regular expressions, in an iterable that is not itself a string."""
    found = names(what, value)
    for pattern in found:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{what}: {pattern!r} is no regular expression: {error}") from error
    return tuple(found)


def factor(what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{what} must be a finite number above 0, got {value!r}")
