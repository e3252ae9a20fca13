"""The input file: what is in it, how it gets to the machines, who finds it, who removes it."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import dask.array as da
import dask.config
import numpy as np
import pytest
from distributed import Client, LocalCluster

import dtrain
from dtrain.cluster import install
from dtrain.errors import (
    ClusterError,
    ClusterWarning,
    DataError,
    DeadlineError,
    ProtocolError,
    StorageError,
)
from dtrain.inputs import Inputs, prepare
from dtrain.job import Job
from dtrain.models import Linear
from dtrain.runtime import inputfile
from dtrain.runtime.data import DataPlan, read_blob
from dtrain.runtime.inputfile import PAGE, Contents, FileRef, InputFiles, array_at
from dtrain.runtime.rows import ArrayRef, Rows
from dtrain.runtime.rpc import answering
from dtrain.runtime.transport import segment
from dtrain.runtime.worker import service_at
from tests.conftest import until

from .conftest import processes

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")

OURS = f"dtrain-{os.getuid()}"

RNG = np.random.default_rng(5)
X = RNG.standard_normal((300, 5)).astype(np.float32)
Y = RNG.standard_normal(300)
VALID = (X[:40] * 2, Y[:40] * 2)
BLOBS = {"initial": {"w": X[:5].copy(), "scale": np.array(3.5), "none": np.empty((0, 4))}}

ARRAYS = {
    "plain": X,
    "transposed": X.T,
    "strided": X[::3, 1:4],
    "fortran": np.asfortranarray(X),
    "swapped": X.astype(">f8"),
    "bools": X > 0,
    "words": np.array(["no", "yes", "perhaps"]),
    "scalar": np.array(7.5),
    "empty": np.empty((0, 3), np.float32),
    "wide": RNG.standard_normal((2, 9000)),
}


# -- what is in it -----------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [1, 100, 4096, inputfile.PIECE])
def test_all_bytes_are_in_the_pieces_once(monkeypatch, piece):
    monkeypatch.setattr(inputfile, "PIECE", piece)
    arrays = ARRAYS if piece > 1 else {"words": ARRAYS["words"], "scalar": ARRAYS["scalar"]}
    contents = Contents()
    offsets = {name: contents.add(array) for name, array in arrays.items()}
    file = contents.file()
    memory, written = np.zeros(file.nbytes, np.uint8), np.zeros(file.nbytes, int)
    for start, some in contents.pieces():
        assert some.dtype == np.uint8
        assert some.flags.c_contiguous
        assert 0 < len(some) <= piece
        memory[start : start + len(some)] = some
        written[start : start + len(some)] += 1
    assert written.max() == 1
    assert written.sum() == sum(array.nbytes for array in arrays.values())
    assert not written[: segment.TOKEN].any()
    for name, array in arrays.items():
        assert offsets[name] % PAGE == 0
        found = array_at(memory, offsets[name], array.shape, array.dtype.str)
        assert found.dtype == array.dtype
        assert found.shape == array.shape
        assert found.tobytes() == np.ascontiguousarray(array).tobytes()


def test_nothing_needs_no_file():
    assert Contents().file() is None


def test_objects_are_refused():
    """What lies in the file would be addresses in another process."""
    with pytest.raises(DataError, match="dtype object"):
        Contents().add(np.array([{}, None]))


def test_names_and_proofs_differ():
    contents = Contents()
    contents.add(X)
    one, two = contents.file(), contents.file()
    assert one.name != two.name
    assert one.token != two.token
    assert len(one.token) == segment.TOKEN - 16


# -- at one worker -----------------------------------------------------------------------------


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Stand for /dev/shm and for the temporary directory."""
    found = tmp_path / "memory", tmp_path / "disk"
    for root in found:
        root.mkdir()
    monkeypatch.setattr(segment, "_roots", lambda: list(found))
    return found


def here() -> InputFiles:
    return InputFiles("tcp://here:1", lambda: "tcp://127.0.0.1:1")


def contents_of(*arrays: np.ndarray) -> tuple[FileRef, Contents]:
    contents = Contents()
    for array in arrays:
        contents.add(array)
    return contents.file(), contents


def send(files: InputFiles, *arrays: np.ndarray) -> FileRef:
    """An upload without a network."""
    ref, contents = contents_of(*arrays)
    send_as(files, ref, contents)
    return ref


