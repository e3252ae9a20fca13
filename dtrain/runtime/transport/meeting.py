"""Whether the hosts of a job share a machine, and where they meet if they do.

The chief makes the shared file before anybody asks for the parameters, and its whereabouts
travel with them.  A host that can open the very file says so to the master; only if all can is
it used.  Names of machines have no part in it: containers share or hide them.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.errors import StorageError
from dtrain.runtime.transport import segment, shm

if TYPE_CHECKING:
    from dtrain.runtime.host import Host

logger = logging.getLogger("dtrain.worker")

#: The share of a worker's memory limit that the arena may take: Dask counts it as the worker's,
#: and pauses the worker at 80 %.
_SHARE = 0.6


@dataclass(frozen=True)
class Meeting:
    """Where the shared file is, and how to know that it is the one."""

    path: str
    nbytes: int
    token: bytes


def call(host: Host) -> tuple[Meeting, segment.Segment] | None:
    """By the chief: make the file and put the first version in it; None: not worth trying.

    The segment is to be kept until all have it mapped, so that no sweep takes the file.
    Where there is no place for it the job goes over the network, and the worker's log says why.
    Raises StorageError if the workers' memory limits are too small for it.
    """
    from dtrain.runtime.worker import service_at

    elsewhere = [h for h in host.launch.hosts if service_at(h.address) is None]
    wanted = host.launch.settings.transport == "auto" and segment.ORDERED
    if not elsewhere or not wanted or sys.platform == "win32":
        return None
    plan = _plan(host)
    _check_limit(host, plan.nbytes)
    try:
        made = segment.Segment.create(_name(host.launch.job, host.generation), plan.nbytes)
    except StorageError as error:
        logger.warning("job %s goes over the network: %s", host.launch.job, error)
        return None
    shm.initialise(made.memory, plan, host.layout, host.optimizer, host.initial_buffer)
    return Meeting(str(made.path), plan.nbytes, made.token), made


def find(described: dict[str, Any] | None) -> Meeting | None:
    """By the others: the meeting that the chief has told of, if it can be reached from here."""
    if described is None:
        return None
    found = Meeting(**described)
    return found if segment.shares(found.path, found.nbytes, found.token) else None


def describe(meeting: Meeting | None) -> dict[str, Any] | None:
    return None if meeting is None else asdict(meeting)


def join(host: Host, meeting: Meeting) -> shm.SharedArena:
    """Map the file; all hosts have said that they can."""
    _check_limit(host, meeting.nbytes)
    mapped = None
    try:
        mapped = segment.Segment(Path(meeting.path), meeting.nbytes)
        return shm.SharedArena(
            host.layout,
            host.optimizer,
            host.shard_plan,
            host.launch.replicas,
            mapped,
            sync=host.synchronous,
        )
    except OSError as error:
        if mapped is not None:
            mapped.close()
        raise StorageError(f"shared memory {meeting.path}: {error}") from error


def leave(host: Host) -> None:
    """The job is over here: its file goes; whoever has it mapped keeps it."""
    if host.meeting is not None:
        segment.unlink(Path(host.meeting.path))
    # The chief may have died between making the file and telling of it.
    forget(host.launch.job, host.generation)


def forget(job: str, generation: int) -> None:
    """Remove the file of a generation of a job, wherever it is."""
    segment.remove(_name(job, generation))


def _name(job: str, generation: int) -> str:
    return f"{job}-g{generation}"


def _plan(host: Host) -> shm.Plan:
    return shm.Plan(
        host.layout,
        host.optimizer,
        host.launch.replicas,
        len(host.shards),
        sync=host.synchronous,
    )


def _check_limit(host: Host, nbytes: int) -> None:
    limit = host.service.memory_limit
    if limit and nbytes > _SHARE * limit:
        raise StorageError(
            f"the shared memory of the job takes {nbytes / 1e9:.2f} GB (parameters, optimizer "
            f"slots and gradients), which Dask counts as each worker's own: expected at most "
            f"{_SHARE:.0%} of the memory limit of {host.plan}, {limit / 1e9:.2f} GB"
        )
