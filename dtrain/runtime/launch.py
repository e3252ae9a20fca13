"""What the master sends to the hosts of a job: frozen, the same for all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from dtrain.config import Settings
from dtrain.machines.jobs import HostPlan, Origin, lead_shard
from dtrain.runtime.data import DataPlan
from dtrain.spec import JobSpec


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One generation of a job.

    ``model`` is the pickled model: opened by the hosts alone, never on the scheduler.
    ``placement`` is the pickled function of a user that places the shards, opened by the chief
    alone.  The first host is the chief: it initialises the variables and has the lead shard.
    """

    job: str
    generation: int
    spec: JobSpec
    model: bytes = field(repr=False)
    data: DataPlan = field(repr=False)
    hosts: tuple[HostPlan, ...]
    settings: Settings
    placement: bytes | None = field(default=None, repr=False)
    #: where the generation before has left its state
    origin: Origin | None = None

    @property
    def replicas(self) -> int:
        assert self.spec.replicas is not None
        return self.spec.replicas

    @property
    def chief(self) -> HostPlan:
        return self.hosts[0]

    @property
    def lead_shard(self) -> int:
        return lead_shard(self.hosts)

    def host_of_shard(self, shard: int) -> HostPlan:
        for host in self.hosts:
            if shard in host.shards:
                return host
        raise LookupError(f"job {self.job}: shard {shard} has no host")

    def host(self, address: str) -> HostPlan:
        return next(host for host in self.hosts if host.address == address)
