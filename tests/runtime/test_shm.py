"""Shared memory between real worker processes: when it is used, what it gives, what it leaves."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from distributed import Client, LocalCluster, Nanny, Scheduler, SpecCluster, Worker

import dtrain
from dtrain.layout import Layout
from dtrain.models import MLP, Linear
from dtrain.partition import partition
from dtrain.runtime import worker as worker_module
from dtrain.runtime.transport import meeting, segment
from dtrain.runtime.transport.shmfile import FilePlan
from dtrain.runtime.updater import Updater
from tests.conftest import until

from .conftest import processes

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not segment.ORDERED, reason="stores are not seen in order here"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc"),
]

RNG = np.random.default_rng(3)
X = RNG.standard_normal((101, 7)).astype(np.float32)
Y = (X @ np.arange(7)).astype(np.float32)
LABELS = np.argmax(X @ RNG.standard_normal((7, 4)), axis=1)
#: The second half of the rows, and so the second replica's, is marked.
MARKED = np.abs(X)
MARKED[50:, 0] = -1


def fit(client: Client, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "batch_size": 10,
        "epochs": 3,
        "optimizer": dtrain.optim.adam(0.01),
    }
    arguments |= {"client": client, "progress": False} | changes
    return dtrain.fit(arguments.pop("model", MLP([7, 9, 4])), X, LABELS, **arguments)


#: The jobs that a test has started on a cluster that others use too.
_started: list[Any] = []


def endless(client: Client, model: Any = None, x: Any = X, y: Any = Y, **changes: Any) -> Any:
    """A job that runs until it is told to stop."""
    arguments = {"batch_size": 10, "epochs": 10**6, "client": client} | changes
    handle = dtrain.submit(model or Linear(7), x, y, **arguments)
    _started.append(handle)
    return handle


@pytest.fixture(autouse=True)
def nothing_runs_on(forked: Client) -> Iterator[None]:
    """A test that fails does not spoil the next one."""
    yield
    mine = {handle.id for handle in _started}
    _started.clear()
    for handle in dtrain.jobs(forked):
        if handle.id in mine:
            handle.cancel()
            handle.wait(timeout=30)


def bits(result: Any) -> Any:
    timing = ("seconds", "samples_per_s")
    history = [{k: v for k, v in e.items() if k not in timing} for e in result.history]
    return {name: p.tobytes() for name, p in result.params.items()}, history


# -- looking at the file -----------------------------------------------------------------------


def files(handle: Any) -> list[Path]:
    """All files of a job, wherever they lie."""
    return [f for place in segment.places() for f in sorted(place.glob(f"{handle.id}-*"))]


def generation(file: Path) -> int:
    return int(file.name.split("-")[-2].removeprefix("g"))


def shared(handle: Any) -> Path | None:
    """The file of the newest generation, as soon as it is there."""
    found = [f for f in files(handle) if "." not in f.name]
    return max(found, key=generation, default=None)


def gone(handle: Any, seconds: float = 5) -> None:
    until(lambda: not files(handle), seconds, f"still there: {files(handle)}")


def version(file: Path) -> int:
    """The synchronous version that the header tells."""
    plan = FilePlan(Layout.of({"w": np.zeros(1)}), dtrain.optim.sgd(1), 1, 1, sync=True)
    with file.open("rb") as opened:
        word = os.pread(opened.fileno(), 8, plan.version * 8)
    return int.from_bytes(word, sys.byteorder)


def reaches(handle: Any, wanted: int, seconds: float = 20) -> Path:
    """Wait until that version has committed."""
    until(lambda: shared(handle), 40, "no file")
    file = shared(handle)
    assert file is not None
    until(lambda: version(file) >= wanted, seconds, f"version {wanted} has not come")
    return file


def mapped() -> list[str]:
    """In a worker: which files of ours it has mapped, removed ones also."""
    with open("/proc/self/maps") as lines:
        return sorted({line.split()[5] for line in lines if f"/dtrain-{os.getuid()}/" in line})


def maps() -> list[str]:
    """In a worker: which shared memory it has mapped; the input of jobs is not counted."""
    return [name for name in mapped() if not os.path.basename(name).startswith("input-")]


def stop(handle: Any) -> None:
    handle.cancel()
    assert handle.wait(timeout=30) == "CANCELLED"


# -- when it is used ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [dtrain.Sync(), dtrain.Async()])
def test_chosen_by_itself_on_one_machine(forked, mode):
    handle = endless(forked, mode=mode)
    until(lambda: handle.status()["step"] > 0, 40, "no step")
    file = shared(handle)
    assert file is not None
    assert list(forked.run(maps).values()) == [[str(file)], [str(file)]]
    stop(handle)
    gone(handle)


@pytest.mark.parametrize("mode", [dtrain.Sync(), dtrain.Async()])
def test_not_used_where_the_settings_say_comm(mode):
    with processes(2, **{"dtrain.transport": "comm"}) as client:
        handle = endless(client, mode=mode)
        until(lambda: handle.status()["step"] > 0, 40, "no step")
        assert files(handle) == []
        assert not any(client.run(maps).values())
        stop(handle)


def test_not_used_by_a_single_process(threaded):
    handle = endless(threaded)
    until(lambda: handle.status()["step"] > 0, 40, "no step")
    assert files(handle) == []
    stop(handle)


@pytest.mark.parametrize(("kind", "slots"), [("sgd", 0), ("adam", 2)])
@pytest.mark.parametrize("replicas", [2, 3])
def test_the_size_of_the_file(forked, kind, slots, replicas):
    model = MLP([7, 2000, 200, 4])
    parameters = sum(p.nbytes for p in model.init(RNG).values())
    assert parameters > 1.5e6
    optimizer = getattr(dtrain.optim, kind)(1e-3)
    handle = endless(forked, model, y=LABELS, optimizer=optimizer, replicas=replicas)
    file = reaches(handle, 1)
    expected = 2 * (1 + slots) * parameters + replicas * parameters
    size = file.stat().st_size
    assert expected <= size <= 1.05 * expected
    # What lies beside it is small.
    assert sum(f.stat().st_blocks * 512 for f in files(handle) if f != file) < 65536
    stop(handle)
    gone(handle)


@contextmanager
def patched(
    client: Client, patch: Callable[..., None], *which: str, **values: Any
) -> Iterator[None]:
    """Something of dtrain is replaced in these workers (all, if none is named)."""
    client.run(patch, workers=list(which) or None, **values)
    try:
        yield
    finally:
        client.run(restore)


#: In a worker: what to put back.
_replaced: list[tuple[Any, str, Any]] = []


def replace(owner: Any, name: str, value: Any) -> None:
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def restore() -> None:
    while _replaced:
        owner, name, value = _replaced.pop()
        setattr(owner, name, value)


def cannot_open() -> None:
    replace(segment, "shares", lambda *args: False)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("mode", [dtrain.Sync(), dtrain.Async()])
def test_one_worker_that_cannot_open_the_file_and_all_take_the_network(forked, which, mode):
    handle = endless(forked, mode=mode)
    until(lambda: handle.status()["step"] > 0, 40, "no step")
    other = handle.status()["replicas"]["1"]
    stop(handle)
    address = [a for a in forked.run(os.getpid) if (a == other) == bool(which)]
    with patched(forked, cannot_open, *address):
        handle = endless(forked, mode=mode)
        until(lambda: handle.status()["step"] > 0, 40, "no step")
        # The chief makes the file and does not look for it: only the other one can object.
        assert bool(files(handle)) == (which == 0)
        stop(handle)
        gone(handle)


def test_the_network_gives_the_same_bits(forked):
    base = bits(fit(forked))
    with patched(forked, cannot_open), patched(forked, note_joins):
        assert bits(fit(forked)) == base
        assert list(forked.run(used).values()) == [0, 0]


class Large:
    """Parameters of 11 MB that no batch needs."""

    def init(self, rng):
        return {"w": np.zeros(2_750_000, np.float32)}

    def loss_and_grads(self, params, batch):
        return 0.0, {"w": np.zeros_like(params["w"])}

    def predict(self, params, x):
        return np.zeros(len(x), np.float32)


def test_an_arena_that_the_workers_may_not_have_is_refused_with_its_numbers():
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit="400MB", dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        # 2 x (parameters + 2 slots) + 16 gradients: 22 x 11 MB
        handle = endless(client, Large(), replicas=16, optimizer=dtrain.optim.adam(0.1))
        with pytest.raises(dtrain.JobFailed) as caught:
            handle.result(timeout=20)
        assert caught.value.reason == "STORAGE"
        assert "takes 0.24 GB" in str(caught.value)
        assert "at most 60% of the memory limit" in str(caught.value)
        assert "0.40 GB" in str(caught.value)
        gone(handle)
        assert fit(client).version == 18


# -- what it gives -----------------------------------------------------------------------------

#: 101 rows: the last batches are ragged, and not every replica takes part in the last step.
SHAPES = {
    "the chief's replica has no part in the last step": {"replicas": 2, "batch_size": 10},
    "another's has none": {"replicas": 3, "batch_size": 11},
    "three replicas on two workers": {"replicas": 3, "batch_size": 7},
    "more shards than hosts": {"replicas": 2, "shards": 4, "batch_size": 13},
    "one shard": {"replicas": 2, "shards": 1, "batch_size": 13},
    "a host with a shard alone": {"replicas": 1, "shards": 2, "batch_size": 13},
    "a single step": {"replicas": 1, "shards": 2, "steps": 1},
    "float64": {"model": MLP([7, 9, 4], dtype="float64"), "replicas": 2, "shards": 3},
}


def used(dask_worker: Any) -> int:
    return dask_worker.joined


def note_joins(dask_worker: Any) -> None:
    real = meeting.join
    dask_worker.joined = 0

    def join(*args: Any) -> Any:
        dask_worker.joined += 1
        return real(*args)

    replace(meeting, "join", join)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_of_a_single_process(threaded, forked, shape):
    with patched(forked, note_joins):
        found = bits(fit(forked, **SHAPES[shape]))
        assert list(forked.run(used).values()) == [1, 1]
    assert found == bits(fit(threaded, **SHAPES[shape]))


def test_job_after_job_and_two_at_once(forked):
    alone = bits(fit(forked, epochs=20))
    assert bits(fit(forked, epochs=20)) == alone
    lasting = endless(forked)
    reaches(lasting, 5)
    both = [
        dtrain.submit(
            MLP([7, 9, 4]), X, LABELS, batch_size=10, epochs=20, optimizer=dtrain.optim.adam(0.01),
            client=forked,
        )
        for _ in range(2)
    ]  # fmt: skip
    assert [bits(handle.result(timeout=30)) for handle in both] == [alone, alone]
    assert shared(lasting) is not None, "another job's end took its file"
    before = version(shared(lasting))
    until(lambda: version(shared(lasting)) > before, 30, "the lasting one does not go on")
    stop(lasting)
    for handle in (lasting, *both):
        gone(handle)


def no_second_look() -> None:
    """Nobody looks by himself before the minute is over: what is not rung for is not seen."""
    replace(segment, "SLICE", 60.0)
    replace(segment, "SPINS", 1)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_every_ring_is_rung(forked, shards):
    with patched(forked, no_second_look):
        begun = time.monotonic()
        result = fit(forked, replicas=3, shards=shards, epochs=100)
        assert result.version == 400
        assert time.monotonic() - begun < 20


class Late(MLP):
    """The replica whose rows are marked is always the last: the other one sleeps by then."""

    def loss_and_grads(self, params, batch, *, out=None, rng=None):
        if batch[0][0, 0] < 0:
            threading.Event().wait(0.01)
        return super().loss_and_grads(params, batch, out=out, rng=rng)


def count_reduced(dask_worker: Any) -> None:
    real = Updater.reduce
    dask_worker.reduced = 0

    def reduce(*args: Any) -> Any:
        dask_worker.reduced += 1
        return real(*args)

    replace(Updater, "reduce", reduce)


def reduced(dask_worker: Any) -> int:
    return dask_worker.reduced


def test_whoever_waits_works(forked):
    """The last one to push does not do the sums of all shards while the others sleep."""
    model, steps, x = Late([7, 200_000, 4]), 20, np.abs(X)
    x[:50, 0] = -1
    with patched(forked, no_second_look), patched(forked, count_reduced):
        handle = dtrain.submit(
            model, x, LABELS, replicas=2, shards=2, batch_size=2, steps=steps, client=forked
        )
        handle.result(timeout=30)
        counts = forked.run(reduced)
        assert sum(counts.values()) == 2 * steps
        assert counts[handle.status()["replicas"]["1"]] >= steps / 4, counts


class mixed:
    """Two workers in this very process, and one in another."""

    def __enter__(self) -> Client:
        here = {"cls": Worker, "options": {"nthreads": 1}}
        there = {"cls": Nanny, "options": {"nthreads": 1}}
        self._cluster = SpecCluster(
            workers={0: here, 1: here},
            scheduler={"cls": Scheduler, "options": {"dashboard": False, "port": 0}},
            silence_logs=50,
        )
        self._client = Client(self._cluster)
        self._client.wait_for_workers(2, timeout=20)
        self._cluster.worker_spec[2] = there
        self._cluster.sync(self._cluster._correct_state)
        self._client.wait_for_workers(3, timeout=20)
        return self._client

    def __exit__(self, *error: object) -> None:
        self._client.close()
        self._cluster.close()


def test_hosts_that_share_a_process_beside_one_that_does_not(threaded):
    """One of the two decides each step, once."""
    with mixed() as client:
        for shape in ({"replicas": 3}, {"replicas": 5, "shards": 2}, {"replicas": 2, "shards": 3}):
            handle = dtrain.submit(
                MLP([7, 9, 4]), X, LABELS, batch_size=3, epochs=60,
                optimizer=dtrain.optim.adam(0.01), client=client, **shape,
            )  # fmt: skip
            until(lambda handle=handle: files(handle) or handle.state == "SUCCEEDED", 40, "?")
            result = handle.result(timeout=30)
            ledger = result.ledger
            assert (ledger.duplicates, ledger.rejected, ledger.late) == (0, 0, 0)
            assert ledger.samples == [101] * 60
            expected = fit(threaded, batch_size=3, epochs=60, **shape)
            assert bits(result) == bits(expected)
        asynchronous = fit(client, mode=dtrain.Async(), batch_size=3, epochs=30, shards=2)
        assert asynchronous.ledger.samples == [101] * 30
        assert asynchronous.ledger.applied == asynchronous.version


# -- how it ends -------------------------------------------------------------------------------


class Gated(Linear):
    """The replica whose rows are marked waits in user code until a file is there."""

    def __init__(self, gate: Path) -> None:
        super().__init__(7)
        self.gate = gate

    def loss_and_grads(self, params, batch, *, out=None, rng=None):
        if batch[0][0, 0] < 0:
            while not self.gate.exists():
                threading.Event().wait(0.02)
        return super().loss_and_grads(params, batch, out=out, rng=rng)


def test_cancel_while_waiting(forked, tmp_path):
    """Who waits in shared memory leaves at once, and the file goes with him."""
    with patched(forked, no_second_look):
        handle = endless(forked, Gated(tmp_path / "gate"), MARKED, replicas=2)
        until(
            lambda: "replica 1 on worker" in handle.why_waiting(), 10, "replica 1 is not waited for"
        )
        file = shared(handle)
        assert sum(str(file) in mapped for mapped in forked.run(maps).values()) == 2
        handle.cancel()
        gone(handle, 2)
        until(
            lambda: sum(bool(mapped) for mapped in forked.run(maps).values()) == 1,
            2,
            "the one that waited has not left",
        )
        (tmp_path / "gate").touch()
        assert handle.wait(timeout=30) == "CANCELLED"


class Answers(Linear):
    """A finite loss, and the same gradient always."""

    def __init__(self, value: float) -> None:
        super().__init__(7)
        self.value = value

    def loss_and_grads(self, params, batch, *, out=None, rng=None):
        for view in out.values():
            view[...] = self.value if batch[0][0, 0] < 0 else 3e38
        return 0.5, out


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.nan, r"the gradient of replica 1 is not finite at step 0 \(partition 1, batch 0\)"),
        (3e38, "the sum of the gradients overflows at step 0"),
    ],
)
def test_a_gradient_that_is_not_finite_is_refused_and_named(forked, value, words):
    handle = endless(forked, Answers(value), MARKED, replicas=2, shards=2)
    with pytest.raises(dtrain.NonFiniteError, match=words):
        handle.result(timeout=10)
    gone(handle)


@pytest.mark.parametrize("mode", [dtrain.Sync(), dtrain.Async()])
def test_nan_in_the_data_names_replica_partition_and_step(forked, mode):
    bad = X.copy()
    bad[77, 2] = np.nan
    handle = endless(forked, x=bad, replicas=2, shuffle=False, mode=mode)
    with pytest.raises(dtrain.NonFiniteError) as caught:
        handle.result(timeout=10)
    # In asynchronous mode the other one may have taken the batch from the end of the part.
    replica = "replica 1" if mode == dtrain.Sync() else "replica "
    for word in (replica, "partition 1", "batch 2", "step"):
        assert word in str(caught.value)
    gone(handle)


def no_collector() -> None:
    gc.collect()
    gc.disable()


class Raises(Linear):
    def loss_and_grads(self, params, batch, *, out=None, rng=None):
        raise KeyError("no such feature")


@pytest.mark.parametrize("mode", [dtrain.Sync(), dtrain.Async()])
def test_the_memory_is_let_go_with_the_job(forked, mode):
    """At once, not when Python collects its garbage: it may be gigabytes."""
    forked.run(no_collector)
    try:
        fit(forked, mode=mode)
        until(lambda: not any(forked.run(mapped).values()), 20, "mapped after success")
        handle = endless(forked, mode=mode)
        until(lambda: all(forked.run(maps).values()), 30, "not mapped by both")
        # Its file, and the input.
        assert [len(names) for names in forked.run(mapped).values()] == [2, 2]
        stop(handle)
        until(lambda: not any(forked.run(mapped).values()), 20, "mapped after it was cancelled")
        with pytest.raises(KeyError):
            endless(forked, Raises(7), mode=mode).result(timeout=10)
        until(lambda: not any(forked.run(mapped).values()), 20, "mapped after an error")
    finally:
        forked.run(gc.enable)


def handles() -> list[str]:
    """In a worker: what is open, but for the connections, which are Dask's and come and go."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(name for name in found if not name.startswith("socket:"))


