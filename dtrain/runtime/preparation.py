"""How a host gets ready: model, parameters, shards, data; until all hosts of the job are."""

from __future__ import annotations

import pickle
import time
from typing import TYPE_CHECKING, Any

from dtrain.errors import CheckpointError, DeadlineError
from dtrain.layout import Layout
from dtrain.machines.cursor import Cursor
from dtrain.machines.rounds import Rounds
from dtrain.machines.shard import ShardMachine
from dtrain.optim import Optimizer
from dtrain.runtime import arena as arenas
from dtrain.runtime import checkpoint
from dtrain.runtime.arena import Arena
from dtrain.runtime.data import Feed, Parts, Waits
from dtrain.runtime.lead import Account, AsyncLead, SyncLead
from dtrain.runtime.modelfile import check_writable
from dtrain.runtime.restore import restore, unrecorded
from dtrain.runtime.saver import Saver
from dtrain.runtime.shards import AsyncShard, SyncShard, cut
from dtrain.runtime.state import Begin, State
from dtrain.runtime.transport import meeting, open_link
from dtrain.runtime.usercode import calling

if TYPE_CHECKING:
    from dtrain.runtime.host import Host


def prepare(host: Host) -> None:
    """Get the model, the parameters, the shards and the data; return when all are ready."""
    spec, data = host.launch.spec, host.launch.data
    if host.is_chief:
        _check_places(host)
    with calling("loading the model"):
        host.model = pickle.loads(host.launch.model)
    host.optimizer = Optimizer.from_dict(spec.optimizer)
    host.parts = Parts.of(
        data.x.rows,
        None if data.valid_x is None else data.valid_x.rows,
        fraction=spec.validation_split,
        replicas=host.launch.replicas,
        batch_size=spec.batch_size,
        epochs=spec.epochs,
        steps=spec.steps,
        seed=spec.seed,
    )
    if host.is_chief:
        _restore(host)
    else:
        _meet(host)
    host.feed = Feed(
        data, host.parts, host.service, spec.seed, spec.shuffle,
        host.launch.settings.call_deadline, strays=not host.synchronous,
        waits=Waits(host.launch.settings.data_deadline, host.calls.check),
    )  # fmt: skip
    host.feed.open(host.plan.replicas)
    answer = host.calls.wait_for(
        "dtrain_ready", f"job {host.launch.job} to start", **_readiness(host)
    )
    _open_arena(host, shared=answer["shared"])
    # A link looks for the shards, and so all of them must be there.
    host.barrier(0, "opened")
    # Everybody has what the generation begins with; what was before is of no use any more.
    host.state = None
    host.service.drop_former(host)
    meeting.forget(host.launch.job, before=host.generation)
    if host.plan.replicas:
        host.link = open_link(host)
    host.saver = Saver(host)


def _check_places(host: Host) -> None:
    """What is to be written can be, before hours of training."""
    spec = host.launch.spec
    if spec.output is not None:
        check_writable(spec.output)
    if spec.checkpoint is None or host.generation > 1:
        return
    place = str(spec.checkpoint.dir)
    checkpoint.check_writable(place)
    if not spec.resume:
        found = [e for e in checkpoint.entries(place, verify=False) if e.problem is None]
        if found:
            raise CheckpointError(
                f"{place}: found the checkpoint {found[0].name} of job {found[0].job}, "
                f"expected none; resume=True goes on from it"
            )


def _readiness(host: Host) -> dict[str, Any]:
    """What the master is told; by the chief also what the generation begins with."""
    said: dict[str, Any] = {"shared": host.meeting is not None}
    if host.state is not None:
        state = host.state
        said["restored"] = {
            "step": state.step,
            "source": state.source,
            "history": list(state.history),
            "ledger": state.ledger.to_dict(),
            "suspects": [[b.epoch, b.part, b.index] for b in state.suspects],
        }
        said["meeting"] = meeting.describe(host.meeting)
    return said


def _open_arena(host: Host, *, shared: bool) -> None:
    def make() -> Arena:
        if shared and host.meeting is not None:
            return meeting.join(host, host.meeting)
        if host.synchronous:
            return Arena.private(host.layout, params, 2, host.begin.step)
        return Arena.private(host.layout, params, 1, 0)

    slots: dict[int, Any] = {}
    if not shared:
        params, slots = _first(host)
    if not shared and host.made is not None:
        meeting.leave(host)
    host.arena = arenas.acquire((host.launch.job, host.generation), make)
    host.opened = True
    host.unmake()
    with host.arena.lock:
        if host.calls.stopped is not None:
            host.arena.stop(host.calls.stopped)
    host.arena.add_replicas(host.plan.replicas)
    _lead(host, shared=shared)
    if not shared:
        _host_shards(host, slots)
        if host.plan.shards:
            host.arena.start(f"dtrain-shards-{host.launch.job}")


