"""The first law: the scheduler decides; it carries nothing, and no step asks it anything."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import dtrain
from dtrain.models import MLP
from tests.conftest import until

#: What Dask's workers and clients say by the clock, however many steps there are, and what
#: this test itself asks.
BY_THE_CLOCK = {
    "heartbeat_worker",
    "heartbeat-client",
    "identity",
    "set_metadata",
    "dtrain_status",
}


class Counting(dict):
    """A table of handlers that counts which are looked up."""

    def __init__(self, table: dict) -> None:
        super().__init__(table)
        self.seen: Counter[str] = Counter()

    def __getitem__(self, op):
        self.seen[op] += 1
        return super().__getitem__(op)


@pytest.mark.cluster
@pytest.mark.parametrize("mode", [dtrain.Sync(), dtrain.Async()])
def test_steady_state_sends_the_scheduler_nothing(digits, forked, mode):
    """Hundreds of steps, and not one message beside those that go by the clock."""
    # Long epochs (22,450 steps and more, seconds): what a worker tells of its steps, it tells
    # every half second.
    X, y = np.tile(digits[0], (50, 1)), np.tile(digits[1], 50)
    scheduler = forked.cluster.scheduler
    handle = dtrain.submit(
        MLP([64, 32, 10]), X, y, batch_size=2, epochs=1000, mode=mode, client=forked
    )
    until(lambda: handle.status()["step"] > 20, 60, "the job has not begun its steps")
    rpc, stream = Counting(scheduler.handlers), Counting(scheduler.stream_handlers)
    plain = scheduler.handlers, scheduler.stream_handlers
    # The window lies within one epoch, or begins again.
    for _ in range(20):
        epoch, start = handle.status()["epoch"], handle.status()["step"]
        scheduler.handlers, scheduler.stream_handlers = rpc, stream
        rpc.seen.clear()
        stream.seen.clear()
        until(lambda start=start: handle.status()["step"] > start + 40, 60, "no steps")
        seen = rpc.seen + stream.seen
        scheduler.handlers, scheduler.stream_handlers = plain
        if handle.status()["epoch"] == epoch:
            break
    else:
        pytest.fail("no window within one epoch")
    handle.cancel()
    assert handle.wait(timeout=20) == "CANCELLED"
    assert seen["dtrain_status"] > 0, "the counter counts nothing"
    extra = {op: n for op, n in seen.items() if op not in BY_THE_CLOCK}
    assert extra == {}


def count_bytes(dask_scheduler):
    """On the scheduler: count the bytes of every message that comes or goes, but heartbeats."""
    from distributed.comm import tcp

    dask_scheduler.counted = Counter()
    read, write = tcp.TCP.read, tcp.TCP.write

    def beat(msg):
        many = msg if isinstance(msg, list | tuple) else (msg,)
        ops = [m.get("op") for m in many if isinstance(m, dict)]
        return bool(ops) and all(op and "heartbeat" in op for op in ops)

    real_from_frames = tcp.from_frames
    last = Counter()

    async def from_frames(frames, *args, **kwargs):
        last["in"] = sum(len(memoryview(f).cast("B")) for f in frames)
        return await real_from_frames(frames, *args, **kwargs)

    async def counted_read(self, *args, **kwargs):
        msg = await read(self, *args, **kwargs)
        if not beat(msg):
            dask_scheduler.counted["in"] += last["in"]
        return msg

    async def counted_write(self, msg, *args, **kwargs):
        sent = await write(self, msg, *args, **kwargs)
        dask_scheduler.counted["out"] += sent
        return sent

    tcp.from_frames, tcp.TCP.read, tcp.TCP.write = from_frames, counted_read, counted_write


def counted(dask_scheduler):
    found = sum(dask_scheduler.counted.values())
    dask_scheduler.counted.clear()
    return found


@pytest.mark.cluster
def test_a_hundredfold_model_moves_the_same_bytes_through_the_scheduler(tmp_path):
    """Result and NumPy input included: both go straight between client and workers."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((4000, 50)).astype(np.float32)
    y = rng.integers(0, 5, 4000)
    small, big = MLP([50, 20, 5]), MLP([50, 2000, 5])
    size = {m: sum(p.size for p in m.init(rng).values()) for m in (small, big)}
    assert size[big] > 98 * size[small]

    def run(client, model, rows=4000):
        client.run_on_scheduler(counted)
        result = dtrain.fit(
            model, X[:rows], y[:rows], batch_size=50, steps=10, client=client, progress=False
        )
        assert result.version == 10
        return client.run_on_scheduler(counted)

    with own_scheduler(tmp_path) as client:
        client.run_on_scheduler(count_bytes)
        run(client, small)
        # The least of several: what the clients ask by the clock comes on top in some runs.
        moved = {model: min(run(client, model) for _ in range(6)) for model in (small, big)}
        assert moved[big] == pytest.approx(moved[small], rel=0.05)
        # Neither the parameters (0.4 MB) nor the rows (0.8 MB) can have been among them.
        assert moved[big] < size[big]
        # A quarter of the rows; the ten steps are within one epoch all the same.
        few = min(run(client, small, 1000) for _ in range(6))
        assert moved[small] == pytest.approx(few, rel=0.05)


class own_scheduler:
    """A scheduler in a process of its own and two workers, by hand; a client to it."""

    def __init__(self, folder) -> None:
        self._folder = folder

    def __enter__(self):
        import subprocess
        import sys

        from distributed import Client

        file = self._folder / "scheduler.json"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        cli = "from distributed.cli.dask_{0} import main; main()"
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", cli.format("scheduler"), "--host", "127.0.0.1", "--port",
                 "0", "--no-dashboard", "--scheduler-file", str(file)],
                **quiet,
            )
        ]  # fmt: skip
        until(file.exists, 60, "the scheduler has not started")
        self._processes += [
            subprocess.Popen(
                [sys.executable, "-c", cli.format("worker"), "--no-nanny", "--nthreads", "1",
                 "--no-dashboard", "--scheduler-file", str(file), "--local-directory",
                 str(self._folder)],
                **quiet,
            )
            for _ in range(2)
        ]  # fmt: skip
        self._client = Client(scheduler_file=str(file), set_as_default=False)
        self._client.wait_for_workers(2, timeout=30)
        return self._client

    def __exit__(self, *error):
        self._client.close()
        # The scheduler last: a worker that it tells to close while a signal does so waits for ever.
        for process in reversed(self._processes):
            process.terminate()
            process.wait(timeout=20)