def rss() -> float:
    return psutil.Process().memory_info().rss / 1e6


def test_nothing_grows_over_ten_thousand_steps(forked):
    fit(forked)
    before = forked.run(handles)
    x = np.tile(X, (200, 1))
    handle = endless(forked, x=x, y=np.tile(Y, 200), batch_size=1)
    reaches(handle, 2000, 60)
    listing, memory, within = files(handle), forked.run(rss), forked.run(handles)
    # The file and its lock, the locks of its parts, and a bell for each of the two; the input
    # and its lock.
    assert [len(there) - len(before[at]) for at, there in within.items()] == [7, 7]
    begun = version(listing[0])
    reaches(handle, begun + 10_000, 90)
    assert files(handle) == listing
    assert forked.run(handles) == within
    for address, after in forked.run(rss).items():
        assert after < memory[address] + 20
    stop(handle)
    gone(handle)
    until(lambda: forked.run(handles) == before, 30, "handles are left open")


def moments(rounds: int) -> list[tuple[int, str]]:
    """Versions, and whose process it is; seeded."""
    dice = random.Random(7)
    return [(dice.choice((0, dice.randrange(1, 400))), dice.choice("01")) for _ in range(rounds)]


def kill(client: Client, address: str) -> None:
    os.kill(client.run(os.getpid, workers=[address])[address], signal.SIGKILL)


