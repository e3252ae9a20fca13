"""What a host asks of the master and of others, from its thread; every answer has a deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any

from dtrain.errors import DeadlineError, DTrainError, FencedError
from dtrain.runtime.arena import Stopped
from dtrain.runtime.launch import Launch

if TYPE_CHECKING:
    from dtrain.runtime.worker import WorkerService

logger = logging.getLogger("dtrain.worker")


class Calls:
    """The questions of one host of a generation of a job; all end when it is told to stop."""

    def __init__(self, service: WorkerService, launch: Launch) -> None:
        self.service = service
        self.launch = launch
        #: why the host is to leave, once somebody has said so
        self.stopped: str | None = None
        #: the questions that threads wait for; cancelled when the job is to stop
        self._asked: set[Future[Any]] = set()

    def stop(self, why: str) -> None:
        """From any thread."""
        self.stopped = self.stopped or why
        for asked in list(self._asked):
            asked.cancel()

    def check(self) -> None:
        """Raise if the host is to leave."""
        if self.stopped is not None:
            raise Stopped(self.stopped)

    def answer(self, question: Coroutine[Any, Any, Any], deadline: float) -> Any:
        """The answer to a question that has this deadline; Stopped as soon as the job stops.

        A peer that has died would keep us for as long as Dask tries to reach it.
        """
        asked = self.service.start(question)
        self._asked.add(asked)
        try:
            if self.stopped is not None:
                asked.cancel()
            return asked.result(deadline + 1)
        except CancelledError:
            self.check()
            raise
        finally:
            self._asked.discard(asked)

    def wait_for(self, op: str, what: str, **message: Any) -> Any:
        """Ask the master until it has an answer; each call is short, the whole has a deadline."""
        settings = self.launch.settings
        until = time.monotonic() + settings.step_deadline
        while time.monotonic() < until:
            self.check()
            question = self.service.ask_master(
                op,
                settings.call_deadline + settings.poll,
                job=self.launch.job,
                generation=self.launch.generation,
                address=self.service.address,
                wait=settings.poll,
                **message,
            )
            try:
                answer = self.answer(question, settings.call_deadline + settings.poll)
            except DeadlineError as error:
                # A scheduler or a machine that stood still; what was asked may be asked again.
                logger.warning("job %s waits for %s: %s", self.launch.job, what, error)
                continue
            if answer["over"] is not None:
                raise Stopped(answer["over"])
            if answer["go"]:
                return answer
        raise DeadlineError(f"after {settings.step_deadline:.0f} s, still waiting for {what}")

    def ask(
        self,
        address: str,
        op: str,
        deadline: float | None = None,
        *,
        generation: int | None = None,
        **message: Any,
    ) -> Any:
        """Ask another host; of this generation, unless another one is named."""
        settings = self.launch.settings
        seconds = deadline or settings.call_deadline + settings.poll
        question = self.service.ask(
            address,
            op,
            seconds,
            job=self.launch.job,
            generation=generation or self.launch.generation,
            **message,
        )
        return self.answer(question, seconds)

    def ask_master(self, op: str, **message: Any) -> Any:
        """Ask the master what it knows at once."""
        seconds = self.launch.settings.call_deadline
        generation = self.launch.generation
        question = self.service.ask_master(
            op, seconds, job=self.launch.job, generation=generation, **message
        )
        return self.answer(question, seconds)

    def tell(self, words: str, *, saved: int | None = None) -> None:
        """Let the master know what has happened; nobody waits for that."""
        deadline = self.launch.settings.call_deadline
        told = self.service.ask_master(
            "dtrain_note",
            deadline,
            job=self.launch.job,
            generation=self.launch.generation,
            words=words,
            saved=saved,
        )
        self.service.start(quietly(told, words))

    def still_ours(self) -> None:
        """Raise FencedError if another generation has begun; asks the master itself."""
        if self.stopped is not None:
            raise FencedError(f"job {self.launch.job}: {self.stopped}")
        self.ask_master("dtrain_newest")


async def quietly(question: Coroutine[Any, Any, Any], words: str) -> None:
    """Await what nobody waits for; the log tells if it comes to nothing."""
    try:
        await question
    except (OSError, DTrainError) as error:
        logger.warning("the master was not told (%s): %s", error, words)
