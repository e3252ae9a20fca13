"""Sessions of several processes: storms, deaths on the way, TLS."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator

import dask.config
import numpy as np
import pytest
from distributed import Client, LocalCluster, get_worker
from distributed.security import Security

import dtrain
from dtrain import FixedShards, Session, optim
from dtrain.models import MLP
from tests.conftest import until

from .conftest import processes
from .shared import Traced
from .test_queues import run, said
from .test_sessions import Others, hosted, like, opened

pytestmark = pytest.mark.cluster


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return request.node.name


@pytest.fixture(scope="module")
def three() -> Iterator[Client]:
    """Three worker processes of two threads each: four writers and readers, and shards."""
    with processes(3, threads=2) as client:
        yield client


# -- creation --------------------------------------------------------------------------------


def test_a_chief_that_dies_with_some_shards_placed_is_replaced(name, tmp_path):
    lease = 30.0
    with (
        processes(2, **{"dtrain.session-lease": lease}) as client,
        Session(name, client=client, timeout=60) as s,
    ):
        with Others(1, client.scheduler.address, name, tmp_path, 600.0, "placing") as others:
            until(lambda: (tmp_path / "placing").exists(), 40, "nobody places shards")
            until(lambda: any(name in of for of in hosted(client).values()), 40, "none is placed")
            others.processes[0].send_signal(signal.SIGKILL)
            began = time.monotonic()
            s.create(Traced(str(tmp_path)), optimizer=optim.sgd(1.0), partitioner=FixedShards(1))
            took = time.monotonic() - began
        assert took < lease
        assert len(list(tmp_path.glob("begun-*"))) == 2
        params = s.pull().params
        assert len({float(x) for p in params.values() for x in np.unique(p)}) == 1
        # Of what the first one has placed nothing is left.
        places = {entry["worker"] for entry in s.variables()}
        held = {worker for worker, names in hosted(client).items() if name in names}
        assert held == places
        s.reset()


# -- storms ----------------------------------------------------------------------------------

#: Writes and pulls that each makes at least, however busy the machine is.
LEAST = 6


def assigning(name: str, value: float, seconds: float) -> int:
    """Assign parameters that are all equal, as often as it goes."""
    count, end = 0, time.monotonic() + seconds
    with Session(name) as s:
        shapes = s.pull().params
        while time.monotonic() < end or count < LEAST:
            s.assign(like(shapes, value))
            value += 2
            count += 1
    return count


def pushing(name: str, seconds: float) -> int:
    """Push gradients that are all equal, as often as it goes."""
    count, end = 0, time.monotonic() + seconds
    with Session(name) as s:
        grads = like(s.pull().params, -2.0)
        while time.monotonic() < end or count < LEAST:
            s.push(grads, wait=count % 2 == 0)
            count += 1
    return count


def pulling(name: str, by_shard: bool, done: Callable[[int, int], bool]) -> tuple[int, int]:
    """Pull until it is done: how many, and how many different ones."""
    count, seen = 0, set()
    with Session(name) as s:
        places = s.variables()
        while not done(count, len(seen)):
            snap = s.pull()
            values: dict[int, set[float]] = {}
            for entry in places:
                part = snap.params[entry["name"]][slice(*entry["rows"])]
                key = entry["shard"] if by_shard else 0
                values.setdefault(key, set()).update((float(part.min()), float(part.max())))
            assert all(len(of) == 1 for of in values.values()), f"a mixture: {values}"
            seen.add(tuple(sorted((k, *of) for k, of in values.items())))
            count += 1
    return count, len(seen)


def pulling_for(name: str, by_shard: bool, seconds: float) -> tuple[int, int]:
    end = time.monotonic() + seconds

    def done(count: int, seen: int) -> bool:
        now = time.monotonic()
        return now > end + 20 or (now > end and count >= LEAST and seen > 3)

    return pulling(name, by_shard, done)


def storm(client: Client, name: str, tasks: list[tuple[Callable[..., int], tuple]], by_shard: bool):
    """How often each writer has written, and how often two readers have read, and seen."""
    with Session(name, client, timeout=30) as s:
        # So large that an update, and a copy, of a shard takes a while.
        s.create(MLP([512, 2048, 16]), optimizer=optim.sgd(0.5), partitioner=FixedShards(5))
        s.assign(like(s.pull().params, 0.0))
        assert len({entry["worker"] for entry in s.variables()}) == 3
        writers = [client.submit(task, name, *args, pure=False) for task, args in tasks]
        reader = client.submit(pulling_for, name, by_shard, 3.0, pure=False)
        own = pulling(name, by_shard, lambda *_: all(w.done() for w in writers))
        found = client.gather(writers), [own, reader.result(60)], s.pull().version
        s.reset()
    return found


def test_a_pull_under_a_storm_of_assigns_never_mixes_two(three, name):
    tasks = [(assigning, (1.0, 3.0)), (assigning, (2.0, 3.0))]
    written, read, version = storm(three, name, tasks, by_shard=False)
    assert version == 1 + sum(written)
    assert min(written) >= LEAST
    assert all(count >= LEAST and seen > 3 for count, seen in read)


def test_a_pull_under_a_storm_of_pushes_never_finds_a_shard_torn(three, name):
    written, read, version = storm(three, name, [(pushing, (3.0,))] * 3, by_shard=True)
    assert version == 1 + sum(written)
    assert min(written) >= LEAST
    assert all(count >= LEAST and seen > 3 for count, seen in read)


def test_nor_under_both_at_once(three, name):
    tasks = [(assigning, (1000.0, 3.0)), (pushing, (3.0,)), (pushing, (3.0,))]
    written, read, _ = storm(three, name, tasks, by_shard=True)
    assert min(written) >= LEAST
    assert all(count >= LEAST and seen > 3 for count, seen in read)


# -- queues and readers ----------------------------------------------------------------------

#: What it says comes after the put, and before the next get: what is done with has been said.
COLLECT = """
import threading
def collect(n):
    q = s.queue("experience")
    for i in range(60):
        q.put({"who": n, "i": i, "data": np.full(3000, i)})
        os.write(1, f"{n} {i}\\n".encode())