def test_a_killed_worker_ends_a_job_that_may_lose_none_at_any_moment():
    with processes(2) as client:
        for moment, replica in moments(5):
            handle = endless(client, recovery=dtrain.Recovery(max_losses=0))
            if moment:
                reaches(handle, moment)
            victim = handle.status()["replicas"][replica]
            kill(client, victim)
            with pytest.raises(dtrain.WorkersLost) as caught:
                handle.result(timeout=10)
            assert victim in str(caught.value)
            assert "still in user code" not in str(caught.value)
            gone(handle)
            client.wait_for_workers(2, timeout=30)
        assert fit(client, replicas=2).version == 18


#: A job of some seconds, whose bits are known.
LONG: dict[str, Any] = {"batch_size": 1, "steps": 5000, "replicas": 2}


def long(client: Client) -> Any:
    """Begin it."""
    x, y = np.tile(X, (100, 1)), np.tile(LABELS, 100)
    handle = dtrain.submit(MLP([7, 9, 4]), x, y, client=client, **LONG)
    _started.append(handle)
    return handle


def test_a_killed_worker_changes_no_bit_at_any_moment(forked):
    """Those that are left go on from the file of the generation before, and then remove it."""
    base = bits(long(forked).result(timeout=30))
    with processes(2) as client:
        for moment, replica in moments(5):
            handle = long(client)
            if moment:
                reaches(handle, moment)
            kill(client, handle.status()["replicas"][replica])
            assert bits(handle.result(timeout=30)) == base
            status = handle.status()
            assert status["losses"] == 1
            # The second one begins without the dead; a third one when its nanny is through.
            assert status["generation"] in (2, 3)
            gone(handle)
            client.wait_for_workers(2, timeout=30)