def _restore(host: Host) -> None:
    """By the chief: find what the generation begins with, and let the others know."""
    host.state = state = restore(host)
    count = len(host.shards)
    host.begin = Begin(
        step=state.step,
        versions=tuple(state.versions or [state.step] * count),
        epochs=len(state.history),
        finished=_finished(host, state),
    )
    host.history, host.base = list(state.history), state.ledger
    called = meeting.call(host)
    if called is not None:
        host.meeting, host.made = called
    host.service.worker.loop.add_callback(host.answers.publish)


def _finished(host: Host, state: State) -> bool:
    """Whether nothing is left to do but to hand over the result."""
    plan, epochs = host.parts.plan, len(state.history)
    if host.synchronous:
        return state.step >= plan.total_steps and not unrecorded(plan, epochs, state.step)
    if state.cursor is None:
        return False
    cursor = Cursor(plan, host.generation, state.cursor)
    return cursor.exhausted and cursor.left == 0 and epochs > cursor.epoch


def _meet(host: Host) -> None:
    """By the others: learn from the chief where the generation begins, and where they meet."""
    settings = host.launch.settings
    until = time.monotonic() + settings.prepare_deadline
    chief = host.launch.chief
    while time.monotonic() < until:
        host.calls.check()
        answer = host.calls.ask(chief.address, "dtrain_initial", wait=settings.poll)
        if answer is not None:
            host.layout_known(Layout.from_dict(answer["layout"]))
            host.begin = Begin(**answer["begin"])
            host.meeting = meeting.find(answer["meeting"])
            return
    raise DeadlineError(
        f"the chief, {chief}, has not initialised the variables "
        f"in {settings.prepare_deadline:.0f} s"
    )


def _first(host: Host) -> tuple[Any, dict[int, Any]]:
    """The parameters that the generation begins with, and the slots of one's own shards."""
    wanted = [s for s in host.plan.shards if s < len(host.shards)]
    if host.state is not None:
        return host.state.params, slots_of(host, host.state, wanted)
    deadline = host.launch.settings.prepare_deadline
    found = host.calls.ask(host.launch.chief.address, "dtrain_first", deadline, shards=wanted)
    return found["params"], found["slots"]


def slots_of(host: Host, state: State, shards: list[int]) -> dict[int, Any]:
    return {
        shard: {
            name: cut(buffer, host.shard_plan.shards[shard].ranges)
            for name, buffer in state.slots.items()
        }
        for shard in shards
    }


def _host_shards(host: Host, slots: dict[int, Any]) -> None:
    plan = host.parts.plan
    for index in host.plan.shards:
        if index >= len(host.shards):
            continue
        shard = host.shard_plan.shards[index]
        hosted: SyncShard | AsyncShard
        if host.synchronous:
            hosted = SyncShard(
                host.arena,
                shard,
                ShardMachine(index, host.generation, host.begin.step, plan.members),
                host.optimizer,
                host.launch.replicas,
                publish=_read_from_afar(host),
                report=host.reduced,
                slots=slots[index],
            )
        else:
            hosted = AsyncShard(
                host.arena,
                shard,
                host.optimizer,
                version=host.begin.versions[index],
                slots=slots[index],
            )
        host.arena.shards[index] = hosted


def _lead(host: Host, *, shared: bool) -> None:
    """The chief has the lead: it runs the machine of the steps, or of the batches."""
    plan, state = host.parts.plan, host.state
    if state is None:
        host.account = Account() if shared and not host.synchronous else None
        return
    if not host.synchronous:
        host.account = account = Account(state.ledger, state.totals, state.step)
        # In shared memory the cursor lies there too, and everyone takes from it.
        cursor = Cursor(plan, host.generation, state.cursor)
        host.arena.lead = None if shared else AsyncLead(cursor, host.arena.commits, account)
        return
    rounds = Rounds(
        host.generation,
        state.step,
        len(host.shards),
        host.launch.replicas,
        plan.members,
        lambda step: plan.locate(step)[0],
        state.ledger,
        state.totals,
    )
    lead = SyncLead(rounds, host.decided, host.arena.commits)
    host.account = host.arena.lead = lead


def _read_from_afar(host: Host) -> bool:
    from dtrain.runtime.worker import service_at

    return any(h.replicas and service_at(h.address) is None for h in host.launch.hosts)