first = int(os.environ["FIRST"])
threads = [threading.Thread(target=collect, args=(first + k,)) for k in range(2)]
[t.start() for t in threads]
[t.join() for t in threads]
"""

TRAIN = """
import time
s.queue("begin").get()
for k, item in enumerate(s.queue("experience")):
    assert (item["data"] == item["i"]).all()
    os.write(1, f"{item['who']} {item['i']}\\n".encode())
    if k == int(os.environ["HOLD"]):
        time.sleep(600)
"""

READ = """
import time
s.queue("begin").get()
for k, batch in enumerate(s.reader("train")):
    os.write(1, (" ".join(str(int(v)) for v in batch[:, 0]) + "\\n").encode())
    if k == int(os.environ["HOLD"]):
        time.sleep(600)
"""

_NEVER = "-1"


def begin(s: Session, count: int) -> None:
    """Let so many processes begin, once they are all there."""
    gate = s.queue("begin", count)
    until(lambda: gate.stats()["waiting"] == count, 60, "not all have come")
    for _ in range(count):
        gate.put(None)


def pairs(words: str) -> list[tuple[int, int]]:
    return [(int(who), int(i)) for who, i in map(str.split, words.splitlines())]


def test_killed_collectors_and_trainers_lose_nothing_and_what_comes_twice_is_counted(
    three, name, monkeypatch
):
    """Eight collectors in four processes, two trainers; one process of each is killed."""
    with Session(name, three) as s:
        q = s.queue("experience", 8)
        s.queue("begin", 2)
        monkeypatch.setenv("HOLD", "30")
        held = run(three, TRAIN, name)
        monkeypatch.setenv("HOLD", _NEVER)
        trainers = [held, run(three, TRAIN, name)]
        begin(s, 2)
        collectors = []
        for first in range(0, 8, 2):
            monkeypatch.setenv("FIRST", str(first))
            collectors.append(run(three, COLLECT, name))
        try:
            until(lambda: q.stats()["put"] > 60, 60, "nothing is collected")
            collectors[0].kill()
            until(lambda: q.stats()["leased"] == 2 or q.stats()["put"] > 300, 60, "nobody trains")
            words = []
            put = [pairs(said(collector)) for collector in collectors]
            until(lambda: q.stats()["leased"] == 1 and not q.stats()["size"], 60, "not drained")
            held.kill()
            q.close()
            words = [pairs(said(trainer)) for trainer in trainers]
        finally:
            for process in (*trainers, *collectors):
                process.kill()
                process.communicate()
        stats = q.stats()
        s.reset()
    seen = Counter(item for of in words for item in of)
    said_put = Counter(item for of in put for item in of)
    assert said_put.keys() <= seen.keys(), "an item is lost"
    assert all(len(of) == 120 for of in put[1:])
    more = seen.keys() - said_put.keys()
    assert len(more) <= 2
    assert all(who in (0, 1) for who, _ in more), "only what was put in the moment of the death"
    assert len(words[0]) == 31
    twice = {item: count for item, count in seen.items() if count > 1}
    assert twice == {words[0][-1]: 2}, "only what somebody held who was killed comes twice"
    assert (stats["put"], stats["acknowledged"]) == (len(seen), len(seen))
    assert (stats["redelivered"], stats["got"], stats["lost"]) == (1, len(seen) + 1, 0)


@pytest.mark.parametrize("killed", [False, True])
def test_readers_in_processes_have_each_batch_once(three, name, monkeypatch, killed):
    rows = np.arange(600.0).reshape(200, 3)
    with Session(name, three) as s:
        r = s.reader("train", rows, batch_size=4, epochs=2)
        s.queue("begin", 3)
        readers: list[subprocess.Popen[str]] = []
        for number in range(3):
            monkeypatch.setenv("HOLD", "5" if killed and not number else _NEVER)
            readers.append(run(three, READ, name))
        try:
            begin(s, 3)
            if killed:
                until(lambda: r.stats()["acknowledged"] == 99, 60, "the others are not done")
                assert (r.stats()["leased"], r.stats()["drained"]) == (1, False)
                readers[0].kill()
            batches = [said(reader).splitlines() for reader in readers]
        finally:
            for reader in readers:
                reader.kill()
                reader.communicate()
        stats = r.stats()
        s.reset()
    seen = Counter(batch for of in batches for batch in of)
    assert [code.returncode for code in readers[1:]] == [0, 0]
    found = Counter(int(row) // 3 for batch, n in seen.items() for row in batch.split() * n)
    extra = Counter(int(row) // 3 for row in batches[0][-1].split()) if killed else Counter()
    assert found - extra == Counter(dict.fromkeys(range(200), 2))
    assert len(batches[0]) == 6 if killed else all(batches)
    assert (stats["acknowledged"], stats["redelivered"], stats["left"]) == (100, int(killed), 0)
    assert stats["got"] == 100 + killed


# -- TLS -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Two worker processes that take TLS alone; what they use is in Dask's configuration."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=dtrain",
    ]
    subprocess.run(
        [*command, "-subj", "/CN=dtrain", "-keyout", key, "-out", cert],
        check=True,
        capture_output=True,
    )
    keys = {"ca-file": cert}
    for role in ("client", "scheduler", "worker"):
        keys |= {f"{role}.cert": cert, f"{role}.key": key}
    roles = {f"tls_{name.replace('.', '_').replace('-', '_')}": of for name, of in keys.items()}
    security = Security(**roles, require_encryption=True)
    with (
        dask.config.set({f"distributed.comm.tls.{key}": value for key, value in keys.items()}),
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            protocol="tls://",
            security=security,
            dashboard_address=None,
            silence_logs=50,
        ) as cluster,
        Client(cluster, security=security) as client,
    ):
        yield client


def put_and_push(name: str, rows: int) -> str:
    """On a worker: an item of so many rows, and a gradient."""
    with Session(name) as s:
        q = s.queue("items")
        for near in (True, False):  # through memory, and over the network
            q._near = near
            q.put({"n": rows, "data": np.full((rows, 1024), rows, np.float32)})
        s.push(like(s.pull().params, -2.0))
    return get_worker().address


def get_all(name: str, count: int) -> list[int]:
    found = []
    with Session(name) as s:
        q = s.queue("items")
        for near in [True, False] * (count // 2):
            q._near = near
            item = q.get(timeout=30)
            assert item["data"].shape == (item["n"], 1024)
            assert (item["data"] == item["n"]).all()
            found.append(item["n"])
        q.done()
    return found


def test_a_session_of_a_tls_cluster(secured, name):
    assert secured.scheduler.address.startswith("tls://")
    first, second = secured.scheduler_info(-1)["workers"]
    with Session(name, secured, timeout=30) as s:
        s.create(MLP([6, 3]), optimizer=optim.sgd(0.5), partitioner=FixedShards(2))
        s.assign(like(s.pull().params, 0.0))
        s.queue("items", 16)
        for worker, rows in ((first, 1), (second, 64), (first, 2048)):
            put = secured.submit(put_and_push, name, rows, workers=[worker], pure=False)
            assert put.result(60) == worker
        got = secured.submit(get_all, name, 6, workers=[second], pure=False).result(60)
        assert got == [1, 1, 64, 64, 2048, 2048]
        assert {float(x) for p in s.pull().params.values() for x in np.unique(p)} == {3.0}
        x = np.ones((8, 6), np.float32)
        s.step([(x, np.zeros(8, int))] * 2)
        r = s.reader("rows", np.arange(40.0), batch_size=10)
        assert sorted(v for batch in r for v in batch) == list(range(40))
        # By its address alone, with what Dask's configuration has.
        with Session(name, secured.scheduler.address, timeout=30) as other:
            assert other.pull().version == s.pull().version == 5
        s.reset()


def test_by_an_address_alone_another_process_has_it_all(three, name):
    with opened(three, name) as s:
        s.queue("words", 4)
        code = """
snap = s.pull(); s.push({n: np.ones_like(p) for n, p in snap.params.items()})
s.queue("words").put(snap.version); s.step([(np.ones((4, 6), "f4"), np.zeros(4, int))])
print(s.pull().version)
"""
        assert said(run(three, code, name)) == "2"
        assert s.queue("words").get() == 0
        with pytest.raises(dtrain.ClusterError, match="no scheduler answers there"):
            Session(name, "tcp://127.0.0.1:9")