def send_as(files: InputFiles, ref: FileRef, contents: Contents) -> None:
    files.begin(ref)
    for start, some in contents.pieces():
        files.write(ref.name, start, some)
    files.end(ref)


def files_in(root: Path | str) -> list[str]:
    place = Path(root) / OURS
    return sorted(os.listdir(place)) if place.exists() else []


def both(name: str) -> list[str]:
    return [name, f"{name}.held"]


def test_what_has_been_sent_is_mapped_read_only(roots):
    files = here()
    ref = send(files, X, Y)
    memory = files.open(ref)
    assert (array_at(memory, PAGE, X.shape, X.dtype.str) == X).all()
    assert not memory.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        memory[PAGE] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        memory.flags.writeable = True
    # The temporary directory comes first: its pages can be put aside.
    path = roots[1] / OURS / ref.name
    for file, mode in ((path, 0o600), (path.with_name(f"{path.name}.held"), 0o600)):
        assert stat.S_IMODE(file.lstat().st_mode) == mode
    assert stat.S_IMODE(path.parent.lstat().st_mode) == 0o700
    assert path.stat().st_size == ref.nbytes
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert [line.split()[1] for line in maps if line.endswith(str(path))] == ["r--s"]
    files.forget(ref.name)


def test_nobody_finds_it_before_it_is_complete(roots):
    files, other = here(), here()
    ref, contents = contents_of(X)
    files.begin(ref)
    for start, some in contents.pieces():
        assert other.open(ref) is None
        files.write(ref.name, start, some)
    assert other.open(ref) is files.open(ref) is None
    files.end(ref)
    assert other.open(ref).tobytes() == files.open(ref).tobytes()
    other.close()
    files.forget(ref.name)


def no_space(*roots: Path) -> Callable[..., None]:
    """Replaces posix_fallocate: what is reserved under these roots finds the device full."""
    real = os.posix_fallocate

    def reserve(handle: int, offset: int, size: int) -> None:
        file = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if any(file.is_relative_to(root) for root in roots):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle, offset, size)

    return reserve


def test_a_full_disk_and_it_lies_in_memory_and_then_it_is_an_error(roots, monkeypatch):
    files = here()
    monkeypatch.setattr(os, "posix_fallocate", no_space(roots[1]))
    ref = send(files, X)
    assert (roots[0] / OURS / ref.name).exists()
    files.forget(ref.name)
    monkeypatch.setattr(os, "posix_fallocate", no_space(*roots))
    with pytest.raises(StorageError, match=r"a file of 0 MB has no place: .*disk: No space left"):
        send(files, X)
    assert [os.listdir(root) for root in roots] == [[], []]


def test_anything_else_is_not_taken_for_it(roots, monkeypatch):
    files = here()
    ref = send(files, X)
    files.close()
    wrong = [
        FileRef(ref.name, ref.nbytes, bytes(16)),
        FileRef(ref.name, ref.nbytes + PAGE, ref.token),
        FileRef(ref.name + "0", ref.nbytes, ref.token),
        FileRef(f"../{OURS}/{ref.name}x", ref.nbytes, ref.token),
    ]
    assert [files.open(one) for one in wrong] == [None] * 4
    with monkeypatch.context() as patch:
        patch.setattr(segment, "machine", lambda: bytes(15) + b"?")
        assert files.open(ref) is None, "another machine's, on a shared disk"
    assert files.open(ref) is not None
    files.forget(ref.name)


def test_to_forget_removes_it_and_once_more_is_harmless(roots):
    files, other = here(), here()
    ref, second = send(files, X), send(files, Y)
    view = array_at(files.open(ref), PAGE, X.shape, X.dtype.str)
    assert other.open(ref) is not None
    for _ in range(2):
        files.forget(ref.name)
    assert files.open(ref) is None
    assert sorted(os.listdir(roots[1] / OURS)) == [second.name, f"{second.name}.held"]
    assert (view == X).all(), "whoever reads it yet may do so"
    other.forget(ref.name)
    assert other.open(ref) is None
    files.forget(second.name)
    assert os.listdir(roots[1]) == []


