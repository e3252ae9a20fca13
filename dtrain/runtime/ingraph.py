"""In-graph replication: one client drives all replicas, each step is one ordinary Dask graph.

TensorFlow's words ("Distributed TensorFlow", replicated training) and what they are here:

=====================  =========================================================================
in-graph replication   ``replication="in-graph"``: the chief's host drives, with a client
the client             :class:`Driver`, in the chief's task; it has futures, and no array
a tower, on a device   a ``dtrain-gradient`` task, pinned to the worker that has the replica
the parameter device   the worker of a shard, where ``dtrain-update`` is pinned
variables              futures of ``dtrain-update``; the optimizer's slots stay on that device
``session.run(train)``  one graph, one message to the scheduler
=====================  =========================================================================

A step's graph, for replicas r and shards s::

    update(s) of the step before -> gradient(r) -> piece(r, s) -> update(s) -> verdict

Pieces are cut only where they travel: a shard beside the replica takes its gradient as it is.
Bytes go from worker to worker; only the futures of a good verdict become the state.  The verdict
is taken where the chief's replicas read the new parameters anyway, and recorded by the same
machine (:mod:`dtrain.machines.rounds`); the sums run in the same order over the same chunks, so
that the bits are those of between-graph replication.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from dtrain.errors import DeadlineError, ProtocolError
from dtrain.messages import Failure, Pushed, Reduced
from dtrain.runtime import handover, tasks
from dtrain.runtime.points import at_point
from dtrain.runtime.shards import StepRefused
from dtrain.runtime.state import unrecorded
from dtrain.runtime.tasks import At, Ended, Outcome, Share
from dtrain.runtime.usercode import FailureTold

if TYPE_CHECKING:
    from distributed import Client, Future

    from dtrain.runtime.replica import Trainer

logger = logging.getLogger("dtrain.worker")

#: Seconds that the client's connection has to close.
_CLOSE = 5.0


def run(trainer: Trainer, share: Share) -> dict[str, Any] | None:
    """The loop of one host of an in-graph job: the chief's drives, the others' serve."""
    host = trainer.host
    if not host.is_chief:
        _serve(trainer, share)
        return None
    if host.begin.finished:
        # While all hosts are here.
        params = host.layout.views(handover.running(host).params)
        host.barrier(host.begin.epochs, "finished")
        return trainer.result(params, host.begin.step)
    driver = Driver(trainer, share)
    try:
        return driver.train()
    finally:
        driver.close()


def _serve(trainer: Trainer, share: Share) -> None:
    """Tasks do the work of this host; its thread reaches the barriers."""
    host = trainer.host
    if host.begin.finished:
        host.barrier(host.begin.epochs, "finished")
        return
    while not _record(trainer, share.ended()):
        pass


def _record(trainer: Trainer, ended: Ended) -> bool:
    return trainer.record(ended.epoch, ended.step, ended.valid, last=ended.last)


class Graph:
    """One graph in the making: tasks by key, each pinned to a worker.

    Parameters
    ----------
    at : At
    version : int
        The one that it makes, or is about; in the keys of its tasks.
    """

    def __init__(self, at: At, version: int) -> None:
        self._at = at
        self._version = version
        self.tasks: dict[Any, Any] = {}
        self.places: dict[Any, list[str]] = {}

    def add(
        self, name: str, body: Callable[..., Any], where: str, *args: Any, of: tuple[int, ...] = ()
    ) -> Any:
        """Add ``body(at, *args)``; returns what stands for its result in further arguments.

        Dask groups tasks by the first part of their keys up to a word that is not of letters
        alone, so that ``dtrain-NAME`` is what dashboards and task streams show.
        """
        from dask._task_spec import Task, TaskRef

        at = self._at
        key = (f"dtrain-{name}-{at.generation}-{at.job}", self._version, *of)
        self.tasks[key] = Task(key, body, at, *args)
        self.places[key] = [where]
        return TaskRef(key)


class Driver:
    """The client of an in-graph job: submits a graph for each step and follows its verdict."""

    def __init__(self, trainer: Trainer, share: Share) -> None:
        self._trainer = trainer
        self._host = trainer.host
        self._share = share
        self._plan = trainer.plan
        launch = self._host.launch
        self._chief = launch.chief.address
        self._deadline = launch.settings.step_deadline
        #: where each replica and each shard is
        self._replica_at = {r: h.address for h in launch.hosts for r in h.replicas}
        self._shard_at = [launch.host_of_shard(s).address for s in self._host.shards]
        self._client: Client | None = None
        #: the state: for each shard the update that has made it
        self._state: list[Future[Any]] = []
        #: what is not the state any more, let go of with the next message to the scheduler: one of
        #: its own would hold that up
        self._old: list[Future[Any]] = []

    # -- in the chief's thread -----------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        host, plan, begin = self._host, self._plan, self._host.begin
        self._answer(self._open(), host.launch.settings.call_deadline)
        self._begin(begin.step)
        # A death may have come between the last step of an epoch and its record.
        late = unrecorded(plan, begin.epochs, begin.step)
        over = late and self._end_epoch(begin.step - 1)
        for step in range(begin.step, plan.total_steps):
            if over:
                break
            host.check()
            host.epoch = plan.locate(step)[0]
            self._step(step)
            over = plan.ends_epoch(step) and self._end_epoch(step)
            if not over:
                host.saver.look(step + 1)
        version = host.arena.lead.version
        host.saver.finish(version)
        # The last epoch has been evaluated here, with the very last version.
        result = self._trainer.result(self._share.params(version, ()), version)
        assert result is not None
        return result

    def _begin(self, step: int) -> None:
        graph = Graph(self._at(step), step)
        updates = [
            graph.add("first", tasks.first, where, shard, of=(shard,))
            for shard, where in enumerate(self._shard_at)
        ]
        begun = graph.add("begun", tasks.settled, self._chief, *updates)
        _, self._state = self._run(graph, step, begun, updates)

    def _step(self, step: int) -> None:
        """One step; the futures of its updates become the state if its verdict is good."""
        host, lead = self._host, self._host.arena.lead
        graph = Graph(self._at(step), step + 1)
        gradients = {
            replica: graph.add(
                "gradient",
                tasks.gradient,
                self._replica_at[replica],
                replica,
                *map(_ref, self._state),
                of=(replica,),
            )
            for replica in self._plan.members(step)
        }
        updates = self._update(graph, gradients)
        verdict = graph.add("verdict", tasks.verdict, self._chief, *updates)
        outcome: Outcome
        # Which of its tasks run, the workers' own summaries tell.
        with host.activity.waiting(step, tuple, ()):
            outcome, fresh = self._run(graph, step, verdict, updates)
        skips = host.launch.spec.recovery.on_non_finite == "skip"
        if not outcome.sound and skips:
            self._skip(step)
        at_point("flipping")
        contributions = outcome.reports[0].contributions
        with host.arena.lock:
            lead.handle(Pushed(host.generation, step, contributions))
            for report in outcome.reports:
                lead.handle(Reduced(host.generation, step, report.shard, report.problem))
            decided = lead.verdict(step)
        if decided.applied != outcome.sound:
            raise ProtocolError(f"step {step}: found {decided}, expected {outcome}")
        if decided.applied:
            self._state, fresh = fresh, self._state
        self._old += fresh
        if not decided.ok and not skips:
            raise StepRefused(decided.problem)

    def _update(self, graph: Graph, gradients: dict[int, Any]) -> list[Any]:
        """The tasks that apply the gradients: of each shard one for each stage."""
        updates = []
        for shard, where in enumerate(self._shard_at):
            parts = [
                self._part(graph, replica, shard, gradient)
                for replica, gradient in gradients.items()
            ]
            before = _ref(self._state[shard])
            updates.append(
                graph.add("update", tasks.update, where, shard, before, *parts, of=(shard, 0))
            )
        # A stage of the optimizer begins with the sums of all shards.
        for stage in range(1, self._host.optimizer.stages):
            updates = [
                graph.add("update", tasks.go_on, where, shard, stage, *updates, of=(shard, stage))
                for shard, where in enumerate(self._shard_at)
            ]
        return updates

    def _part(self, graph: Graph, replica: int, shard: int, gradient: Any) -> Any:
        """What a shard takes of a gradient: a piece, where the rest would travel in vain."""
        at = self._replica_at[replica]
        if len(self._shard_at) == 1 or at == self._shard_at[shard]:
            return gradient
        return graph.add("piece", tasks.piece, at, shard, gradient, of=(replica, shard))

    def _skip(self, step: int) -> None:
        """All shards know that the step is refused before the verdict says so.

        Else the next generation could take the update for one that only waits to be committed.
        """
        graph = Graph(self._at(step), step + 1)
        known = [
            graph.add("skip", tasks.skip, where, shard, of=(shard,))
            for shard, where in enumerate(self._shard_at)
        ]
        self._run(graph, step, graph.add("skipped", tasks.settled, self._chief, *known))

    def _end_epoch(self, step: int) -> bool:
        """After the last step of an epoch; whether it was the job's last."""
        epoch, last = self._plan.locate(step)[0], step + 1 >= self._plan.total_steps
        graph = Graph(self._at(step + 1), step + 1)
        parts = [
            graph.add(
                "evaluation",
                tasks.evaluate,
                host.address,
                epoch,
                last,
                *(map(_ref, self._state) if host.replicas else ()),
                of=(number,),
            )
            for number, host in enumerate(self._host.launch.hosts)
        ]
        self._run(graph, step + 1, graph.add("evaluated", tasks.settled, self._chief, *parts))
        over = _record(self._trainer, self._share.ended())
        host = self._host
        host.service.bests.keep(host, self._share.params(step + 1, ()))
        return over

    # -- with the client's help ----------------------------------------------------------------

    def _at(self, step: int) -> At:
        return At(self._host.launch.job, self._host.generation, step)

    def _answer(self, question: Coroutine[Any, Any, Any], deadline: float) -> Any:
        """What a coroutine in the worker's loop comes to; Stopped as soon as the job stops."""
        return self._host.calls.answer(question, deadline)

    def _run(
        self, graph: Graph, step: int, end: Any, kept: Sequence[Any] = ()
    ) -> tuple[Any, list[Future[Any]]]:
        """The value of a graph's small last task, which is at the chief; and futures of others."""
        value, futures = self._answer(self._follow(graph, step, end, kept), self._deadline + 1)
        if isinstance(value, Failure):
            raise FailureTold(value)
        return value, futures

    def close(self) -> None:
        """Let go of the futures and of the client, whatever has happened."""
        try:
            self._host.service.start(self._close()).result(_CLOSE + 1)
        except OSError as error:
            # What has been trained is not lost by it; the scheduler sees a dead connection end.
            job = self._host.launch.job
            logger.warning("job %s: its client did not close: %r", job, error)

    # -- in the worker's event loop ------------------------------------------------------------

    async def _open(self) -> None:
        from distributed import Client

        worker = self._host.service.worker
        self._client = Client(
            worker.scheduler.address,
            asynchronous=True,
            direct_to_workers=True,
            set_as_default=False,
            security=worker.security,
            name=f"dtrain-driver-{self._host.launch.job}",
        )
        await asyncio.wait_for(self._client, self._host.launch.settings.call_deadline)

    async def _close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            self._state, self._old = [], []
            await asyncio.wait_for(client._close(fast=True), _CLOSE)

    async def _follow(
        self, graph: Graph, step: int, end: Any, kept: Sequence[Any]
    ) -> tuple[Any, list[Future[Any]]]:
        from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
        from distributed.client import FuturesCancelledError, _wait

        assert self._client is not None
        layer = MaterializedLayer(
            graph.tasks,
            annotations={
                "workers": graph.places.__getitem__,
                "allow_other_workers": False,
                "retries": 0,
            },
        )
        keys = [end.key, *(ref.key for ref in kept)]
        verdict, *futures = self._client.get(
            HighLevelGraph({"dtrain": layer}, {"dtrain": set()}), keys, sync=False
        )
        for future in self._old:
            future.release()
        self._old = []
        try:
            await asyncio.wait_for(_wait([verdict]), self._deadline)
        except TimeoutError:
            raise DeadlineError(
                f"after {self._deadline:.0f} s: step {step} has not committed; "
                f"{self._waiting(graph)}"
            ) from None
        except FuturesCancelledError as error:
            raise ConnectionError(f"the graph of step {step} is gone: {error}") from None
        data = self._host.service.worker.data
        if verdict.status != "finished" or end.key not in data:
            # Not an error of ours or of the user's: those are values.
            raise ConnectionError(f"the graph of step {step}: {verdict!r}")
        value = data[end.key]
        self._old.append(verdict)
        return value, futures

    def _waiting(self, graph: Graph) -> str:
        places = sorted({address for where in graph.places.values() for address in where})
        return f"its tasks are at {', '.join(places)}; are their threads busy with other tasks?"


def _ref(future: Future[Any]) -> Any:
    from dask._task_spec import TaskRef

    return TaskRef(future.key)
