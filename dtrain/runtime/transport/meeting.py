"""Whether the hosts of a job share a machine, and where they meet if they do.

The chief makes the shared file before anybody asks for the parameters, and its whereabouts
travel with them.  A host that can open the very file says so to the master; only if all can is
it used.  Names of machines have no part in it: containers share or hide them.
"""

from __future__ import annotations

import logging
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.errors import StorageError
from dtrain.runtime.transport import segment, shm
from dtrain.runtime.transport.shmfile import FilePlan, initialise

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
    #: of the parameters in it, as :meth:`Layout.to_dict` gives it
    layout: dict[str, Any]


def call(host: Host) -> tuple[Meeting, segment.Segment] | None:
    """By the chief: make the file and put the first version in it; None: not worth trying.

    The segment is to be kept until all have it mapped, so that no sweep takes the file.
    Where there is no place for it the job goes over the network, and the worker's log says why.
    Raises StorageError if the workers' memory limits are too small for it.
    """
    from dtrain.runtime.worker import service_at

    wanted = host.launch.settings.transport == "auto" and segment.ORDERED
    if not wanted or sys.platform == "win32":
        return None
    # The file outlives its processes, so that it is worth it for one alone, too; but workers that
    # are threads of one process die together with all that could go on.
    together = host.service.address.startswith("inproc:")
    if together and all(service_at(h.address) is not None for h in host.launch.hosts):
        return None
    plan = _plan(host)
    _check_limit(host, plan.nbytes)
    try:
        owner = str(host.service.worker.scheduler.address)
        name = f"{host.launch.job}-g{host.generation}"
        made = segment.Segment.create(name, plan.nbytes, owner=owner)
    except StorageError as error:
        logger.warning("job %s goes over the network: %s", host.launch.job, error)
        return None
    assert host.state is not None
    initialise(made.memory, plan, host.state)
    return Meeting(str(made.path), plan.nbytes, made.token, host.layout.to_dict()), made


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
    """The file is of no use after all; whoever has it mapped keeps it."""
    if host.meeting is not None:
        segment.unlink(Path(host.meeting.path))


def forget(job: str, before: int | None = None) -> None:
    """Remove the files of a job on this machine, or of its generations before one."""
    segment.remove_where(lambda name: _is_of(name, job, before))


def _is_of(name: str, job: str, before: int | None) -> bool:
    match = re.fullmatch(r"(.*)-g([0-9]+)-[0-9a-f]{16}", name)
    if match is None or match[1] != segment._word(job):
        return False
    return before is None or int(match[2]) < before


def _plan(host: Host) -> FilePlan:
    return FilePlan(
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
