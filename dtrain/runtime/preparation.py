"""How a host gets ready: model, parameters, shards, data; until all hosts of the job are."""

from __future__ import annotations

import logging
import pickle
import time
from typing import TYPE_CHECKING, Any

from dtrain.devices import lacking, resolved
from dtrain.errors import CheckpointError, DeadlineError
from dtrain.layout import Layout
from dtrain.machines.cursor import Cursor
from dtrain.machines.quorum import Quorum
from dtrain.machines.rounds import Rounds
from dtrain.machines.shard import ShardMachine
from dtrain.optim import Optimizer
from dtrain.partition import assign
from dtrain.runtime import arena as arenas
from dtrain.runtime import checkpoint
from dtrain.runtime.arena import Arena
from dtrain.runtime.data import Feed, Parts
from dtrain.runtime.lead import Account, AsyncLead, QuorumLead, SyncLead
from dtrain.runtime.modelfile import check_writable
from dtrain.runtime.restore import restore
from dtrain.runtime.rows import Waits, room_for_copies
from dtrain.runtime.saver import Saver
from dtrain.runtime.shards import AsyncShard, SyncShard
from dtrain.runtime.state import Begin, State, finished
from dtrain.runtime.tasks import GraphShard
from dtrain.runtime.transport import meeting, open_link
from dtrain.runtime.transport.shmquorum import QuorumAccount
from dtrain.runtime.updater import cut
from dtrain.runtime.usercode import calling

if TYPE_CHECKING:
    from dtrain.runtime.host import Host

logger = logging.getLogger("dtrain.worker")


def prepare(host: Host) -> None:
    """Get the model, the parameters, the shards and the data."""
    spec, data = host.launch.spec, host.launch.data
    if host.is_chief:
        _check_places(host)
    with calling("loading the model"):
        host.model = pickle.loads(host.launch.model)
    host.optimizer = Optimizer.from_dict(spec.optimizer)
    if host.plan.replicas:
        host.device = _device(host)
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
        with host.activity.doing("finding what to begin with"):
            _restore(host)
    else:
        with host.activity.doing("looking for what the chief begins with"):
            _meet(host)
    host.feed = Feed(
        data, host.parts, host.service, spec.seed, spec.shuffle,
        host.launch.settings.call_deadline, strays=not host.synchronous or host.backups,
        waits=Waits(host.launch.settings.data_deadline, host.calls.check),
    )  # fmt: skip
    with host.activity.doing("opening its data"):
        host.feed.open(host.plan.replicas, room_for_copies(host.service.memory_limit))
    answer = host.calls.wait_for(
        "dtrain_ready", f"job {host.launch.job} to start", **_readiness(host)
    )
    _open_arena(host, shared=answer["shared"])


def _device(host: Host) -> str:
    """Where the replicas compute; the master has seen to it that there is such a device."""
    wanted, found = host.launch.spec.device, host.service.devices
    device = resolved(wanted, found)
    if device is None:
        raise lacking(wanted, [(str(host.plan), found, host.service.no_gpu)])
    return device


def enter(host: Host) -> None:
    """Return when all hosts are ready."""
    # A link looks for the shards, and so all of them must be there.
    host.barrier(0, "opened")
    # Everybody has what the generation begins with; what was before is of no use any more.
    host.state = None
    host.service.drop_former(host)
    meeting.forget(host.launch.job, before=host.generation)
    if host.plan.replicas and not host.in_graph:
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
    said: dict[str, Any] = {"shared": host.meeting is not None, "device": host.device}
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
        sizes = [shard.nbytes for shard in host.shard_plan.shards]
        said["shards"] = {"hosts": list(host.placed), "bytes": sizes}
    return said


def _open_arena(host: Host, *, shared: bool) -> None:
    def make() -> Arena:
        if shared and host.meeting is not None:
            return meeting.join(host, host.meeting)
        if host.in_graph:
            # Parameters and gradients are Dask's data; what is left is a place to meet.
            return Arena(host.layout, [])
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
    if not host.in_graph:
        host.arena.add_replicas(host.plan.replicas)
    _lead(host, shared=shared)
    if host.in_graph:
        _graph_shards(host, params, slots)
    elif not shared:
        _host_shards(host, slots)
        if host.plan.shards:
            host.arena.start(f"dtrain-shards-{host.launch.job}")


def _restore(host: Host) -> None:
    """By the chief: find what the generation begins with, and let the others know."""
    host.state = state = restore(host)
    _place(host)
    count = len(host.shards)
    host.begin = Begin(
        step=state.step,
        versions=tuple(state.versions or [state.step] * count),
        epochs=len(state.history),
        finished=finished(host.launch.spec, host.parts.plan, state),
    )
    host.history, host.base = list(state.history), state.ledger
    called = None if host.in_graph else meeting.call(host)
    if called is not None:
        host.meeting, host.made = called
    host.service.worker.loop.add_callback(host.answers.publish)