def making_takes_long() -> None:
    def initialise(*args: Any) -> None:
        threading.Event().wait(60)

    replace(meeting, "initialise", initialise)


@pytest.mark.parametrize("losses", [0, 1])
def test_a_chief_killed_before_it_told_of_its_file(losses):
    """Nobody else was told where it is, and the next sweep may be far."""
    with processes(2) as client:
        chief = _chief(client)
        client.run(making_takes_long, workers=[chief])
        handle = endless(client, recovery=dtrain.Recovery(max_losses=losses))
        until(lambda: shared(handle), 30, "no file")
        first = shared(handle)
        assert first is not None
        assert handle.status()["replicas"]["0"] == chief
        kill(client, chief)
        if losses:
            until(lambda: handle.state == "RUNNING", 30, "it does not go on")
            until(lambda: first not in files(handle), 20, "the first file is there")
            stop(handle)
        else:
            with pytest.raises(dtrain.WorkersLost, match=chief) as caught:
                handle.result(timeout=10)
            # The other one does not try to reach it any more.
            assert "still in user code" not in str(caught.value)
        gone(handle)


async def stop_unknown(dask_worker: Any) -> None:
    await dask_worker.handlers["dtrain_stop"](
        job="unknown", generation=1, why="its chief died", over=True
    )


