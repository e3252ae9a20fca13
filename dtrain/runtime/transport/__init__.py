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


class AsyncPort(Protocol):
    """To one shard, for the exchanges of one host's asynchronous replicas."""

    def start(self, push: Push, into: list[Any]) -> None:
        """Start to apply a gradient and to fetch the parameters into flat views of one's own."""

    def finish(self, replica: int) -> tuple[int, Batch | None]:
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

    def take(self, replica: int, epoch: int) -> Batch | None:
        """The first batch of a replica in an epoch."""

    def push(self, replica: int, contribution: Contribution, epoch: int) -> Batch | None:
        """Apply the replica's gradient, renew its parameters; returns its next batch."""

    def pull(self, replica: int) -> None:
        """Renew the replica's parameters."""

    def close(self) -> None: ...


def open_link(host: Host) -> SyncLink | AsyncLink:
    """The link of a host, by where the hosts of the job are."""
    from dtrain.runtime import link
    from dtrain.runtime.transport import shm

    module = shm if isinstance(host.arena, shm.SharedArena) else link
    return module.SyncLink(host) if host.synchronous else module.AsyncLink(host)


def open_port(host: Host, shard: int) -> SyncPort | AsyncPort:
    """The port of ``host`` to a shard, by where the shard is."""
    from dtrain.runtime.transport import comm, local

    module = local if shard in host.arena.shards else comm
    return module.SyncPort(host, shard) if host.synchronous else module.AsyncPort(host, shard)