@pytest.mark.parametrize("name", ["", ".", "..", "../outside", "/etc/x", "a/b", "*", "nul\0"])
def test_to_forget_reaches_nowhere_else(roots, name):
    files = here()
    ref = send(files, X)
    outside = roots[1] / "outside"
    outside.write_text("")
    files.forget(name)
    assert outside.exists()
    assert files.open(ref) is not None
    assert (roots[1] / OURS / ref.name).exists()
    files.forget(ref.name)


def test_machines_that_share_a_disk_have_a_file_each(roots, tmp_path, monkeypatch):
    """Each sees the other's, and neither takes it for its own or spoils it."""
    near, far = here(), here()
    ref, contents = contents_of(X)
    send_as(near, ref, contents)
    near.close()
    with monkeypatch.context() as patch:
        (tmp_path / "far").mkdir()
        patch.setattr(segment, "_roots", lambda: [tmp_path / "far", roots[1]])
        patch.setattr(segment, "machine", lambda: bytes(15) + b"?")
        assert far.open(ref) is None
        send_as(far, ref, contents)
        assert far.open(ref) is not None
        assert files_in(tmp_path / "far") == files_in(roots[1]) == both(ref.name)
    assert near.open(ref) is not None
    near.forget(ref.name)
    far.forget(ref.name)


def age(path: Path) -> None:
    os.utime(path.with_name(f"{path.name}.held"), (1, 1))


def test_it_is_held_until_the_worker_closes_and_outlives_it(roots):
    files, other = here(), here()
    ref = send(files, X)
    path = roots[1] / OURS / ref.name
    arriving, _ = contents_of(Y)
    files.begin(arriving)
    age(path)
    assert segment.sweep_all(lambda name, owner: False) == []
    files.close()
    assert os.listdir(path.parent) == [path.name, f"{path.name}.held"] or path.exists()
    assert not (path.parent / arriving.name).exists(), "half a file is nobody's"
    assert other.open(ref) is not None, "found again by those who come after"
    assert segment.sweep_all(lambda name, owner: False) == [], "and held"
    other.close()
    # It was young again when it was opened: its holder may die before its job is known.
    assert segment.sweep_all(lambda name, owner: False) == []
    age(path)
    assert segment.sweep_all(lambda name, owner: owner == "tcp://127.0.0.1:1") == []
    assert segment.sweep_all(lambda name, owner: False) == [ref.name]


def test_pieces_of_nothing_are_refused(roots):
    files = here()
    ref, _ = contents_of(X)
    with pytest.raises(ProtocolError, match="before its beginning"):
        files.write(ref.name, PAGE, np.zeros(3, np.uint8))
    with pytest.raises(ProtocolError, match="before its beginning"):
        files.end(ref)
    # An upload that begins anew takes the place of the one before.
    files.begin(ref)
    files.begin(ref)
    files.end(ref)
    assert files.open(ref) is not None
    files.forget(ref.name)
    assert os.listdir(roots[1]) == []


def test_no_handle_is_left(roots):
    before = len(os.listdir("/proc/self/fd"))
    files = here()
    first, second = send(files, X), send(files, Y)
    files.forget(first.name)
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before
    files.forget(second.name)


# -- to the workers and back -------------------------------------------------------------------


def ready(client: Client) -> list[str]:
    return [address for address, _ in install(client)["ready"]]


@contextmanager
def delivered(client: Client, x: Any = X, y: Any = Y, **arguments: Any) -> Iterator[Inputs]:
    """Inputs as submit has them; they are taken back."""
    inputs = prepare(Job(Linear(5), x, y, validation_data=VALID), client, ready(client), 2,
                     blobs=BLOBS, **arguments)  # fmt: skip
    try:
        yield inputs
    finally:
        inputs.discard()


def whole(ref: ArrayRef, plan: DataPlan, dask_worker: Any) -> np.ndarray:
    """In a thread of a worker: all rows of an array."""
    rows = Rows(ref, service_at(dask_worker.address), 10.0, holders=plan.holders)
    rows.open([(0, ref.rows)])
    out, every = rows.buffer(ref.rows), np.arange(ref.rows)[::-1]
    rows.take(every, out, rows.request(every))
    return out[::-1]


async def read(plan: DataPlan, dask_worker: Any) -> Any:
    """In a worker: every array of the plan and every blob; and whether x was mapped."""

    def look() -> Any:
        service = service_at(dask_worker.address)
        arrays = [whole(ref, plan, dask_worker) for ref in plan.arrays]
        return arrays, read_blob(plan, "initial", service, 10.0), service.input(plan.x.file)

    arrays, blobs, mapped = await asyncio.to_thread(look)
    return arrays, blobs, mapped is not None