async def forget_unknown(dask_worker: Any) -> None:
    await dask_worker.handlers["dtrain_forget"](job="unknown", data=None)


def test_the_files_of_a_job_go_when_the_master_says_so(forked):
    """Also at a worker that has never had a part in it; nobody else's go with them."""
    fit(forked)
    names = ("unknown-g1", "unknown-g12", "unknown-x-g1", "other-g1")
    made = {name: segment.Segment.create(name, 8192) for name in names}
    try:
        forked.run(stop_unknown)
        assert all(one.path.exists() for one in made.values())
        forked.run(forget_unknown)
        assert [name for name, one in made.items() if one.path.exists()] == list(names[2:])
    finally:
        for one in made.values():
            one.close()
            segment.unlink(one.path)


def waits_to_make(gate: str) -> None:
    """The chief takes its time before it tells the others of anything."""
    real = meeting.initialise

    def initialise(*args: Any) -> None:
        while not os.path.exists(gate):
            threading.Event().wait(0.02)
        real(*args)

    replace(meeting, "initialise", initialise)


def hosts(dask_worker: Any) -> int:
    return len(worker_module.service_at(dask_worker.address).hosts)


def test_a_host_that_waits_for_an_answer_leaves_at_once(tmp_path):
    """Not when the answer comes: who should give it may be dead."""
    with processes(2, **{"dtrain.poll": "30s", "dtrain.stop-grace": "30s"}) as client:
        fit(client)
        with patched(client, waits_to_make, gate=str(tmp_path / "gate")):
            handle = endless(client)
            until(lambda: shared(handle), 30, "no file")
            until(lambda: list(client.run(hosts).values()) == [1, 1], 30, "not both are there")
            other = handle.status()["replicas"]["1"]
            handle.cancel()
            until(lambda: client.run(hosts)[other] == 0, 20, "it waits for the chief's answer")
            (tmp_path / "gate").touch()
            assert handle.wait(timeout=30) == "CANCELLED"
            gone(handle)


