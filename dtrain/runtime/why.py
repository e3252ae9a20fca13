"""Who waits for whom, since when and at which step: in words, and in plain values.

All of it follows from the machine of the job and the last summaries of its hosts
(``Host.summary``).  A summary is as old as the heartbeat that it came with: what has lasted for
long goes on since then, what is short may be over by now.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dtrain.machines.jobs import HostPlan, JobMachine, State
from dtrain.spec import JobSpec

#: So many replicas or workers are named in one sentence.
_NAMED = 4

_VERBS = {
    State.QUEUED: "queued",
    State.PREPARING: "preparing",
    State.RECOVERING: "recovering",
    State.STOPPING: "stopping",
}


class Why:
    """What a job waits for, as far as the master knows.

    Parameters
    ----------
    machine : JobMachine
    spec : JobSpec
    reports : mapping
        Address -> the host's last summary, and ``at``: when it came.
    now : float
        Seconds, on the clock of the machine.
    stall : float
        Seconds after which something takes long.
    silence : float
        Seconds after which a worker is not heard of.
    """

    def __init__(
        self,
        machine: JobMachine,
        spec: JobSpec,
        reports: Mapping[str, Mapping[str, Any]],
        now: float,
        stall: float,
        silence: float,
    ) -> None:
        self._machine = machine
        self._spec = spec
        self._reports = reports
        self._now = now
        self._stall = stall
        self._silence = silence
        self._host_of = {i: host for host in machine.hosts for i in host.replicas}
        self._in_graph = spec.replication == "in-graph"
        self._slow = self._slow_ones()

    # -- what others ask -------------------------------------------------------------------

    def words(self) -> str:
        """Who waits for whom, or that nobody does, in a sentence."""
        machine = self._machine
        if machine.terminal:
            failure = machine.outcome.failure if machine.outcome else None
            return f"it has ended: {machine.state}, {failure.message if failure else 'done'}"
        if machine.state is State.RUNNING:
            return self._barrier_words() or self._step_words() or self._nobody_words()
        late = self._unfinished()
        if not machine.hosts:
            least = self._spec.recovery.min_workers
            device = self._spec.device
            having = "" if device in ("auto", "cpu") else f" with device {device!r}"
            late = f"{least} worker{'s' if least > 1 else ''}{having}"
        verb = _VERBS[machine.state]
        waits = f"{verb} for {self._now - machine.entered:.1f} s, waiting for {late}"
        if machine.state is State.RECOVERING:
            return f"{waits}: {machine.story[-1][2]}"
        return waits

    def waiting(self) -> list[dict[str, Any]]:
        """All that wait, those of a step too that is under way.

        Each is a dict: ``replica`` and its ``worker`` (``replica`` None: the worker as a whole, as
        the driver of an in-graph job; both None: the job); ``for``: the replicas that it waits for,
        or the addresses of workers; ``step``, or None; ``barrier``: of the end of which epoch, in
        words, or None; ``seconds``; ``computing``: of those waited for, replica -> the seconds that
        it has been in user code.
        """
        machine = self._machine
        if machine.terminal:
            return []
        if machine.state is not State.RUNNING:
            hosts = [host.address for host in machine.waiting()]
            return [self._entry(None, None, hosts, None, self._now - machine.entered)]
        found = []
        for (epoch, phase), payloads in machine.reached.items():
            late_hosts = self._late(phase, payloads)
            late: list[Any] = [i for host in late_hosts for i in host.replicas]
            late = late or [host.address for host in late_hosts]
            for host in machine.hosts:
                if host.address not in payloads:
                    continue
                spent = self._reached_since(host, epoch, phase)
                for replica in host.replicas or [None]:
                    entry = self._entry(replica, host, late, None, spent)
                    found.append({**entry, "barrier": _barrier(epoch, phase)})
        waiters = self._waiters()
        step = max((w["step"] for _, w in waiters), default=0)
        blamed = self._blamed(waiters, step) if self._spec.mode == "sync" else []
        for host, waits in waiters:
            late = waits["replicas"] or [i for i in blamed if i not in waits["who"]]
            for replica in waits["who"] or [None]:
                entry = self._entry(replica, host, late, waits["step"], self._since(host, waits))
                found.append(entry)
        return [*found, *self._turns()]

    def _turns(self) -> Iterator[dict[str, Any]]:
        """Replicas that share a thread with a slow one."""
        for host in self._machine.hosts:
            computing = self._reports.get(host.address, {}).get("computing")
            if computing is not None and computing[0] in self._slow:
                slow, spent, step = computing[:3]
                for replica in host.replicas:
                    if replica != slow:
                        late = self._lasting(host, spent)
                        yield self._entry(replica, host, [slow], step, late)

    def doing(self) -> dict[str, str]:
        """Replica -> what it does, in words, for a job that is not over."""
        if self._machine.terminal:
            return {}
        return {str(i): self._does(i) for i in sorted(self._host_of)}

    # -- sentences -------------------------------------------------------------------------

    def _barrier_words(self) -> str | None:
        machine = self._machine
        for (epoch, phase), payloads in machine.reached.items():
            late_hosts = self._slowest_first(self._late(phase, payloads))
            late = [self._of_host(host, host.replicas) for host in late_hosts]
            there = [host for host in machine.hosts if host.address in payloads]
            spent = max((self._reached_since(h, epoch, phase) for h in there), default=0.0)
            who = sorted(i for host in there for i in host.replicas)
            since = f"; {_have_waited(who, spent)}" if spent >= self._stall and who else ""
            return f"{_barrier(epoch, phase)} waits for {_some(late)}{since}"
        return None

    def _step_words(self) -> str | None:
        """Of a step that takes long; None if nobody waits for long, and nobody is slow."""
        waiters = [(h, w) for h, w in self._waiters() if self._lasts(w)]
        mute = [host for host in self._machine.hosts if self._mute(host) is not None]
        if self._spec.mode != "sync":
            return self._held_words(waiters, mute) or self._slow_words(mute)
        if not (waiters or self._slow or mute):
            return None
        # The newest step that anybody tells of; the lead's account is as old as its last beat.
        steps = [w["step"] for _, w in waiters] + [s for s in self._slow.values() if s is not None]
        step = max(steps or [r["account"]["step"] for r in self._known("account")], default=0)
        waiters = [(h, w) for h, w in waiters if w["step"] == step]
        blamed = self._blamed(waiters, step)
        backups = self._spec.backups
        if backups and not waiters and len(blamed) <= backups:
            return self._slow_words(mute)
        who = self._by_host(blamed)
        # A worker may hold up a step with its shards alone.
        who += [self._of_host(h, h.replicas) for h in mute if not set(h.replicas) & set(blamed)]
        spent = max((self._since(h, w) for h, w in waiters), default=0.0)
        waits = self._who_waits(waiters, spent)
        if not who:
            return self._undecided(step, waiters, spent)
        if backups:
            total = len(self._host_of)
            return (
                f"step {step} waits for the gradients of {total - backups} of {total} replicas; "
                f"not there yet: {_some(who)}{waits}"
            )
        return f"step {step} waits for {_some(who)}{waits}"

    def _who_waits(self, waiters: Sequence[tuple[HostPlan, Any]], spent: float) -> str:
        if not waiters:
            return ""
        who = sorted(i for _, w in waiters for i in w["who"])
        if who:
            return f"; {_have_waited(who, spent)}"
        return f"; its driver on {waiters[0][0]} has waited for {spent:.1f} s"

    def _undecided(self, step: int, waiters: Sequence[tuple[HostPlan, Any]], spent: float) -> str:
        """All wait, and nobody is known to be waited for."""
        if self._in_graph:
            return (
                f"step {step} has waited for its tasks for {spent:.1f} s, and no worker computes a "
                f"gradient; are their threads busy with other tasks?"
            )
        who = sorted(i for _, w in waiters for i in w["who"])
        return (
            f"step {step} has all its gradients, as far as is known: it is being applied, or waits "
            f"for the verdict at {self._machine.hosts[0]}; {_have_waited(who, spent)}"
        )

    def _held_words(
        self, waiters: Sequence[tuple[HostPlan, Any]], mute: Sequence[HostPlan]
    ) -> str | None:
        """With bounded staleness: of those that are too far ahead."""
        if not waiters:
            return None
        bound = self._spec.max_staleness
        ahead = f"more than {bound} step{'' if bound == 1 else 's'} ahead of"
        groups: dict[tuple[int, ...], list[tuple[HostPlan, Any]]] = {}
        for host, waits in waiters:
            groups.setdefault(tuple(waits["replicas"]), []).append((host, waits))
        words = []
        for late, those in groups.items():
            who = sorted(i for _, w in those for i in w["who"])
            step = max(w["step"] for _, w in those)
            spent = max(self._since(h, w) for h, w in those)
            verb = "is" if len(who) == 1 else "are"
            words.append(
                f"at step {step} {_replicas(who)} {verb} held, {ahead} "
                f"{_some(self._by_host(late))}; {_have_waited(who, spent)}"
            )
        others = {*self._slow, *(i for host in mute for i in host.replicas)}
        others -= {i for late in groups for i in late}
        if others:
            words.append(f"slow too: {_some(self._by_host(others))}")
        return "; ".join(words)

    def _slow_words(self, mute: Sequence[HostPlan]) -> str | None:
        slow = self._by_host(self._slow)
        others = [host for host in mute if not self._slow.keys() & set(host.replicas)]
        slow += [self._of_host(host, host.replicas) for host in others]
        if not slow:
            return None
        turns = sorted(
            i
            for host in self._machine.hosts
            if self._slow.keys() & set(host.replicas)
            for i in host.replicas
            if i not in self._slow
        )
        if turns:
            # The replicas of a worker share its thread.
            verb, whose = ("waits", "its") if len(turns) == 1 else ("wait", "their")
            return f"{_replicas(turns)} {verb} for {whose} turn after {_some(slow)}"
        return f"nobody waits for it, but this is slow: {_some(slow)}"

    def _nobody_words(self) -> str:
        does = [f"replica {i} is {words}" for i, words in self.doing().items()]
        return f"it is running; nobody waits for long: {_some(does)}"

    def _unfinished(self) -> str:
        """The hosts that the state waits for, with what is known of what they do."""
        return _some([self._of_host(host, ()) for host in self._machine.waiting()])

    # -- what a replica or a host does -----------------------------------------------------

    def _does(self, replica: int) -> str:
        return self._host_does(self._host_of[replica], replica)

    def _host_does(self, host: HostPlan, replica: int | None = None) -> str:
        """What a host does, or one of its replicas; they share a thread."""
        mute, report = self._mute(host), self._reports.get(host.address)
        if mute is not None:
            unborn = report is None and self._machine.state in (State.PREPARING, State.RECOVERING)
            return (
                f"{'without a task that has begun' if unborn else 'not heard of'} for {mute:.1f} s"
            )
        if report is None:
            return "about to begin"
        if report["computing"] is not None:
            which, seconds, step, part, batch = report["computing"]
            if replica is not None and which != replica:
                return f"waiting for its turn after replica {which}"
            of = f"replica {which} " if replica is None else ""
            task = "in a task dtrain-gradient " if self._in_graph else ""
            return (
                f"computing {of}{task}for {self._lasting(host, seconds):.1f} s "
                f"(step {step}, partition {part}, batch {batch})"
            )
        if report.get("doing") is not None:
            what, seconds = report["doing"]
            return f"{what} for {self._lasting(host, seconds):.1f} s"
        if report.get("barrier") is not None:
            epoch, phase, seconds = report["barrier"]
            return f"at {_barrier(epoch, phase)} for {self._lasting(host, seconds):.1f} s"
        waits = report.get("waiting")
        if waits is not None and waits["who"]:
            spent = self._since(host, waits)
            late = _replicas(waits["replicas"], waits["more"])
            what = late if waits["replicas"] else f"step {waits['step']} to commit"
            return f"waiting for {what} for {spent:.1f} s"
        if self._machine.state in (State.PREPARING, State.RECOVERING):
            return "getting ready"
        return "without a task that runs" if self._in_graph else "between two steps"

    def _of_host(self, host: HostPlan, replicas: Sequence[int]) -> str:
        """A host, or those of its replicas that are meant, with what it does."""
        report = self._reports.get(host.address)
        computes = report["computing"][0] if report and report["computing"] else None
        if not replicas:
            return f"{host}, {self._host_does(host)}"
        if len(replicas) == 1:
            return f"replica {replicas[0]} on {host}, {self._does(replicas[0])}"
        does = self._host_does(host, None if computes in replicas else replicas[0])
        return f"{_replicas(replicas)} on {host}, {does}"

    def _by_host(self, replicas: Iterable[int]) -> list[str]:
        meant = set(replicas)
        found = []
        for host in self._slowest_first(self._machine.hosts):
            here = [i for i in host.replicas if i in meant]
            if here:
                found.append(self._of_host(host, here))
        return found

    def _slowest_first(self, hosts: Iterable[HostPlan]) -> list[HostPlan]:
        """Where not all are named, those are that it is about."""

        def key(host: HostPlan) -> tuple[bool, tuple[int, ...]]:
            named = self._mute(host) is not None or bool(self._slow.keys() & set(host.replicas))
            return not named, host.replicas

        return sorted(hosts, key=key)

    # -- of the summaries ------------------------------------------------------------------

    def _known(self, what: str) -> list[Mapping[str, Any]]:
        return [r for r in self._reports.values() if r.get(what) is not None]

    def _mute(self, host: HostPlan) -> float | None:
        """For how many seconds a host has not been heard of; None: not for long."""
        report = self._reports.get(host.address)
        at = self._machine.entered if report is None else report["at"]
        return self._now - at if self._now - at > self._silence else None

    def _lasting(self, host: HostPlan, seconds: float) -> float:
        if seconds < self._stall:
            return seconds
        return float(seconds + self._now - self._reports[host.address]["at"])

    def _lasts(self, waits: Mapping[str, Any]) -> bool:
        """Whether a host waits for long, or for one that is slow (if it knows for whom)."""
        late = set(waits["replicas"]) or self._slow.keys()
        # As many as there are backups may be slow, and no step waits for them.
        blocked = late & self._slow.keys() and len(self._slow) > self._spec.backups
        return bool(waits["seconds"] >= self._stall or blocked)

    def _since(self, host: HostPlan, waits: Mapping[str, Any]) -> float:
        since = self._now - self._reports[host.address]["at"] if self._lasts(waits) else 0.0
        return float(waits["seconds"] + since)

    def _reached_since(self, host: HostPlan, epoch: int, phase: str) -> float:
        """For how many seconds a host has been at a barrier, as of its last summary."""
        found = self._reports.get(host.address, {}).get("barrier")
        if found is None or (found[0], found[1]) != (epoch, phase):
            return 0.0
        return self._lasting(host, found[2])

    def _late(self, phase: str, payloads: Mapping[str, Any]) -> list[HostPlan]:
        hosts = self._machine.hosts
        due = [host for host in hosts if host.replicas or phase == "opened"]
        return [host for host in due if host.address not in payloads]

    def _waiters(self) -> list[tuple[HostPlan, Any]]:
        found = ((h, self._reports.get(h.address, {}).get("waiting")) for h in self._machine.hosts)
        return [(host, waits) for host, waits in found if waits is not None]

    def _slow_ones(self) -> dict[int, int | None]:
        """The replicas that have been in user code for long, and their steps; and those whose
        worker has done something else for long."""
        found: dict[int, int | None] = {}
        for host in self._machine.hosts:
            report = self._reports.get(host.address, {})
            if report.get("computing") is not None:
                replica, seconds, step = report["computing"][:3]
                if seconds >= self._stall:
                    found[replica] = step
            elif report.get("doing") is not None and report["doing"][1] >= self._stall:
                found.update(dict.fromkeys(host.replicas))
        return found

    def _blamed(self, waiters: Sequence[tuple[HostPlan, Any]], step: int) -> list[int]:
        """The replicas that a synchronous step waits for, as far as anybody knows."""
        found = {i for _, w in waiters if w["step"] == step for i in w["replicas"]}
        found |= {i for i, at in self._slow.items() if at is None or at <= step}
        return sorted(i for i in found if i in self._host_of)

    def _entry(
        self,
        replica: int | None,
        host: HostPlan | None,
        late: Sequence[Any],
        step: int | None,
        seconds: float,
    ) -> dict[str, Any]:
        computing = {}
        for other in late:
            found = self._host_of.get(other) if isinstance(other, int) else None
            report = self._reports.get(found.address) if found is not None else None
            if found is not None and report and report["computing"]:
                which, spent = report["computing"][:2]
                if which == other:
                    computing[str(other)] = self._lasting(found, spent)
        return {
            "replica": replica,
            "worker": None if host is None else host.address,
            "for": list(late),
            "step": step,
            "barrier": None,
            "seconds": seconds,
            "computing": computing,
        }


# -- words --------------------------------------------------------------------------------------


def _barrier(epoch: int, phase: str) -> str:
    return "the opening" if phase == "opened" else f"the end of epoch {epoch + 1} ({phase})"


def _replicas(numbers: Sequence[int], more: int = 0) -> str:
    """``replica 1``, ``replicas 0, 2 and 3``, ``replicas 0, 1, 2, 3 and 12 more``."""
    shown = [str(i) for i in numbers[:_NAMED]]
    more += len(numbers) - len(shown)
    if more:
        shown.append(f"{more} more")
    words = " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
    return f"replica{'s' if len(shown) > 1 else ''} {words}"


def _have_waited(numbers: Sequence[int], seconds: float) -> str:
    has = "has" if len(numbers) == 1 else "have"
    return f"{_replicas(numbers)} {has} waited for {seconds:.1f} s"


def _some(items: Sequence[str]) -> str:
    shown = list(items[:_NAMED])
    if len(items) > len(shown):
        shown.append(f"{len(items) - len(shown)} more")
    return " and ".join(shown)
