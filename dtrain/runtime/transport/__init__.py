"""How replicas reach shards.

A *port* joins the replicas of one host to one shard.  Through it parameters are views to read
and gradients are views to write: a replica computes into views of its arena, pushes, waits, and
reads the next version from views of its arena.  Where the shard is decides which port it gets:

- :mod:`~dtrain.runtime.transport.local`: the shard shares the arena; nothing is copied.
- :mod:`~dtrain.runtime.transport.comm`: another process; one flat buffer per shard and step
  over ``distributed.comm``, so that TLS and TCP come along.

A new transport is a module here with the two kinds of port, and a line in :func:`open_port`.
"""

from __future__ import annotations

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


def open_port(host: Host, shard: int) -> SyncPort | AsyncPort:
    """The port of ``host`` to a shard, by where the shard is."""
    from dtrain.runtime.transport import comm, local

    module = local if shard in host.arena.shards else comm
    return module.SyncPort(host, shard) if host.synchronous else module.AsyncPort(host, shard)
