"""A job from outside: its state, its status, its result; from any process."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dtrain.callbacks import Callback
from dtrain.cluster import Control
from dtrain.config import settings
from dtrain.errors import (
    ClusterError,
    DeadlineError,
    JobCancelled,
    JobFailed,
    NonFiniteError,
    WorkersLost,
)
from dtrain.machines.jobs import TERMINAL, State
from dtrain.machines.ledger import Ledger
from dtrain.result import Result
from dtrain.watching import Watch

if TYPE_CHECKING:
    from distributed import Client

#: Seconds between two looks while a progress bar is drawn.
_GLANCE = 0.2

_ERRORS: dict[str, type[JobFailed]] = {
    "NON_FINITE": NonFiniteError,
    "WORKERS_LOST": WorkersLost,
}

#: What only the handle itself needs of the master's description.
_INNER = ("exception", "result")


class Handle:
    """A job on a cluster.

    Attributes
    ----------
    id : str
    """

    def __init__(
        self,
        id: str,
        client: Client | str,
        model: Any = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.id = id
        self._watch = Watch(self, callbacks)
        self._control = Control(client)
        self._model = model
        self._result: Result | None = None

    def __repr__(self) -> str:
        return f"<dtrain job {self.id} at {self._control.address}>"

    @property
    def state(self) -> str:
        """One of ``QUEUED PREPARING RUNNING RECOVERING STOPPING``, or how it has ended:
        ``SUCCEEDED FAILED CANCELLED``."""
        return str(self._described(brief=True)["state"])

    def status(self) -> dict[str, Any]:
        """A dict: id, name, state, reason, message, step, epoch, loss, samples_per_s, replicas,
        shards, ledger, history, metrics, output, and more.

        ``devices``: replica -> where it computes, once its worker is ready;
        ``placement``: shard -> its ``worker`` and its ``bytes``, once that is known;
        ``imbalance``: by how much the worker with the most bytes is above the mean.

        ``step`` is the job's, ``local_steps`` are its replicas': replica -> how many gradients it
        has computed, also in vain.  ``doing``: replica -> what it does, in words, as of its
        worker's last heartbeat.  ``waiting``: a list of dicts, one for each that waits:
        ``replica``, its ``worker`` (no replica: the driver of an in-graph job there; neither: the
        job itself, which is not running), ``for`` (a list of replicas, or of addresses of workers),
        ``step``, ``barrier`` (where it waits at the end of an epoch: its name), ``seconds``, and
        ``computing``: of those waited for, replica -> seconds in user code.
        """
        found = {k: v for k, v in self._described().items() if k not in _INNER}
        # What has travelled is made of tuples.
        found["waiting"] = [{**entry, "for": list(entry["for"])} for entry in found["waiting"]]
        return found

    def why_waiting(self) -> str:
        """Who waits for whom, at which step, since when, and what those waited for do, in words.

        Or that nobody waits for long.  As new as the workers' last heartbeats: one that stalls is
        named after the setting ``stall``, and a heartbeat.
        """
        return str(self._described(brief=True)["why"])

    def events(self) -> list[dict[str, Any]]:
        """All that has happened to the job, in order: ``time`` (seconds since 1970), ``state``,
        ``message``."""
        found: list[dict[str, Any]] = self._control.call("dtrain_events", job=self.id)
        return found

    def cancel(self) -> None:
        """Stop the job; a terminal one stays as it is."""
        self._control.call("dtrain_cancel", job=self.id, why="cancelled by a user")

    def wait(self, timeout: float | None = None, progress: bool | None = None) -> str:
        """Wait until the job has ended; returns its state.

        Parameters
        ----------
        timeout : float, optional
            Seconds; DeadlineError when they have passed.  None: as long as the job's cluster
            answers.
        progress : bool, optional
            Draw a progress bar on stderr; None: if that is a terminal.

        Raises
        ------
        ClusterError
            The scheduler does not answer any more.
        """
        from dtrain.progress import Bar, wanted

        if not wanted(progress):
            return str(self._wait(timeout)["state"])
        with Bar() as bar:
            return str(self._wait(timeout, bar.update)["state"])

    def _wait(self, timeout: float | None, look: Any = None) -> dict[str, Any]:
        until = None if timeout is None else time.monotonic() + timeout
        seen: str | None = None
        while True:
            poll = _GLANCE if look or self._watch else settings().poll
            if until is not None:
                poll = min(poll, max(until - time.monotonic(), 0.0))
            status = self._described(wait=poll, seen=seen, brief=True)
            seen = status["state"]
            if look:
                look(status)
            if self._watch:
                self._watch.look()
            if seen in TERMINAL:
                return status
            if until is not None and time.monotonic() >= until:
                raise DeadlineError(
                    f"job {self.id}: after {timeout:g} s it is {seen}, expected its end; "
                    f"{status['why']}"
                )

    def result(self, timeout: float | None = None) -> Result:
        """Wait, and return the :class:`Result`.

        Raises
        ------
        JobFailed
            Or a subclass of it; or the user's own exception, with the remote traceback, where
            user code failed.
        """
        if self._result is not None:
            return self._result
        status = self._wait(timeout)
        if status["state"] != State.SUCCEEDED:
            raise self._error(status)
        payload = self._payload(status, timeout)
        about = payload["about"]
        self._result = Result(
            model=self._model if self._model is not None else pickle.loads(payload["model"]),
            params={name: np.asarray(value) for name, value in payload["params"].items()},
            version=payload["version"],
            history=status["history"],
            metrics=status["metrics"],
            ledger=None if status["ledger"] is None else Ledger.from_dict(status["ledger"]),
            classes=about["classes"],
            classification=about["classification"],
            columns=about["columns"],
            metric_names=tuple(about["metrics"]),
            functions=None if about["functions"] is None else pickle.loads(about["functions"]),
            output=status["output"],
        )
        self._watch.end(self._result)
        return self._result

    def release(self) -> None:
        """Let the workers forget the result of an ended job; its status stays."""
        self._control.call("dtrain_release", job=self.id)

    def _payload(self, status: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        """The trained parameters, straight from the worker that holds them."""
        from distributed import Client

        client = self._control.target
        if isinstance(client, str):
            with Client(client, timeout=settings().connect_deadline, set_as_default=False) as own:
                return Handle(self.id, own)._payload(status, timeout)
        if status["result"] is None:
            place = f"; it was written to {status['output']}" if status["output"] else ""
            raise JobFailed(
                f"job {self.id}: it has succeeded, but no worker holds its result any more: the "
                f"one that did is gone, or it was released{place}",
                self.id,
                "WORKERS_LOST",
            )
        key, address = status["result"]
        seconds = settings().step_deadline if timeout is None else max(timeout, 1.0)
        try:
            payload: dict[str, Any] = client.sync(_fetch, client, key, address, seconds)
            return payload
        except (OSError, TimeoutError, KeyError) as error:
            raise JobFailed(
                f"job {self.id}: its result is at worker {address}, which does not give it "
                f"({type(error).__name__}: {error})",
                self.id,
                "WORKERS_LOST",
            ) from error

    def _error(self, status: dict[str, Any]) -> BaseException:
        message = f"job {self.id}: {status['message']}"
        if status["state"] == State.CANCELLED:
            return JobCancelled(message, self.id, "CANCELLED")
        if status["reason"] == "USER_ERROR" and status["exception"] is not None:
            # A Dask peer is fully trusted; the master never opens this.
            error: BaseException = pickle.loads(status["exception"])
            error.add_note(f"{message}\n\nRemote traceback:\n{status['traceback']}")
            return error
        kind = _ERRORS.get(status["reason"], JobFailed)
        return kind(message, self.id, status["reason"])

    def _described(
        self, wait: float = 0.0, seen: str | None = None, *, brief: bool = False
    ) -> dict[str, Any]:
        deadline = settings().call_deadline + wait
        found: dict[str, Any] = self._control.call(
            "dtrain_status", deadline, job=self.id, wait=wait, seen=seen, brief=brief
        )
        return found


async def _fetch(client: Client, key: str, address: str, seconds: float) -> Any:
    """Worker to client; a parameter never passes through the scheduler."""
    from distributed.worker import get_data_from_worker

    call = get_data_from_worker(client.rpc, [key], address)
    return (await asyncio.wait_for(call, seconds))["data"][key]


def jobs(client: Client | str | None = None) -> list[Handle]:
    """All jobs of a cluster, in the order of their submission; none if dtrain is not there."""
    target = target_of(client)
    control = Control(target)
    answer = control.raw("dtrain_jobs")
    if answer is None:
        return []
    return [Handle(found["id"], target) for found in control.call("dtrain_jobs")]


def attach(job_id: str, client: Client | str | None = None) -> Handle:
    """The job of that id; an attached job lives on with this client.

    Raises JobNotFound if the cluster has none.
    """
    target = target_of(client)
    control = Control(target)
    control.call("dtrain_attach", job=job_id, client=control.client_id)
    return Handle(job_id, target)


def target_of(client: Client | str | None) -> Client | str:
    if client is not None:
        return client
    from distributed.client import default_client

    from dtrain.config import scheduler_address

    try:
        found: Client = default_client()
        return found
    except ValueError:
        address = scheduler_address()
        if address is None:
            raise ClusterError(
                "no cluster is named: expected a client, a current client, or DTRAIN_SCHEDULER"
            ) from None
        return address
