"""The loops of the replicas of one host: the body of one seceded Dask task.

A host's logical replicas run one after the other within a step; in sync mode they then push
together, in async mode each pushes on its own.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dtrain import metrics
from dtrain.arrays import quiet
from dtrain.errors import DTrainError, FencedError, StorageError
from dtrain.messages import Batch, Contribution, Failure
from dtrain.runtime.arena import Stopped
from dtrain.runtime.blas import one_thread
from dtrain.runtime.host import Host
from dtrain.runtime.launch import Launch
from dtrain.runtime.modelfile import Saved, save
from dtrain.runtime.preparation import prepare
from dtrain.runtime.restore import unrecorded
from dtrain.runtime.shards import StepRefused, describe_culprit, finite
from dtrain.runtime.transport import AsyncLink, SyncLink
from dtrain.runtime.usercode import UserCodeError, calling, describe
from dtrain.runtime.worker import service_at

#: Seconds that the master has to say that a peer died, before the peer's silence is reported.
_GRACE = 3.0

#: Keeps the streams of the generators apart that share a seed.
_STEP = 3


class GradientError(DTrainError, ValueError):
    """What a model returned is not a loss and a gradient for each of its parameters."""


def run_host(launch: Launch) -> dict[str, Any] | None:
    """A worker's whole share of a job; returns the trained parameters at the chief."""
    from distributed import get_worker, secede

    address = get_worker().address
    secede()
    service = service_at(address)
    if service is None:
        raise DTrainError(f"worker {address} has no dtrain service; expected one since its hello")
    # Dask computes what is lost anew, be it the task of a job that is over: it is not begun again.
    deadline = launch.settings.call_deadline
    asked = {"job": launch.job, "generation": launch.generation}
    service.start(service.ask_master("dtrain_newest", deadline, **asked)).result(deadline + 1)
    host = service.adopt(launch)
    try:
        with one_thread():
            prepare(host)
            trainer = Trainer(host)
            return trainer.run()
    except (Stopped, FencedError):
        return None
    except BaseException as error:  # noqa: BLE001 - it becomes the failure of the job
        failure = _settled(host, error)
        if failure is not None:
            deadline = launch.settings.call_deadline
            service.start(
                service.ask_master(
                    "dtrain_failed",
                    deadline,
                    job=launch.job,
                    generation=launch.generation,
                    address=address,
                    failure=failure.to_dict(),
                )
            ).result(deadline + 1)
        return None
    finally:
        if host.saver is not None:
            host.saver.wait(launch.settings.stop_grace)
        host.left.set()
        service.release(host)


def _settled(host: Host, error: BaseException) -> Failure | None:
    """The failure that an error means; None if it only follows from the job's being stopped."""
    failure = describe(error, str(host.plan))
    if failure.reason in ("WORKERS_LOST", "CONTROLLER") and host.stopped_within(_GRACE):
        return None
    return failure


