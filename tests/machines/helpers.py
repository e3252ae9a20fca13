"""What the tests of all machines share."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain.errors import ProtocolError
from tests.sim import state_of


def refuses(
    machine: Any,
    event: Any,
    error: type[Exception] = ProtocolError,
    match: str | None = None,
    now: float = 0.0,
) -> None:
    """An illegal event raises, and changes nothing."""
    before = state_of(machine)
    with pytest.raises(error, match=match):
        machine.handle(event, now)
    assert state_of(machine) == before


def ignores(machine: Any, event: Any, now: float = 0.0) -> None:
    """An event that comes again, or too late, is answered with nothing and changes nothing."""
    before = state_of(machine)
    assert machine.handle(event, now) == []
    assert state_of(machine) == before
