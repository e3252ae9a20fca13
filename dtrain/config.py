"""The settings, read once at the edge: the only reader of ``dask.config``'s ``dtrain:`` section.

Set them in ``~/.config/dask/dtrain.yaml`` or in the environment, for instance
``DASK_DTRAIN__CLIENT_LEASE=30s``.  Times are numbers of seconds or strings like ``"500ms"``.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, fields
from typing import Any

from dtrain.errors import SpecError

#: Written as people write them; parsed by :func:`seconds`.
DEFAULTS: dict[str, str] = {
    "hello-deadline": "10s",
    "prepare-deadline": "60s",
    "step-deadline": "10 minutes",
    "poll": "2s",
    "call-deadline": "15s",
    "connect-deadline": "5s",
    "data-deadline": "1 hour",
    "stop-grace": "5s",
    "client-lease": "60s",
    "result-ttl": "7d",
    "stall": "3s",
    "lease": "2s",
    "progress-deadline": "60s",
    "session-lease": "10s",
    "session-ttl": "7d",
}

#: How the processes of a job reach each other's shards: shared memory where all are on one
#: machine, or always over the network.
TRANSPORTS = ("auto", "comm")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Times in seconds; see ``docs/settings.md`` for their meanings.

    Attributes
    ----------
    hello_deadline : float
        How long the master waits for the worker plugin of a worker to say hello.
    prepare_deadline : float
        From the launch of a job to the moment when all its hosts are ready.
    step_deadline : float
        The longest a replica waits for one step to commit, or a host for one barrier.
    poll : float
        How long one call waits at the other end before it is answered "not yet".
    call_deadline : float
        The longest a call that should be answered at once may take.
    connect_deadline : float
        How long to look for a scheduler at an address.
    data_deadline : float
        How long the chunks of Dask arrays may take to be computed.
    stop_grace : float
        How long a stopping job waits for user code to return.
    client_lease : float
        How long an attached job outlives the connection of its client.
    result_ttl : float
        How long a finished job and its result are kept.
    stall : float
        How long a replica may make no progress before it is named.
    lease : float
        How long a worker may be silent before a neighbour is asked whether it runs; at least
        four heartbeats.
    progress_deadline : float
        How long a replica may be in user code before its worker is given up; at least ten of its
        steps.  Its first step has ``step_deadline``.
    session_lease : float
        How long a client of a session may be silent before it counts as gone.
    session_ttl : float
        How long the variables of a session stay after its last client has left.
    transport : str
        ``"auto"``: shared memory between the processes of one machine; ``"comm"``: never.
    data_memory : float
        The share of the workers' memory limits that lazy data may take; more goes to their disks.
    """

    hello_deadline: float
    prepare_deadline: float
    step_deadline: float
    poll: float
    call_deadline: float
    connect_deadline: float
    data_deadline: float
    stop_grace: float
    client_lease: float
    result_ttl: float
    stall: float
    lease: float
    progress_deadline: float
    session_lease: float
    session_ttl: float
    transport: str = "auto"
    data_memory: float = 0.3


def settings(**overrides: Any) -> Settings:
    """The settings of this process: defaults, Dask's configuration, ``overrides``; last wins."""
    import dask.config

    values: dict[str, float] = {}
    for field in fields(Settings):
        if field.name in ("transport", "data_memory"):
            continue
        key = field.name.replace("_", "-")
        raw = overrides.get(field.name, dask.config.get(f"dtrain.{key}", DEFAULTS[key]))
        values[field.name] = seconds(f"dtrain.{key}", raw)
    transport = overrides.get("transport", dask.config.get("dtrain.transport", "auto"))
    if transport not in TRANSPORTS:
        raise SpecError(f"dtrain.transport: found {transport!r}, expected one of {TRANSPORTS}")
    share = overrides.get("data_memory", dask.config.get("dtrain.data-memory", 0.3))
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise SpecError(f"dtrain.data-memory: found {share!r}, expected a number from 0 to 1")
    return Settings(**values, transport=transport, data_memory=float(share))


def seconds(key: str, value: Any) -> float:
    """A time as seconds, or a SpecError that names ``key``: a number, or ``"500ms"``, ``"2h"``."""
    from dask.utils import parse_timedelta

    try:
        # Dask knows minutes by every name but this one.
        known = re.sub(r"(?<=[\d ])min$", "minutes", value) if isinstance(value, str) else value
        found = float(parse_timedelta("" if isinstance(value, bool) else known, "seconds"))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError):
        found = float("nan")
    if not 0 < found < math.inf:
        raise SpecError(f"{key}: found {value!r}, expected a time above zero such as '30s'")
    return float(found)


def nbytes(key: str, value: Any) -> int:
    """A size as bytes, or a SpecError that names ``key``: a whole number, or ``"4MB"``."""
    from dask.utils import parse_bytes

    try:
        whole = isinstance(value, str) or (not isinstance(value, bool) and int(value) == value)
        found = parse_bytes(value if isinstance(value, str) else int(value)) if whole else 0
    except (ValueError, TypeError, OverflowError):
        found = 0
    if found < 1:
        raise SpecError(f"{key}: found {value!r}, expected a size above zero such as 4000 or '4MB'")
    return int(found)


def temporary_directory() -> str | None:
    """Where Dask is to put its files; None: where all programs do."""
    import dask.config

    return dask.config.get("temporary-directory", None) or None


def scheduler_address() -> str | None:
    """The address named by the environment or by Dask's configuration, if any."""
    import dask.config

    return os.environ.get("DTRAIN_SCHEDULER") or dask.config.get("scheduler-address", None)