def check(found: Any) -> bool:
    """That it is all there, to the bit; returns whether the file was mapped."""
    arrays, blobs, mapped = found
    for array, expected in zip(arrays, [X, Y, *VALID], strict=True):
        assert array.dtype == expected.dtype
        assert array.tobytes() == expected.tobytes()
    for name, expected in BLOBS["initial"].items():
        assert blobs[name].shape == expected.shape
        assert blobs[name].tobytes() == expected.tobytes()
    return bool(mapped)


def read_all(client: Client, plan: DataPlan, *workers: str) -> list[bool]:
    found = client.run(read, plan, workers=list(workers) or None)
    return [check(one) for one in found.values()]


@pytest.fixture(autouse=True, scope="module")
def own_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A temporary directory that no other program uses; worker processes inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("disk"))
        patch.setattr(tempfile, "tempdir", folder)
        patch.setenv("TMPDIR", folder)
        yield


@pytest.mark.parametrize("cluster", ["threaded", "forked"])
def test_one_file_that_the_client_writes(threaded, forked, cluster):
    client = {"threaded": threaded, "forked": forked}[cluster]
    ready(client)
    begun = client.run(uploads)
    with delivered(client) as inputs:
        assert files_in(tempfile.gettempdir()) == both(inputs.file)
        assert not (Path("/dev/shm") / OURS / inputs.file).exists()
        assert inputs.plan.holders == tuple(ready(client))
        assert all(ref.keys == () and ref.starts == (0, ref.rows) for ref in inputs.plan.arrays)
        assert read_all(client, inputs.plan) == [True, True]
        assert client.run(uploads) == begun
        assert inputs.held == []
        assert read_blob(inputs.plan, "other", None, 1.0) is None
    assert files_in(tempfile.gettempdir()) == []
    inputs.discard()


async def uploads(dask_worker: Any) -> int:
    """In a worker: how many pieces have been sent to it."""
    service = service_at(dask_worker.address)
    real = dask_worker.handlers["dtrain_write_input"]
    if not hasattr(service, "pieces"):
        service.pieces = 0

        async def write(**message: Any) -> Any:
            service.pieces += 1
            return await real(**message)

        dask_worker.handlers["dtrain_write_input"] = write
    return service.pieces


def test_only_what_is_not_of_dask_is_in_it(threaded):
    dX, dy = da.from_array(X, chunks=100), da.from_array(Y, chunks=90)
    with delivered(threaded, dX, dy) as inputs:
        assert len(inputs.plan.x.keys) == 3
        assert inputs.plan.x.file is None
        assert inputs.plan.valid_x.file.name == inputs.file
    job = Job(Linear(5), dX, dy)
    none = prepare(job, threaded, ready(threaded), 2, blobs={"initial": {}})
    assert (none.file, none.plan.holders) == (None, ())
    assert none.plan.blobs == {"initial": {}}
    none.discard()


@pytest.mark.cluster
def test_a_client_elsewhere_sends_it_to_one_worker(forked, roots):
    """It has other directories than the workers; all of them are on one machine."""
    ready(forked)
    begun = sum(forked.run(uploads).values())
    with delivered(forked, x=np.asfortranarray(X)) as inputs:
        assert files_in(tempfile.gettempdir()) == both(inputs.file)
        assert [files_in(root) for root in roots] == [[], []], "its own is of no use"
        assert read_all(forked, inputs.plan) == [True, True]
        # x, y, two to validate on, two blobs that are not empty.
        assert sum(forked.run(uploads).values()) - begun == 6
        assert sorted(n > 0 for n in forked.run(uploads).values()) == [False, True]
    assert files_in(tempfile.gettempdir()) == []
    assert [files_in(root) for root in roots] == [[], []]


