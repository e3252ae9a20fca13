"""The loops of the replicas of one host: the body of one seceded Dask task.

A host's logical replicas run one after the other within a step; in sync mode they then push
together, in async mode each pushes on its own.
"""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from dtrain import metrics
from dtrain.arrays import copy_into, on, quiet, to_numpy
from dtrain.errors import DTrainError, FencedError, GradientError, StorageError
from dtrain.machines.cursor import Held
from dtrain.machines.quorum import EpochDone
from dtrain.machines.rounds import describe_loss
from dtrain.messages import Batch, Contribution, Failure
from dtrain.runtime import ingraph
from dtrain.runtime.arena import Stopped
from dtrain.runtime.blas import one_thread
from dtrain.runtime.device import Gpu
from dtrain.runtime.host import Host
from dtrain.runtime.launch import Launch
from dtrain.runtime.modelfile import Saved, save
from dtrain.runtime.preparation import enter, prepare
from dtrain.runtime.shards import StepRefused, describe_culprit
from dtrain.runtime.state import unrecorded
from dtrain.runtime.tasks import Share
from dtrain.runtime.transport import AsyncLink, BackupLink, SyncLink
from dtrain.runtime.updater import finite
from dtrain.runtime.usercode import UserCodeError, calling, describe
from dtrain.runtime.worker import service_at

#: Seconds that the master has to say that a peer died, before the peer's silence is reported.
_GRACE = 3.0

