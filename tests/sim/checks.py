"""The rules of the control plane: what must hold of the job after every event, and at its end."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dtrain.machines import jobs
from dtrain.machines.jobs import POISON, TERMINAL, TRANSITIONS, State
from dtrain.machines.membership import Finding, Presence
from tests.sim.settings import Broken

if TYPE_CHECKING:
    from dtrain.messages import Batch


class Checks:
    """Kept apart from what they check; :class:`~tests.sim.world.World` calls them."""

    ends = 0
    ended: State | None = None
    #: the account of losses that the job must have
    losses = 0
    #: (state, generation, hosts, outcome) before the event at hand
    was: tuple[Any, ...] = ()
    #: the epochs and the account of gradients that were recorded before it
    recorded: tuple[Any, ...] = ()

    def end(self, command: jobs.End) -> None:
        self.ends += 1
        self.ended = self.job.state
        self.over = True
        if command.state is not self.job.state:
            raise Broken(f"{command} of a job that is {self.job.state}")

    # -- the job, event by event ---------------------------------------------------------------

    def before(self, event: Any) -> None:
        job = self.job
        chief = job.hosts[0].address if job.hosts else None
        self.was = (job.state, job.generation, job._hosts, job.outcome, chief, set(job.done))
        self.recorded = (list(job.history), job.ledger, self.opened)

    def behind(self, event: Any, commands: list[Any]) -> None:
        """After the job has taken an event."""
        job = self.job
        state, generation, hosts, outcome, chief, done = self.was
        if state in TERMINAL:
            if job.state is not state:
                raise Broken(f"the job was {state} and became {job.state}")
            if commands:
                raise Broken(f"{commands} of a job that has ended")
            return
        if self.ends + any(isinstance(c, jobs.End) for c in commands) != job.terminal:
            raise Broken(f"{self.ends} ends of a job that is {job.state}")
        if not generation <= job.generation <= generation + 1:
            raise Broken(f"generation {generation} was followed by {job.generation}")
        if isinstance(event, jobs.WorkerLost):
            succeeding = outcome is not None and outcome.state is State.SUCCEEDED
            lead = event.address == chief
            has_part = event.address in hosts and (event.address not in done or lead)
            if has_part and (outcome is None or (succeeding and lead)):
                self.loses(event.address, job.generation > generation)
        elif isinstance(event, jobs.HostFailed) and event.failure.reason == "WORKERS_LOST":
            if outcome is None:
                self.loses(event.address, job.generation > generation)
        elif job.generation > generation and not isinstance(event, jobs.Change):
            raise Broken(f"{event} began generation {job.generation}")
        if job.generation > generation and state is State.RUNNING and not self.recorded[2]:
            self.story.counts["ends before it has opened"] += 1
        if job.generation > generation and outcome is not None:
            handed = isinstance(event, jobs.WorkerLost) and event.address == chief
            if outcome.state is not State.SUCCEEDED or not handed:
                raise Broken(f"{event} began generation {job.generation} of a job that had ended")
        if job.losses != self.losses:
            raise Broken(f"{job.losses} losses, expected {self.losses}")
        self.check_recorded(event)
        if job.state is State.RUNNING and state is not State.RUNNING:
            missing = [a for a in job._hosts if (generation, a) not in self.said]
            if missing:
                raise Broken(f"the job runs without {missing}")

    def chosen(self, hosts: Any) -> None:
        """Hosts were chosen for a generation."""
        leaving = [h.address for h in hosts if h.address in self.retiring]
        if leaving:
            raise Broken(f"{leaving} are about to leave, and are to train")

    def loses(self, address: str, again: bool) -> None:
        """The job must have taken it as a loss, tell it, and begin anew or fail."""
        self.losses += 1
        self.story.counts["losses"] += 1
        job = self.job
        told = [words for _, _, words in job.story[-3:]]
        if job.outcome is not None:
            told.append(job.outcome.failure.message)
        if not any(address in words for words in told):
            raise Broken(f"the loss of {address} is not told: {told}")
        if again == (self.losses > self.settings.max_losses):
            raise Broken(f"after {self.losses} losses: {job.state} in generation {job.generation}")

    @property
    def opened(self) -> bool:
        """Whether all hosts of the newest generation have opened."""
        return any(phase == "opened" for _, phase in self.job.settled)

    def check_recorded(self, event: Any) -> None:
        """What is recorded changes at a barrier alone, and is then what the chief has found."""
        job = self.job
        history, ledger, before = self.recorded
        if not isinstance(event, jobs.Reached):
            if (job.history, job.ledger) != (history, ledger):
                raise Broken(f"{event} changed what is recorded")
            return
        self.check_history()
        if self.opened and not before and job.ledger != job.restored.ledger:
            raise Broken(f"the account is {job.ledger}, expected that of {job.restored}")

    def check_history(self) -> None:
        history = self.job.history
        if [record["epoch"] for record in history] != list(range(1, len(history) + 1)):
            raise Broken(f"the epochs of the history: {[r['epoch'] for r in history]}")

    # -- membership ----------------------------------------------------------------------------

    def fenced(self, address: str, process: Any, finding: Finding) -> None:
        self.story.counts["fenced workers"] += 1
        stopped = process.dead or process.held == "stopped"
        if finding is Finding.STOPPED and self.findings[address][-2:] != [finding] * 2:
            raise Broken(f"worker {address} was fenced after {self.findings[address]}")
        # One that nobody can see may run after all.
        if not stopped and finding is not Finding.UNKNOWN:
            raise Broken(f"worker {address} was fenced, and it runs")
        if not process.dead:
            self.died(address)

    def heard_of(self, address: str, busy: bool) -> None:
        member = self.membership.members[address]
        if member.presence is Presence.FENCED and not (member.stuck and busy):
            raise Broken(f"worker {address} is heard of again, and still fenced")

    def died(self, address: str) -> None:
        """A process has died: whatever it had in user code is a suspect."""
        for batch in self.in_user_code(address):
            self.killed[batch] += 1

    def in_user_code(self, address: str) -> list[Batch]:
        return []

    # -- the end -------------------------------------------------------------------------------

    def finish(self) -> None:
        """Nothing is left to happen."""
        job, story = self.job, self.story
        if job is None:
            raise Broken("the job has not begun")
        if self.ended is None:
            raise Broken(f"the job has not ended: {job.state}, {job.story[-1][2]}")
        states = [state for _, state, _ in job.story]
        for before, after in pairwise(states):
            if before is not after and after not in TRANSITIONS[before]:
                raise Broken(f"the job's story has {before} before {after}")
        if sum(state in TERMINAL for state in states) != 1 or states[-1] is not job.state:
            raise Broken(f"the job's story ends otherwise: {job.story}")
        times = [now for now, _, _ in job.story]
        if times != sorted(times):
            raise Broken(f"the times of the job's story: {times}")
        failure = job.outcome.failure
        story.state = job.state
        story.reason = failure.reason if failure else None
        story.message = failure.message if failure else ""
        self.check_end(str(job.state), story.reason or "", story.message)
        if job.state is State.SUCCEEDED:
            self.check_success(self.generations[job.generation])

    def check_end(self, state: str, reason: str, message: str) -> None:
        """Each end has its cause, and a cause that was there has its end."""
        job, fate = self.job, self.settings.fate
        cause = {
            "": True,
            "CANCELLED": fate in ("cancel", "client"),
            "NON_FINITE": fate == "nonfinite",
            "DEADLINE": fate == "unready",
            "DATA_ERROR": max(self.killed.values(), default=0) >= POISON,
            "WORKERS_LOST": self.losses > self.settings.max_losses or "there are fewer" in message,
        }
        if not cause.get(reason, False):
            raise Broken(f"found {state}, {reason} ({message}), for no cause")
        if "there are fewer" in message and fate in ("success", "slow", "join", "killer"):
            raise Broken(f"found {state}, {reason} ({message}), and workers were there")
        must = {"unready": "DEADLINE", "nonfinite": "NON_FINITE"}.get(fate, reason)
        if self.killer is not None and self.settings.transport == "shm":
            must = "DATA_ERROR"
        if must != reason:
            raise Broken(f"found {state}, {reason} ({message}), expected {must}")
        wanted = {"": "SUCCEEDED", "CANCELLED": "CANCELLED"}.get(reason, "FAILED")
        if state != wanted:
            raise Broken(f"found {state} for {reason!r}, expected {wanted}")
        most = max(job.deaths.values(), default=0)
        if most > POISON or (most == POISON) != (reason == "DATA_ERROR"):
            raise Broken(f"found {state}, {reason} ({message}), with {job.deaths}")
        # One that was fenced may wake up, and begin with another batch before it is told.
        if not self.story.counts["woken"] and job.deaths - self.killed:
            raise Broken(f"{job.deaths} deaths are told, there were {self.killed}")

    def check_success(self, gen: Any) -> None:
        """What a job that succeeded has done, in the generation that has ended it."""
        raise NotImplementedError

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        #: what neighbours have found of a worker since it was last heard of
        self.findings: dict[str, list[Finding]] = {}
        #: (generation, host) of those that were ready
        self.said: set[tuple[int, str]] = set()
        #: batch -> how often it was in user code when its worker died
        self.killed: Counter[Batch] = Counter()
