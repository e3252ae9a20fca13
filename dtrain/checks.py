"""Checks of values that people write: numbers, choices, names of arguments.

Each returns the value in its plain form or raises a SpecError ``key: found ..., expected ...``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Real
from typing import Any

from dtrain.errors import SpecError


def number(key: str, value: Any, *, least: float = 0.0, below: float = math.inf) -> float:
    """``value`` as a finite float with ``least <= value < below``; a bool is no number."""
    try:
        real = not isinstance(value, bool) and isinstance(value, Real)
        plain = float(value) if real else math.nan
    except OverflowError:  # an int too long for a float
        plain = math.inf
    if not least <= plain < below:
        limit = "" if below == math.inf else f" and below {below:g}"
        raise SpecError(
            f"{key}: found {value!r}, expected a finite number from {least:g} up{limit}"
        )
    return plain


def flag(key: str, value: Any) -> bool:
    """``value`` if it is a bool."""
    if not isinstance(value, bool):
        raise SpecError(f"{key}: found {value!r}, expected True or False")
    return value


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """`` (did you mean 'this'?)``, where a known name is like it; else nothing."""
    lower = {candidate.lower(): candidate for candidate in known}
    close = get_close_matches(str(name).lower(), lower, n=1)
    return f" (did you mean {lower[close[0]]!r}?)" if close else ""


def choice(key: str, value: Any, allowed: Iterable[str]) -> str:
    """``value`` if it is one of ``allowed``; the message guesses what was meant."""
    names = list(allowed)
    if not isinstance(value, str) or value not in names:
        raise SpecError(
            f"{key}: found {value!r}, expected one of {_list(names)}{did_you_mean(value, names)}"
        )
    return value


#: Characters of a name, at most.
_LONGEST = 200


def shared_name(key: str, value: Any) -> str:
    """``value`` if processes can find something by it: up to 200 characters, of any kind."""
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST:
        raise SpecError(
            f"{key}: found the name {value!r:.80}, expected a string of 1 to {_LONGEST} characters"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise SpecError(
            f"{key}: found the name {value!r:.80}, expected characters that UTF-8 has"
        ) from None
    return value


def arguments(owner: str, found: Iterable[str], allowed: Iterable[str]) -> None:
    """Refuse the first of ``found`` that is no argument of ``owner``."""
    names = list(allowed)
    for name in found:
        if name not in names:
            raise SpecError(
                f"{owner}: found an argument {name!r}, expected only {_list(names)}"
                f"{did_you_mean(name, names)}"
            )


def _list(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names)