class Trainer:
    """Runs the replicas of a host from the first batch to the result."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.spec = host.launch.spec
        self.model = host.model
        self.feed = host.feed
        self.plan = host.parts.plan
        accepted = _accepted(self.model.loss_and_grads)
        self._takes_out = "out" in accepted
        # A generator for each step costs more than a step of a small model.
        self._takes_rng = "rng" in accepted and getattr(self.model, "uses_rng", True)

    def run(self) -> dict[str, Any] | None:
        if not self.host.plan.replicas:
            self._only_host()
            return None
        return self._train_sync() if self.host.synchronous else self._train_async()

    def _only_host(self) -> None:
        """No replica here: the shards serve until the master says stop."""
        epoch = self.host.begin.epochs
        while not self.host.barrier(epoch, "evaluated"):
            epoch += 1

    # -- synchronous ---------------------------------------------------------------------------

    def _train_sync(self) -> dict[str, Any] | None:
        host, plan = self.host, self.plan
        link: SyncLink = host.link
        total, begin = plan.total_steps, host.begin
        if begin.finished:
            host.barrier(begin.epochs, "finished")
            return self._result(link.params, link.version)
        # A death may have come between the last step of an epoch and its record.
        late = unrecorded(plan, begin.epochs, begin.step)
        if late and self._end_epoch(begin.step - 1, link):
            return self._result(link.params, link.version)
        for step in range(begin.step, total):
            host.check()
            epoch, index = plan.locate(step)
            host.epoch = epoch
            members = plan.members(step)
            contributions = []
            for replica in host.plan.replicas:
                if replica in members:
                    batch = Batch(epoch, replica, index)
                    contributions.append(
                        self._compute(replica, step, batch, link.params, link.grads(replica))
                    )
            self._read_ahead(step + 1)
            link.exchange(tuple(contributions))
            if plan.ends_epoch(step) and self._end_epoch(step, link):
                break
            host.saver.look(link.version)
        host.saver.finish(link.version)
        return self._result(link.params, link.version)

    def _end_epoch(self, step: int, link: SyncLink) -> bool:
        """After the last step of an epoch; whether it was the job's last."""
        epoch = self.plan.locate(step)[0]
        last = step + 1 >= self.plan.total_steps
        return self._evaluate(epoch, link.version, link.params, last=last)

    def _read_ahead(self, step: int) -> None:
        if step < self.plan.total_steps:
            epoch, index = self.plan.locate(step)
            for replica in self.plan.members(step):
                if replica in self.host.plan.replicas:
                    self.feed.ahead(epoch, replica, index)

    # -- asynchronous --------------------------------------------------------------------------

    def _train_async(self) -> dict[str, Any] | None:
        host = self.host
        link: AsyncLink = host.link
        replicas = host.plan.replicas
        epoch = host.begin.epochs
        if host.begin.finished:
            host.barrier(epoch, "finished")
            return self._pulled(link, replicas[0])
        while True:
            host.epoch = epoch
            for replica in replicas:
                link.pull(replica)
            turn = {replica: link.take(replica, epoch) for replica in replicas}
            while any(batch is not None for batch in turn.values()):
                for replica, batch in turn.items():
                    if batch is not None:
                        turn[replica] = self._push(link, replica, batch)
                        host.saver.look(link.version(replica))
            # All gradients of the epoch are applied everywhere once all hosts are here.
            host.barrier(epoch, "trained")
            link.pull(replicas[0])
            last = host.is_chief and link.exhausted
            version, params = link.version(replicas[0]), link.params(replicas[0])
            if self._evaluate(epoch, version, params, last=last):
                host.saver.finish(version)
                return self._result(params, version)
            epoch += 1

    def _pulled(self, link: AsyncLink, replica: int) -> dict[str, Any] | None:
        link.pull(replica)
        return self._result(link.params(replica), link.version(replica))

    def _push(self, link: AsyncLink, replica: int, batch: Batch) -> Batch | None:
        self.host.check()
        step = link.version(replica)
        grads = link.grads(replica)
        contribution = self._compute(replica, step, batch, link.params(replica), grads)
        # Checked here, for the whole model, before any shard has seen a part of it.
        with quiet():
            sound = all(finite(grad.reshape(-1)) for grad in grads.values())
        if not sound or not math.isfinite(contribution.loss):
            raise StepRefused(describe_culprit(contribution, step))
        return link.push(replica, contribution, batch.epoch)

    # -- both ----------------------------------------------------------------------------------

    def _compute(
        self,
        replica: int,
        step: int,
        batch: Batch,
        params: Mapping[str, Any],
        out: Mapping[str, Any],
    ) -> Contribution:
        """One batch through the model; its gradient ends in ``out``."""
        x, y = self.feed.batch(replica, batch.epoch, batch.part, batch.index)
        kwargs: dict[str, Any] = {}
        if self._takes_out:
            kwargs["out"] = out
        if self._takes_rng:
            key = [self.spec.seed, _STEP, replica, step]
            kwargs["rng"] = np.random.default_rng(key)
        self.host.computing(replica, batch)
        try:
            answer = self.model.loss_and_grads(params, (x, y), **kwargs)
            loss = self._accept(answer, out)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise UserCodeError(
                f"loss_and_grads of the model: replica {replica}, step {step}, "
                f"partition {batch.part}, batch {batch.index}"
            ) from error
        self.host.computed(replica)
        samples = len(x)
        weight = samples / self.plan.batch_size
        return Contribution(replica, weight, samples, loss, batch.part, batch.index)

    def _accept(self, answer: Any, out: Mapping[str, Any]) -> float:
        """The loss; gradients that are not views of the arena already are checked and copied."""
        try:
            loss, grads = answer
        except (TypeError, ValueError):
            raise GradientError(
                f"found {type(answer).__name__}, expected a pair (loss, grads)"
            ) from None
        try:
            loss = float(loss)
        except (TypeError, ValueError):
            raise GradientError(f"loss: found {loss!r:.100}, expected a number") from None
        if grads is out:
            return loss
        if not isinstance(grads, Mapping):
            raise GradientError(
                f"gradients: found {type(grads).__name__}, expected a dict of arrays"
            )
        if any(grads.get(name) is not view for name, view in out.items()) or len(grads) != len(out):
            try:
                self.host.layout.check(grads)
            except (KeyError, TypeError, ValueError) as error:
                raise GradientError(f"gradients: {error}") from None
            for name, view in out.items():
                if grads[name] is not view:
                    view[...] = grads[name]
        return loss

    def _evaluate(self, epoch: int, version: int, params: Mapping[str, Any], *, last: bool) -> bool:
        """This host's part of the epoch's record; returns whether the master says stop."""
        host = self.host
        payload: dict[str, Any] = {"epoch": epoch, "step": version, "last": last}
        data = host.launch.data
        if data.valid_x is not None or self.spec.validation_split is not None:
            payload["valid"] = {
                str(replica): sums
                for replica in host.plan.replicas
                if (sums := self._validate(replica, params)) is not None
            }
        payload.update(host.take_account())
        return host.barrier(epoch, "evaluated", payload)

    def _validate(self, part: int, params: Mapping[str, Any]) -> dict[str, list[float]] | None:
        """The sums of loss and metrics over the validation rows of a part; None without rows."""
        sums: dict[str, list[float]] = {}
        for x, y in self.feed.validation(part):
            with calling(f"validation of partition {part}"):
                loss = mean_loss(self.model, params, (x, y))
                scores = self.model.predict(params, x) if self.spec.metrics else None
            rows = float(len(x))
            sums["loss"] = metrics.add(sums.get("loss"), (rows, rows * loss))
            for name in self.spec.metrics:
                with calling(f"metric {name} of what predict returned"):
                    one = metrics.sums(name, np.asarray(scores), y)
                sums[name] = metrics.add(sums.get(name), one)
        return sums or None

    def _result(self, params: Mapping[str, Any], version: int) -> dict[str, Any] | None:
        """What the task of the chief returns; written to the job's output first, if it has one."""
        if not self.host.is_chief:
            return None
        copies = {name: np.array(value) for name, value in params.items()}
        if self.spec.output is not None:
            data = self.host.launch.data
            saved = Saved(
                params=copies,
                model=self.model,
                classes=data.classes,
                classification=data.classification,
                version=version,
                metrics=self.spec.metrics,
                history=tuple(self.host.history),
            )
            try:
                save(self.spec.output, saved)
            except OSError as error:
                raise StorageError(f"output {self.spec.output}: {error}") from error
        # Beside the parameters all that another process needs to make a Result of them.
        return {
            "params": copies,
            "version": version,
            "model": self.host.launch.model,
            "about": self.host.launch.data.about(self.spec.metrics),
        }


def mean_loss(model: Any, params: Mapping[str, Any], batch: tuple[Any, Any]) -> float:
    """The model's own ``loss``, else the one that comes with the gradients."""
    if hasattr(model, "loss") and callable(model.loss):
        return float(model.loss(params, batch))
    return float(model.loss_and_grads(params, batch)[0])


def _accepted(function: Any) -> frozenset[str]:
    """Which of ``out`` and ``rng`` a model's own ``loss_and_grads`` takes."""
    both = frozenset({"out", "rng"})
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return both
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return both
    return both & parameters.keys()