@pytest.mark.cluster
def test_a_client_that_reaches_no_worker_sends_it_through_the_scheduler(forked, roots, monkeypatch):
    real = inputfile.ask

    async def ask(peer: Any, op: str, deadline: float, **message: Any) -> Any:
        raise OSError("no route to it")

    monkeypatch.setattr(inputfile, "ask", ask)
    monkeypatch.setattr(inputfile, "PIECE", 1000)
    with pytest.warns(ClusterWarning, match="no route to it.*through the scheduler") as told:
        inputs = prepare(Job(Linear(5), X, Y, validation_data=VALID), forked, ready(forked), 2,
                         blobs=BLOBS)  # fmt: skip
    assert len(told) == 1
    monkeypatch.setattr(inputfile, "ask", real)
    assert read_all(forked, inputs.plan) == [True, True]
    inputs.discard()
    assert files_in(tempfile.gettempdir()) == []


def live_at(root: str, dask_worker: Any) -> None:
    """In a worker: be on a machine of its own, as far as files go."""
    Path(root).mkdir(exist_ok=True)
    segment._roots = lambda: [Path(root)]
    service_at(dask_worker.address).files.close()


def full() -> None:
    """In a worker: there is no room at all."""

    def reserve(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.posix_fallocate = reserve


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[tuple[Client, list[str], Path]]:
    """Two worker processes on two machines, the first on the client's; and the second's place."""
    with processes(2) as client:
        addresses = ready(client)
        client.run(live_at, str(tmp_path / "far"), workers=addresses[1:])
        yield client, addresses, tmp_path / "far"


@pytest.mark.cluster
def test_two_machines_have_a_file_each(apart):
    client, addresses, far = apart
    with delivered(client) as inputs:
        assert files_in(tempfile.gettempdir()) == files_in(far) == both(inputs.file)
        assert read_all(client, inputs.plan) == [True, True]
        assert inputs.plan.holders == tuple(addresses)
    assert files_in(tempfile.gettempdir()) == files_in(far) == []


@pytest.mark.cluster
def test_a_machine_without_the_file_asks_the_others(apart, tmp_path):
    client, (near, other), far = apart
    with delivered(client) as inputs:
        # A worker that has joined later: it has another place, and knows no holder but by name.
        client.run(live_at, str(tmp_path / "later"), workers=[other])
        assert read_all(client, inputs.plan, other) == [False]
        assert files_in(tmp_path / "later") == []
        # The one that has it is started anew, at another address, and finds the file by name.
        restart(client, near)
        assert read_all(client, inputs.plan, other) == [False]
        assert sorted(read_all(client, inputs.plan)) == [False, True]
        # Now it is nowhere, also not at the one that was started anew.
        inputs.discard()
        with pytest.raises(DataError, match=r"no worker gives its rows; it was at") as caught:
            read_all(client, inputs.plan, other)
        assert near in str(caught.value)
        segment.unlink(far / OURS / inputs.file)


def pids(client: Client) -> dict[str, int]:
    found: dict[str, int] = client.run(os.getpid)
    return found


def restart(client: Client, *workers: str) -> list[str]:
    """Kill worker processes and wait for those that take their places; returns their addresses."""
    before = pids(client)
    for worker in workers:
        os.kill(before[worker], signal.SIGKILL)
    until(
        lambda: len(set(client.scheduler_info(-1)["workers"]) - set(workers)) == len(before),
        60,
        "the workers do not come back",
    )
    return [worker for worker in ready(client) if worker not in before]


@pytest.mark.cluster
def test_the_file_survives_all_its_workers():
    """The restarted ones find it by its name, and map it themselves."""
    with processes(2) as client:
        with delivered(client) as inputs:
            fresh = restart(client, *ready(client))
            assert len(fresh) == 2
            assert not set(fresh) & set(inputs.plan.holders)
            assert files_in(tempfile.gettempdir()) == both(inputs.file)
            assert read_all(client, inputs.plan) == [True, True]
        assert client.run(mapped) == dict.fromkeys(fresh, 0)
        assert files_in(tempfile.gettempdir()) == []


def test_workers_that_close_let_go_of_it_and_leave_it():
    """They share this process: what they had open would stay open in it."""
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        inputs = prepare(Job(Linear(5), X, Y), client, ready(client), 2)
        assert holders_of(inputs.file) == 4, "a mapping and a lock for each"
        client.run(close_service)
        assert holders_of(inputs.file) == 0
        assert files_in(tempfile.gettempdir()) == both(inputs.file)
        inputs.discard()


def holders_of(name: str) -> int:
    """How many handles of this process are of that file, or of its lock."""
    count = 0
    for handle in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            count += name in os.readlink(f"/proc/self/fd/{handle}")
    return count


@pytest.mark.cluster
def test_it_goes_when_the_scheduler_has_gone():
    """Workers that close then are the last to know of it; else they leave it where it is."""
    with processes(2) as client:
        inputs = prepare(Job(Linear(5), X, Y), client, ready(client), 2)
        client.run(close_service, workers=[ready(client)[0]])
        assert files_in(tempfile.gettempdir()) == both(inputs.file)
        client.run(close_service, "tcp://127.0.0.1:1", workers=[ready(client)[1]])
        assert files_in(tempfile.gettempdir()) == []


async def close_service(scheduler: str | None = None, dask_worker: Any = None) -> None:
    """In a worker: leave, maybe with a scheduler that does not answer."""
    service = service_at(dask_worker.address)
    if scheduler is not None:
        service._scheduler_address = lambda: scheduler
    await service.close()


# -- in a job ----------------------------------------------------------------------------------


def fit(client: Client, **changes: Any) -> Any:
    arguments = {"validation_data": VALID, "batch_size": 16, "epochs": 2, "replicas": 2}
    return dtrain.fit(Linear(5), X, Y, client=client, progress=False, **(arguments | changes))


def bits(result: Any) -> Any:
    params = {name: value.tobytes() for name, value in result.params.items()}
    return params, [epoch["val_loss"] for epoch in result.history]


async def asked(dask_worker: Any) -> int:
    """In a worker: how often others have asked it for rows."""
    service = service_at(dask_worker.address)
    if not hasattr(service, "questions"):
        service.questions = 0
        for op in ("dtrain_input_rows", "dtrain_rows"):
            real = dask_worker.handlers[op]

            async def count(real: Any = real, **message: Any) -> Any:
                service.questions += 1
                return await real(**message)

            dask_worker.handlers[op] = count
    return service.questions


def without_file(dask_worker: Any) -> None:
    """In a worker: be on a machine that the file has not come to, whatever it has said."""
    service_at(dask_worker.address).input = lambda ref: None


@pytest.mark.cluster
def test_rows_of_the_file_are_read_without_a_message():
    """Also batches of another replica's part; and with messages come the same bits."""
    with processes(2) as client:
        near, far = ready(client)
        client.run(asked)
        plain = fit(client)
        stolen = fit(client, mode=dtrain.Async(), replicas=2)
        assert stolen.ledger.samples == [300, 300]
        assert client.run(asked) == {near: 0, far: 0}
        client.run(without_file, workers=[far])
        assert bits(fit(client)) == bits(plain)
        found = client.run(asked)
        assert found[far] == 0
        assert found[near] > 0
        until(lambda: files_in(tempfile.gettempdir()) == [], 30, "the file is left")
        assert client.run(mapped) == {near: 0, far: 0}


@pytest.mark.cluster
def test_a_job_over_two_machines_gives_the_same_bits(apart, threaded):
    client, _, far = apart
    assert bits(fit(client)) == bits(fit(threaded))
    until(lambda: files_in(tempfile.gettempdir()) == files_in(far) == [], 30, "a file is left")


def test_submit_takes_it_back_if_there_is_no_job(threaded, monkeypatch):
    ready(threaded)
    handler = threaded.cluster.scheduler.handlers["dtrain_submit"]

    def refuse(**message: Any) -> None:
        raise ClusterError("no job today")

    threaded.cluster.scheduler.handlers["dtrain_submit"] = answering(refuse)
    try:
        with pytest.raises(ClusterError, match="no job today"):
            fit(threaded)
    finally:
        threaded.cluster.scheduler.handlers["dtrain_submit"] = handler
    assert files_in(tempfile.gettempdir()) == []
    assert list(threaded.run(mapped).values()) == [0, 0]


# -- what fails --------------------------------------------------------------------------------


@pytest.mark.cluster
def test_no_room_on_the_second_machine(apart):
    """The error names the worker, and the first machine's file goes, too."""
    client, addresses, far = apart
    client.run(full, workers=[addresses[1]])
    words = rf"worker {addresses[1]}: a file of 0 MB has no place.*No space left"
    with pytest.raises(StorageError, match=words), delivered(client):
        pass
    assert files_in(tempfile.gettempdir()) == files_in(far) == []
    assert client.run(mapped) == dict.fromkeys(addresses, 0)


def mapped(dask_worker: Any) -> int:
    return len(service_at(dask_worker.address).files.names)


def test_no_room_at_the_client_and_the_workers_are_asked(threaded, monkeypatch):
    """They are on its machine: they say the same, but on another there might have been room."""
    ready(threaded)
    monkeypatch.setattr(os, "posix_fallocate", no_space(Path("/")))
    with pytest.raises(StorageError, match=r"worker inproc.*has no place"), delivered(threaded):
        pass


def replaced(op: str, handler: Callable[..., Any], dask_worker: Any) -> None:
    dask_worker.handlers[op] = answering(handler)


async def hangs(**message: Any) -> None:
    await asyncio.Event().wait()


async def breaks(**message: Any) -> None:
    raise StorageError("the disk has gone")


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("op", "handler", "error", "words"),
    [
        ("dtrain_open_input", hangs, DeadlineError, "has not answered"),
        ("dtrain_begin_input", hangs, DeadlineError, "dtrain_begin_input: .* has not answered"),
        ("dtrain_write_input", breaks, StorageError, "worker {}: the disk has gone"),
        ("dtrain_end_input", breaks, StorageError, "worker {}: the disk has gone"),
    ],
)
def test_a_worker_that_fails_half_way(apart, op, handler, error, words):
    client, (near, bad), far = apart
    client.run(replaced, op, handler, workers=[bad])
    with impatient(), pytest.raises(error, match=words.format(bad)) as caught:
        prepare(Job(Linear(5), X, Y), client, [near, bad], 2)
    assert bad in str(caught.value)
    assert near not in str(caught.value)
    assert files_in(tempfile.gettempdir()) == files_in(far) == []
    assert client.run(mapped) == {near: 0, bad: 0}