@pytest.mark.parametrize("transport", ["auto", "comm"])
def test_a_job_that_is_cancelled_at_once_ends_at_once(transport):
    """Also where a worker is told to stop before it was told to begin."""
    with processes(2, **{"dtrain.transport": transport, "dtrain.stop-grace": "30s"}) as client:
        for _ in range(10):
            handle = endless(client)
            handle.cancel()
            assert handle.wait(timeout=4) == "CANCELLED"
            gone(handle)


def test_a_worker_that_is_stopped_for_a_while_changes_nothing(forked):
    """At any moment, for less than its lease: the others wait, and the bits are the same."""
    base = bits(long(forked).result(timeout=30))
    dice = random.Random(11)
    handle = long(forked)
    when = sorted(dice.randrange(1, 4900) for _ in range(8))
    where = handle.status()["replicas"]
    pids = forked.run(os.getpid)
    for moment in when:
        file = reaches(handle, moment)
        mine, others = (psutil.Process(pids[where[i]]) for i in dice.sample("01", 2))
        mine.suspend()
        try:
            until(lambda mine=mine: mine.status() == psutil.STATUS_STOPPED, 20, "not stopped")
            # The other one goes to sleep a few times: over nothing, or over its heartbeats.
            seen, naps = version(file), dice.randrange(12)
            before, end = others.num_ctx_switches().voluntary, time.monotonic() + 1
            while others.num_ctx_switches().voluntary < before + naps and time.monotonic() < end:
                threading.Event().wait(0.01)
            assert version(file) <= seen + 1, "a step has committed without it"
        finally:
            mine.resume()
    assert bits(handle.result(timeout=30)) == base
    assert handle.status()["generation"] == 1
    gone(handle)