def _place(host: Host) -> None:
    """Choose a host for each shard; by the user's function, if there is one."""
    sizes = [shard.nbytes for shard in host.shard_plan.shards]
    addresses = [h.address for h in host.launch.hosts]
    if host.launch.placement is None:
        host.shards_placed(assign(sizes, addresses, host.launch.spec.placement))
        return
    with calling("placement of the shards"):
        host.shards_placed(assign(sizes, addresses, pickle.loads(host.launch.placement)))


def _meet(host: Host) -> None:
    """By the others: learn from the chief where the generation begins, and where they meet."""
    settings = host.launch.settings
    until = time.monotonic() + settings.prepare_deadline
    chief = host.launch.chief
    while time.monotonic() < until:
        host.calls.check()
        try:
            answer = host.calls.ask(chief.address, "dtrain_initial", wait=settings.poll)
        except DeadlineError as error:
            # Its user code may hold the interpreter; the master says if it is dead.
            logger.warning("job %s waits for its chief: %s", host.launch.job, error)
            continue
        if answer is not None:
            host.layout_known(Layout.from_dict(answer["layout"]))
            host.shards_placed(answer["placed"])
            host.begin = Begin(**answer["begin"])
            host.meeting = meeting.find(answer["meeting"])
            return
    raise DeadlineError(
        f"the chief, {chief}, has not initialised the variables "
        f"in {settings.prepare_deadline:.0f} s"
    )


def _first(host: Host) -> tuple[Any, dict[int, Any]]:
    """The parameters that the generation begins with, and the slots of one's own shards."""
    wanted = list(host.plan.shards)
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
    # With backups the lead says who makes a step.
    members = _nobody_yet if host.backups else host.parts.plan.members
    for index in host.plan.shards:
        shard = host.shard_plan.shards[index]
        hosted: SyncShard | AsyncShard
        if host.synchronous:
            hosted = SyncShard(
                host.arena,
                shard,
                ShardMachine(index, host.generation, host.begin.step, members),
                host.optimizer,
                host.launch.replicas,
                layout=host.layout,
                publish=host.backups or _read_from_afar(host),
                report=host.reduced,
                measured=host.measured,
                slots=slots[index],
            )
        else:
            hosted = AsyncShard(
                host.arena,
                shard,
                host.layout,
                host.optimizer,
                version=host.begin.versions[index],
                slots=slots[index],
            )
        host.arena.shards[index] = hosted


def _graph_shards(host: Host, params: Any, slots: dict[int, Any]) -> None:
    for index, own in slots.items():
        contents = cut(params, host.shard_plan.shards[index].ranges), own
        host.arena.shards[index] = GraphShard(index, host.begin.step, contents)


def _lead(host: Host, *, shared: bool) -> None:
    """The chief has the lead: it runs the machine of the steps, or of the batches."""
    plan, state = host.parts.plan, host.state
    if state is None:
        host.account = None if host.synchronous else Account()
        return
    if not host.synchronous:
        host.account = account = Account(state.ledger, state.totals, state.step)
        # In shared memory the cursor lies there too, and everyone takes from it.
        cursor = Cursor(plan, host.generation, state.cursor, host.launch.spec.max_staleness)
        if not shared:
            arena = host.arena
            arena.lead = AsyncLead(cursor, arena.commits, account, arena.progress.notify_all)
        return
    if host.backups and shared:
        # In shared memory the quorum lies there too, and whoever waits decides.
        host.account = QuorumAccount(host)
        return
    quorum = Quorum(plan, host.generation, host.launch.spec.backups, state.cursor)
    rounds = Rounds(
        host.generation,
        state.step,
        len(host.shards),
        host.launch.replicas,
        _nobody_yet if host.backups else plan.members,
        (lambda step: quorum.epoch) if host.backups else (lambda step: plan.locate(step)[0]),
        state.ledger,
        state.totals,
        skip=host.launch.spec.recovery.on_non_finite == "skip",
    )
    commits = host.arena.commits
    lead = (
        QuorumLead(quorum, rounds, host.decided, host.go_on, host.closed, commits)
        if host.backups
        else SyncLead(rounds, host.decided, host.go_on, commits)
    )
    host.account = host.arena.lead = lead


def _nobody_yet(step: int) -> tuple[int, ...] | None:
    """Whose gradients make a step is said once it is closed."""
    return None


def _read_from_afar(host: Host) -> bool:
    from dtrain.runtime.worker import service_at

    return any(h.replicas and service_at(h.address) is None for h in host.launch.hosts)