#: Keeps the streams of the generators apart that share a seed.
_STEP = 3


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
            try:
                enter(host)
                return trainer.run()
            finally:
                trainer.close()
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
        #: None: the replicas compute on the CPU, where everything is
        self._gpu = None if host.device == "cpu" else Gpu(host.device, host.layout)
        #: the context in which gradients are looked at, where they were computed
        self._checking = quiet if self._gpu is None else partial(on, host.device)
        packed = host.launch.data.functions
        with calling("loading the metrics"):
            #: the metrics that are functions of the user's
            self._functions = {} if packed is None else pickle.loads(packed)
        if host.in_graph:
            host.share = Share(self)

    def close(self) -> None:
        """Nobody calls the model any more."""
        if self.host.in_graph:
            self.host.share.close()
        self._gpu = None

    def run(self) -> dict[str, Any] | None:
        """The loop of the host: which one, the job says."""
        if self.host.in_graph:
            return ingraph.run(self, self.host.share)
        if not self.host.plan.replicas:
            self._only_host()
            return None
        if self.host.backups:
            return self._train_with_backups()
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
            return self.result(link.params, link.version)
        # A death may have come between the last step of an epoch and its record.
        late = unrecorded(plan, begin.epochs, begin.step)
        if late and self._end_epoch(begin.step - 1, link):
            return self.result(link.params, link.version)
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
                        self.compute(replica, step, batch, link.params, link.grads(replica))
                    )
            self.read_ahead(step + 1, host.plan.replicas)
            link.exchange(tuple(contributions))
            if plan.ends_epoch(step) and self._end_epoch(step, link):
                break
            host.saver.look(link.version)
        host.saver.finish(link.version)
        return self.result(link.params, link.version)

    def _end_epoch(self, step: int, link: SyncLink) -> bool:
        """After the last step of an epoch; whether it was the job's last."""
        epoch = self.plan.locate(step)[0]
        last = step + 1 >= self.plan.total_steps
        return self._evaluate(epoch, link.version, link.params, last=last)

    def read_ahead(self, step: int, replicas: Sequence[int]) -> None:
        """Begin to read what these replicas will want at a step."""
        if step < self.plan.total_steps:
            epoch, index = self.plan.locate(step)
            for replica in self.plan.members(step):
                if replica in replicas:
                    self.feed.ahead(epoch, replica, index)

    # -- synchronous, with backups -------------------------------------------------------------

    def _train_with_backups(self) -> dict[str, Any] | None:
        host = self.host
        link: BackupLink = host.link
        epoch = host.begin.epochs
        link.renew()
        if host.begin.finished:
            host.barrier(epoch, "finished")
            return self.result(link.params, link.version)
        while True:
            host.epoch = epoch
            while self._step_with_backups(link, epoch):
                link.wait()
                host.saver.look(link.version)
            # Nobody owes a gradient, late as it may be, once all hosts are here.
            host.barrier(epoch, "trained")
            link.renew()
            last = host.is_chief and link.exhausted
            if self._evaluate(epoch, link.version, link.params, last=last):
                host.saver.finish(link.version)
                return self.result(link.params, link.version)
            epoch += 1

    def _step_with_backups(self, link: BackupLink, epoch: int) -> bool:
        """A batch of each replica that has a part in the step; False: the epoch is over."""
        for replica in self.host.plan.replicas:
            self.host.check()
            if not link.due(replica):
                continue
            answer = link.join(replica, epoch)
            if isinstance(answer, EpochDone):
                return False
            if isinstance(answer, Batch):
                out = link.grads(replica)
                link.arrive(self.compute(replica, link.version, answer, link.params, out))
        return True

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
            while any(answer is not None for answer in turn.values()):
                for replica, answer in turn.items():
                    if isinstance(answer, Batch):
                        turn[replica] = self._push(link, replica, answer)
                        host.saver.look(link.version(replica))
                held = {i: answer for i, answer in turn.items() if isinstance(answer, Held)}
                if held and len(held) == sum(answer is not None for answer in turn.values()):
                    turn.update(link.wait(held, epoch))
                elif held:
                    # It may be the others of this host that they wait for.
                    turn.update({i: link.take(i, epoch) for i in held})
            # All gradients of the epoch are applied everywhere once all hosts are here.
            host.barrier(epoch, "trained")
            link.pull(replicas[0])
            last = host.is_chief and link.exhausted
            version, params = link.version(replicas[0]), link.params(replicas[0])
            if self._evaluate(epoch, version, params, last=last):
                host.saver.finish(version)
                return self.result(params, version)
            epoch += 1

    def _pulled(self, link: AsyncLink, replica: int) -> dict[str, Any] | None:
        link.pull(replica)
        return self.result(link.params(replica), link.version(replica))

    def _push(self, link: AsyncLink, replica: int, batch: Batch) -> Batch | Held | None:
        self.host.check()
        step = link.version(replica)
        grads = link.grads(replica)
        contribution = self.compute(replica, step, batch, link.params(replica), grads)
        # Checked here, for the whole model, before any shard has seen a part of it.
        there = grads if self._gpu is None else self._gpu.grads
        with self._checking():
            sound = all(finite(grad.reshape(-1)) for grad in there.values())
        if not sound or not math.isfinite(contribution.loss):
            words = describe_culprit(contribution, step)
            if not math.isfinite(contribution.loss):
                words = describe_loss(contribution, step)
            if self.spec.recovery.on_non_finite == "fail":
                raise StepRefused(words)
            self.host.reject(words)
            return link.skip(replica, batch.epoch)
        if self.host.optimizer.transforms:
            self._transform(replica)
        return link.push(replica, contribution, batch.epoch)

    def _transform(self, replica: int) -> None:
        """What a chain does to a gradient; its optimizer is the shards'."""
        buffer = self.host.arena.grads[replica]
        segments = self.host.layout.segments
        flat = [buffer[s.start : s.stop].view(s.dtype) for s in segments]
        with quiet():
            self.host.optimizer.transform(flat, self.host.layout.block_starts)

    # -- both ----------------------------------------------------------------------------------

    def compute(
        self,
        replica: int,
        step: int,
        batch: Batch,
        params: Mapping[str, Any],
        out: Mapping[str, Any],
    ) -> Contribution:
        """One batch through the model; its gradient ends in ``out``."""
        with self.host.activity.doing("reading a batch"):
            arrays = self.feed.batch(replica, batch.epoch, batch.part, batch.index)
        kwargs: dict[str, Any] = {}
        if self._takes_rng:
            key = [self.spec.seed, _STEP, replica, step]
            kwargs["rng"] = np.random.default_rng(key)
        self.host.computing(replica, step, batch)
        try:
            if self._gpu is None:
                if self._takes_out:
                    # A dict of its own: a model may put other arrays there, which are copied.
                    kwargs["out"] = dict(out)
                answer = self.model.loss_and_grads(params, arrays, **kwargs)
                loss = self._accept(answer, out)
            else:
                loss = self._compute_on(self._gpu, step, arrays, params, out, kwargs)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            where = f"replica {replica}, step {step}, partition {batch.part}, batch {batch.index}"
            if isinstance(error, GradientError):
                error = GradientError(f"{error} ({where})")
            raise UserCodeError(f"loss_and_grads of the model: {where}") from error
        self.host.computed(replica)
        samples = len(arrays[1])
        weight = self._weight(arrays) / self.plan.batch_size
        return Contribution(replica, weight, samples, loss, batch.part, batch.index)

    def _weight(self, batch: tuple[Any, ...]) -> float:
        """What the rows of a batch count together; 1 each, on average over all rows."""
        if len(batch) == 2:
            return float(len(batch[1]))
        return metrics.total(batch[2]) / self.host.launch.data.mean_weight

    def _compute_on(
        self,
        gpu: Gpu,
        step: int,
        batch: tuple[Any, ...],
        params: Mapping[str, Any],
        out: Mapping[str, Any],
        kwargs: dict[str, Any],
    ) -> float:
        with gpu.step(self._version(step), params, batch, out) as (params, batch, views):
            if self._takes_out:
                kwargs["out"] = dict(views)
            return self._accept(self.model.loss_and_grads(params, batch, **kwargs), views)

    def _version(self, step: int) -> int | None:
        """What tells the parameters of a step from others, if that does.

        Asynchronous replicas have copies of their own, whose shards have versions of their own.
        """
        return step if self.host.synchronous else None

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
                    copy_into(view, grads[name])
        return loss

    def _evaluate(self, epoch: int, version: int, params: Mapping[str, Any], *, last: bool) -> bool:
        """This host's part of the epoch's record; returns whether the master says stop."""
        stop = self.record(epoch, version, self.scores(version, params), last=last)
        self.host.service.bests.keep(self.host, params)
        return stop

    def scores(self, version: int, params: Mapping[str, Any]) -> dict[str, Any] | None:
        """The sums over the validation rows of this host's parts; None: the job has none."""
        if self.host.launch.data.valid_x is None and self.spec.validation_split is None:
            return None
        with self.host.activity.doing("evaluating"), on(self.host.device):
            if self._gpu is not None:
                params = self._gpu.params(self._version(version), params)
            return {
                str(replica): sums
                for replica in self.host.plan.replicas
                if (sums := self._validate(replica, params)) is not None
            }

    def record(self, epoch: int, version: int, valid: dict[str, Any] | None, *, last: bool) -> bool:
        """Hand in this host's part of the epoch's record; whether the master says stop."""
        steps = {str(replica): count for replica, count in self.host.activity.steps.items()}
        payload: dict[str, Any] = {"epoch": epoch, "step": version, "last": last, "steps": steps}
        if valid is not None:
            payload["valid"] = valid
        payload.update(self.host.take_account())
        return self.host.barrier(epoch, "evaluated", payload)

    def _validate(self, part: int, params: Mapping[str, Any]) -> dict[str, list[float]] | None:
        """The sums of loss and metrics over the validation rows of a part; None without rows."""
        sums: dict[str, list[float]] = {}
        for arrays in self.feed.validation(part):
            with calling(f"validation of partition {part}"):
                batch = arrays if self._gpu is None else self._gpu.batch(*arrays)
                loss = mean_loss(self.model, params, batch)
                scores = self.model.predict(params, batch[0]) if self.spec.metrics else None
            sums["loss"] = metrics.add(sums.get("loss"), metrics.loss_sums(loss, arrays))
            for name in self.spec.metrics:
                with calling(f"metric {name} of what predict returned"):
                    found = to_numpy(scores)
                    one = metrics.sums(name, found, *arrays[1:], functions=self._functions)
                sums[name] = metrics.add(sums.get(name), one)
        return sums or None

    def result(self, params: Mapping[str, Any], version: int) -> dict[str, Any] | None:
        """What the task of the chief returns; written to the job's output first, if it has one."""
        if not self.host.is_chief:
            return None
        best = self.host.service.bests.find(self.host)
        if best is not None:
            params, version = best.params, best.step
        copies = {name: np.array(value) for name, value in params.items()}
        if self.spec.output is not None:
            data = self.host.launch.data
            saved = Saved(
                params=copies,
                model=self.model,
                classes=data.classes,
                classification=data.classification,
                columns=data.columns,
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


def mean_loss(model: Any, params: Mapping[str, Any], batch: tuple[Any, ...]) -> float:
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
