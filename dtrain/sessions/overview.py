"""The sessions of a cluster, seen from outside: looking at one does not attach to it."""

from __future__ import annotations

import uuid
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from dtrain.cluster import Control
from dtrain.config import settings
from dtrain.handle import target_of
from dtrain.partition import rows_of
from dtrain.runtime.sessions.shards import About

if TYPE_CHECKING:
    from distributed import Client


def find(client: Client | str | None = None) -> list[dict[str, Any]]:
    """The sessions of a cluster; none if dtrain is not there.

    Returns
    -------
    list of dict
        ``name``; ``state``: ``EMPTY`` (no variables: somebody waits for them, or there are queues
        alone), ``CREATING READY MOVING RESTORING`` or ``LOST``; ``spec``, what its variables are,
        in words; ``chief``, who has initialised them; ``clients``, how many are attached to them;
        ``hosts``: shard -> worker; ``bytes`` of parameters; ``problem``, why they are lost;
        ``since``, in seconds since 1970; ``queues``, how many queues and readers there are.
    """
    control = Control(target_of(client))
    if control.raw("dtrain_sessions") is None:
        return []
    return [_listed(found) for found in control.call("dtrain_sessions")]


def show(name: str, client: Client | str | None = None) -> dict[str, Any]:
    """All about a session.

    Returns
    -------
    dict
        As :func:`find` has it, and: ``waiting``, the clients that wait for the variables;
        ``saved``, the place of the newest checkpoint and its step; ``events``, what has happened:
        a list of ``time`` (seconds since 1970), ``state``, ``message``; ``variables``, see
        :meth:`dtrain.Session.variables`; ``shards``: shard -> ``version``, the updates it has had,
        ``pushes``, those that were gradients, ``duplicates``, gradients that came twice and were
        applied once, and ``staleness``: age -> gradients of that age, as far as it is known;
        ``queues``: the queues and readers themselves, a list of ``kind``, ``name``, ``worker``,
        which keeps it, ``made``, how often it was made, and ``handles``, how many have it open.

    Raises
    ------
    SessionNotFound
    """
    control = Control(target_of(client))
    deadline = 2 * settings().call_deadline
    found = _listed(control.call("dtrain_session", deadline, session=name))
    about = found.pop("about")
    ready = about and found["hosts"]
    found["variables"] = described(About.of(about), found["hosts"]) if ready else []
    found["queues"] = [
        {key: each[key] for key in ("kind", "name", "worker", "made", "handles")}
        for each in found["queues"]
    ]
    return found


def reset(name: str, client: Client | str | None = None) -> None:
    """End a session: see :meth:`dtrain.Session.reset`.

    Raises
    ------
    SessionNotFound
    """
    by = f"reset-{uuid.uuid4().hex[:8]}"
    deadline = 2 * settings().call_deadline
    Control(target_of(client)).call("dtrain_session_reset", deadline, session=name, client=by)


def _listed(found: dict[str, Any]) -> dict[str, Any]:
    """What has travelled is made of tuples."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}


def described(about: About, hosts: Collection[str]) -> list[dict[str, Any]]:
    """The entries of :meth:`Session.variables`."""
    addresses = list(hosts)
    variables = {v.name: v for v in about.layout.variables}
    found = []
    for shard in about.plan.shards:
        for name, start, stop in rows_of(about.layout, shard):
            variable = variables[name]
            rows = variable.shape[0] if variable.shape else 1
            found.append(
                {
                    "name": name,
                    "shape": variable.shape,
                    "dtype": variable.dtype,
                    "device": "cpu",
                    "shard": shard.index,
                    "rows": (start, stop),
                    "worker": addresses[shard.index],
                    "bytes": variable.nbytes // rows * (stop - start),
                }
            )
    order = list(variables)
    return sorted(found, key=lambda e: (order.index(e["name"]), e["rows"]))