@pytest.mark.parametrize("stuck", [False, True])
def test_a_cluster_that_closes_in_mid_job(stuck, tmp_path):
    """Nothing is left, also where user code does not return."""
    with processes(2) as client:
        model = Gated(tmp_path / "never") if stuck else Linear(7)
        handle = endless(client, model, MARKED, replicas=2)
        if stuck:
            until(lambda: shared(handle), 30, "no file")
            until(
                lambda: "replica 1 on worker" in handle.why_waiting(),
                10,
                "replica 1 is not waited for",
            )
        else:
            reaches(handle, 20)
        assert files(handle)
    gone(handle)


def test_a_worker_that_closes_while_all_are_in_user_code(tmp_path):
    """No thread of the job is left to tidy up; its worker's closing does."""
    marked = np.abs(X)
    marked[:, 0] = -1
    with processes(2) as client:
        handle = endless(client, Gated(tmp_path / "never"), marked, replicas=2)
        for replica in ("replica 0", "replica 1"):
            named = f"{replica} on worker"
            until(lambda n=named: n in handle.why_waiting(), 30, f"{replica} is not waited for")
        assert files(handle)
    gone(handle)


# -- the sweep ---------------------------------------------------------------------------------


def waits_for(gate: str) -> None:
    """Whoever looks for the chief's file does so late."""
    real = meeting.find

    def find(described: Any) -> Any:
        while not os.path.exists(gate):
            threading.Event().wait(0.02)
        return real(described)

    replace(meeting, "find", find)


def test_a_sweep_leaves_the_file_of_a_job_that_takes_long_to_get_ready(forked, tmp_path):
    gate = tmp_path / "gate"
    with patched(forked, waits_for, gate=str(gate)):
        handle = endless(forked)
        until(lambda: shared(handle), 30, "no file")
        file = shared(handle)
        assert file is not None
        until(lambda: file.with_name(f"{file.name}.held").exists(), 20, "nobody holds it")
        os.utime(file.with_name(f"{file.name}.held"), (1, 1))
        assert segment.sweep_all() == []
        gate.touch()
        reaches(handle, 3)
        assert segment.sweep_all() == []
        stop(handle)
    gone(handle)


def test_the_worker_service_sweeps_when_it_opens(monkeypatch):
    """Off the event loop: a directory may be slow."""
    made = segment.Segment.create("abandoned", 8192)
    made.close()
    os.utime(made.path.with_name(f"{made.path.name}.held"), (1, 1))
    real, threads = segment.sweep_all, []

    def sweep_all(spare: segment.Spare) -> list[str]:
        threads.append(threading.current_thread().name)
        return real(spare)

    monkeypatch.setattr(worker_module, "sweep_all", sweep_all)
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        fit(client)
        loop = client.run(lambda: threading.current_thread().name)
        assert len(threads) == 2
        assert not set(threads) & set(loop.values())
        assert not made.path.exists()