@contextmanager
def impatient() -> Iterator[None]:
    """Short deadlines; a worker that does not answer is tried by way of the scheduler, too."""
    with (
        dask.config.set({"dtrain.call-deadline": "1s", "dtrain.prepare-deadline": "1s"}),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", ClusterWarning)
        yield


@pytest.mark.cluster
def test_a_worker_that_has_died(forked):
    gone, workers = "tcp://127.0.0.1:1", ready(forked)
    with impatient(), pytest.raises((ClusterError, DeadlineError), match=gone):
        prepare(Job(Linear(5), X, Y), forked, [*workers, gone], 2)
    assert files_in(tempfile.gettempdir()) == []
    assert list(forked.run(mapped).values()) == [0, 0]


# -- the sweep of a worker that starts ---------------------------------------------------------


def abandoned(owner: str) -> str:
    made = segment.Segment.create("input", 8192, owner=owner, disk_first=True)
    made.close()
    return made.path.name


def test_a_worker_that_starts_spares_what_the_master_wants():
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        ready(client)
        own = cluster.scheduler.address
        names = {
            "alive": abandoned(own),
            "over": abandoned(own),
            "orphan": abandoned("tcp://127.0.0.1:1"),
            "nobody's": abandoned(""),
            "neighbour's": abandoned(f"inproc://127.0.0.1/{os.getppid()}/1"),
        }
        asked = []

        def alive(names: list[str]) -> list[str]:
            asked.append(set(names))
            return [kept] if (kept := wanted) in names else []

        wanted = names["alive"]
        place = Path(tempfile.gettempdir())
        for name in names.values():
            age(place / OURS / name)
        try:
            # A master that does not say is taken to want all that is its own.
            cluster.scheduler.handlers["dtrain_alive"] = lambda names: None
            start_worker(cluster, 2)
            left = set(files_in(place))
            assert left >= {names["alive"], names["over"], names["neighbour's"]}
            assert names["nobody's"] not in left
            cluster.scheduler.handlers["dtrain_alive"] = answering(alive)
            start_worker(cluster, 3)
            assert asked[-1] >= {names["alive"], names["over"]}
            found = {what for what, name in names.items() if name in files_in(place)}
            assert found == {"alive", "neighbour's"}
        finally:
            for name in names.values():
                segment.discard(name)


def start_worker(cluster: LocalCluster, count: int) -> None:
    """One more; its service has opened when it is among the ready ones."""
    cluster.scale(count)
    with Client(cluster, set_as_default=False) as client:
        until(lambda: len(ready(client)) == count, 40, "no such worker")
