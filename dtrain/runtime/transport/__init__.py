"""How replicas reach shards.

A *link* is what a host's replicas see of the whole model: parameters are views to read and
gradients are views to write; a replica computes into views of its arena, hands over, waits, and
reads the next version from views of its arena.  Where the hosts are decides which link:

- :mod:`~dtrain.runtime.transport.shm`: several processes of one machine, and no others.
- else :mod:`dtrain.runtime.link`, which joins a *port* for each shard:
  :mod:`~dtrain.runtime.transport.local` to a shard of the same process, where nothing is copied,
  and :mod:`~dtrain.runtime.transport.comm` to one of another process: one flat buffer per shard
  and step over ``distributed.comm``, so that TLS and TCP come along.

A new transport is a module here and a line in :func:`open_port` or :func:`open_link`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from dtrain.machines.cursor import Held
from dtrain.machines.quorum import EpochDone, Pass
from dtrain.messages import Batch, Contribution, Push

if TYPE_CHECKING:
    from dtrain.runtime.host import Host


class SyncPort(Protocol):
    """To one shard, for the synchronous steps of one host's replicas."""

    def push(self, step: int, contributions: tuple[Contribution, ...]) -> None:
        """Start to hand over the gradients of these replicas; they lie in the arena.

        Without contributions it only asks for the version after ``step``.
        """

    def ready(self, version: int) -> bool:
        """Whether that version has come; called with the arena's lock held."""

    def settle(self, version: int) -> None:
        """Make a version that is ready readable in the arena; raises what went wrong."""


class BackupPort(Protocol):
    """To one shard, for synchronous steps of one host that do not wait for all replicas."""

    #: the version that is here, one flat array per range of the shard; not to be written to
    version: int
    arrays: list[Any]

    def give(self, step: int, contribution: Contribution) -> None:
        """Start to hand over a gradient; it lies in the arena."""

    def fetch(self, version: int) -> None:
        """Begin to fetch a version that is at least this one, if it is not here."""

    def ready(self, version: int) -> bool:
        """Whether it has come, or never will; called with the arena's lock held."""

    def settle(self) -> None:
        """Take what has come; raises what went wrong."""


class AsyncPort(Protocol):
    """To one shard, for the exchanges of one host's asynchronous replicas."""

    def start(self, push: Push, into: list[Any]) -> None:
        """Start to apply a gradient and to fetch the parameters into flat views of one's own."""

    def finish(self, replica: int) -> tuple[int, Batch | Held | None]:
        """The shard's version that was fetched, and from the lead shard the next batch."""


class SyncLink(Protocol):
    """All shards, for the synchronous steps of one host's replicas."""

    version: int

    @property
    def params(self) -> Mapping[str, Any]:
        """Read-only views of the version that the next step reads."""

    def grads(self, replica: int) -> Mapping[str, Any]:
        """The views to write a replica's gradient to."""

    def exchange(self, contributions: tuple[Contribution, ...]) -> None:
        """Hand over the gradients of this step; returns when the next version can be read."""

    def close(self) -> None: ...


class AsyncLink(Protocol):
    """All shards, for the exchanges of one host's asynchronous replicas."""

    @property
    def exhausted(self) -> bool:
        """Whether the epoch that ends is the job's last; at the chief."""

    def params(self, replica: int) -> Mapping[str, Any]:
        """Read-only views of the replica's own copy."""

    def grads(self, replica: int) -> Mapping[str, Any]:
        """The views to write a replica's gradient to."""

    def version(self, replica: int) -> int:
        """Updates applied at the lead shard, as far as this replica's copy has them."""

    def take(self, replica: int, epoch: int) -> Batch | Held | None:
        """The next batch of a replica in an epoch, or for whom it has to wait."""

    def wait(self, held: Mapping[int, Held], epoch: int) -> dict[int, Batch | None]:
        """Until one of those that are held has its answer, with parameters that are new then."""

    def push(self, replica: int, contribution: Contribution, epoch: int) -> Batch | Held | None:
        """Apply the replica's gradient, renew its parameters; returns its next batch."""

    def skip(self, replica: int, epoch: int) -> Batch | Held | None:
        """Forgo the replica's gradient, renew its parameters; returns its next batch."""

    def pull(self, replica: int) -> None:
        """Renew the replica's parameters."""

    def close(self) -> None: ...


class BackupLink(Protocol):
    """All shards, for synchronous steps that do not wait for all replicas."""

    #: what was read last
    version: int

    @property
    def params(self) -> Mapping[str, Any]:
        """Read-only views of this host's copy."""

    @property
    def exhausted(self) -> bool:
        """Whether the epoch that ends is the job's last; at the chief."""

    def renew(self) -> None:
        """Copy the newest version."""

    def due(self, replica: int) -> bool:
        """Whether the step at hand is another than the one that the replica is done with."""

    def join(self, replica: int, epoch: int) -> Batch | Pass | EpochDone:
        """A batch for the step at hand, with the parameters for it."""

    def grads(self, replica: int) -> Mapping[str, Any]:
        """The views to write a replica's gradient to."""

    def arrive(self, contribution: Contribution) -> None:
        """The replica's gradient is there; returns at once."""

    def wait(self) -> None:
        """Until there is a step that some replica of this host is not done with."""

    def close(self) -> None: ...


def open_link(host: Host) -> SyncLink | AsyncLink | BackupLink:
    """The link of a host, by its mode and by where the hosts of the job are."""
    from dtrain.runtime import link
    from dtrain.runtime.transport import shm, shmasync, shmquorum, shmsync

    shared = isinstance(host.arena, shm.SharedArena)
    if host.backups:
        return shmquorum.BackupLink(host) if shared else link.BackupLink(host)
    if host.synchronous:
        return shmsync.SyncLink(host) if shared else link.SyncLink(host)
    return shmasync.AsyncLink(host) if shared else link.AsyncLink(host)


def open_port(host: Host, shard: int) -> SyncPort | AsyncPort | BackupPort:
    """The port of ``host`` to a shard, by where the shard is."""
    from dtrain.runtime.transport import comm, local

    module = local if shard in host.arena.shards else comm
    if host.backups:
        return module.BackupPort(host, shard)
    return module.SyncPort(host, shard) if host.synchronous else module.AsyncPort(host, shard)