def no_link(host: Any) -> None:
    raise OSError("the file has gone")


def never_opens() -> None:
    from dtrain.runtime import preparation

    replace(preparation, "open_link", no_link)


def test_a_host_with_shards_alone_needs_no_file_once_all_have_opened(forked):
    """The others may be through, and have removed it, before it looks."""
    other = [a for a in forked.run(os.getpid) if a != _chief(forked)]
    with patched(forked, never_opens, *other):
        assert fit(forked, replicas=1, shards=2, steps=1).version == 1


def _chief(client: Client) -> str:
    handle = endless(client)
    found: str = handle.status()["replicas"]["0"]
    stop(handle)
    gone(handle)
    return found


# -- asynchronous ------------------------------------------------------------------------------


@pytest.mark.parametrize(("replicas", "shards"), [(1, 2), (2, 1), (2, 3), (5, 2)])
def test_the_ledger_is_exact(forked, replicas, shards):
    with patched(forked, note_joins):
        result = fit(
            forked, mode=dtrain.Async(), replicas=replicas, shards=shards, epochs=20, batch_size=7
        )
        assert list(forked.run(used).values()) == [1, 1]
    ledger = result.ledger
    batches = sum(
        -(-(101 * (i + 1) // replicas - 101 * i // replicas) // 7) for i in range(replicas)
    )
    assert ledger.applied == result.version == 20 * batches
    assert (ledger.late, ledger.rejected, ledger.replayed, ledger.duplicates) == (0, 0, 0, 0)
    assert ledger.samples == [101] * 20
    assert sum(ledger.staleness.values()) == ledger.applied


class Uniform:
    """Every update adds one to every parameter: within a shard they are all equal, or torn."""

    size = 600_000
    shards = 3

    def init(self, rng):
        return {"w": np.zeros(self.size, np.float32)}

    def ranges(self):
        plan = partition(Layout.of(self.init(None)), self.shards)
        assert len(plan.shards) == self.shards
        for shard in plan.shards:
            (found,) = shard.ranges
            yield found.start // 4, min(found.stop // 4, self.size)

    def loss_and_grads(self, params, batch, *, out=None, rng=None):
        for start, stop in self.ranges():
            part = params["w"][start:stop]
            low, high = part.min(), part.max()
            if low != high or low != round(float(low)):
                raise ArithmeticError(f"torn: {low} and {high} in one shard")
        out["w"][...] = -1
        return 0.5, out

    def predict(self, params, x):
        return np.zeros(len(x), np.float32)


def test_a_pull_never_tears_a_shard(forked):
    """Two replicas push as fast as they can; and every one of their updates is there in the end."""
    result = dtrain.fit(
        Uniform(), X, Y, mode=dtrain.Async(), replicas=2, shards=Uniform.shards, batch_size=1,
        steps=400, optimizer=dtrain.optim.sgd(1.0), client=forked, progress=False,
    )  # fmt: skip
    assert result.version == result.ledger.applied == 400
    assert set(result.params["w"]) == {400.0}
    assert max(result.ledger.staleness) > 0, "two replicas never overlapped"


class Slow(Linear):
    """In one process it takes its time; each process counts its batches in a file of its own."""

    def __init__(self, folder: Path, slow: int) -> None:
        super().__init__(7)
        self.folder, self.slow = folder, slow

    def loss_and_grads(self, params, batch, *, out=None, rng=None):
        with (self.folder / str(os.getpid())).open("a") as file:
            file.write(".")
        if os.getpid() == self.slow:
            threading.Event().wait(0.03)
        return super().loss_and_grads(params, batch, out=out, rng=rng)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_replica_does_not_slow_the_other(forked, tmp_path, slow):
    """The fast one goes on, and takes over what is left of the slow one's part."""
    pids = list(forked.run(os.getpid).values())
    result = dtrain.fit(
        Slow(tmp_path, pids[slow]), X, Y, mode=dtrain.Async(), replicas=2, batch_size=1,
        epochs=1, client=forked, progress=False,
    )  # fmt: skip
    counts = [(tmp_path / str(pid)).stat().st_size for pid in pids]
    assert sum(counts) == result.ledger.applied == 101
    assert counts[1 - slow] > 80, counts
    assert result.ledger.samples == [101]
