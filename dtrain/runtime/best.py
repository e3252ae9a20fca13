"""The parameters of the best epoch so far: kept by two hosts, so that one of them may die.

Which epoch that is follows from the job's history (:mod:`dtrain.callbacks`), which all hosts have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.protocol import to_serialize

from dtrain.callbacks import best, policies
from dtrain.errors import DTrainError

if TYPE_CHECKING:
    from dtrain.runtime.host import Host
    from dtrain.runtime.worker import WorkerService


@dataclass(frozen=True)
class Best:
    """Copies of the parameters after an epoch, whose index in the history it is."""

    epoch: int
    step: int
    params: Mapping[str, np.ndarray]


class Bests:
    """Of all jobs of a worker; it outlives the generations of a job."""

    def __init__(self, service: WorkerService) -> None:
        self._service = service
        self._of: dict[str, Best] = {}
        self.handlers = {"dtrain_best": self.told}

    def keep(self, host: Host, params: Mapping[str, Any]) -> None:
        """After an epoch of a host: copy its parameters, if none were better; from its thread."""
        epoch = best(policies(host.launch.spec), host.history)
        if epoch is None or epoch != len(host.history) - 1 or not _keeps(host):
            return
        copies = {name: np.array(value) for name, value in params.items()}
        self._of[host.launch.job] = Best(epoch, host.history[epoch]["step"], copies)

    def find(self, host: Host) -> Best | None:
        """Those of the best epoch, if it is not the last: kept here, or by another host."""
        epoch = best(policies(host.launch.spec), host.history)
        if epoch is None or epoch == len(host.history) - 1:
            return None
        step = host.history[epoch]["step"]
        mine = self._of.get(host.launch.job)
        if mine is not None and (mine.epoch, mine.step) == (epoch, step):
            return mine
        for other in host.launch.hosts:
            if other.address == self._service.address:
                continue
            try:
                found = host.calls.ask(other.address, "dtrain_best", epoch=epoch, step=step)
            except (OSError, DTrainError):
                continue  # it is told below, once nobody has them
            if found is not None:
                return Best(epoch, step, {name: np.asarray(v) for name, v in found.items()})
        host.calls.tell(
            f"the parameters of epoch {epoch + 1}, the best, have gone with their workers; the "
            f"result has those of epoch {len(host.history)}"
        )
        return None

    def drop(self, job: str) -> None:
        """The job has ended."""
        self._of.pop(job, None)

    async def told(self, job: str, generation: int, epoch: int, step: int) -> dict[str, Any] | None:
        """For another host of the job."""
        mine = self._of.get(job)
        if mine is None or (mine.epoch, mine.step) != (epoch, step):
            return None
        return {name: to_serialize(value) for name, value in mine.params.items()}


def _keeps(host: Host) -> bool:
    """Whether it is one of the first two that train."""
    training = [h.address for h in host.launch.hosts if h.replicas][:2]
    return host.service.address in training
