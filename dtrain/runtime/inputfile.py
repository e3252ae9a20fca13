"""The input of a job: one read-only file on each machine, mapped by the workers there.

It outlives them.  A worker process that has been started anew finds the file by its name, and
its pages are still in memory.  A worker whose machine has no such file asks one that has it for
the rows of the next batch.

Three parts, in the order in which they come into play: :class:`Contents` says where each array
lies in the file, :class:`Delivery` brings it to the machines (a client does that), and
:class:`InputFiles` is what one worker has mapped.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.protocol import to_serialize
from distributed.utils import offload

from dtrain.errors import (
    ClusterError,
    DataError,
    DeadlineError,
    DTrainError,
    ProtocolError,
    StorageError,
)
from dtrain.runtime.rpc import ask, opened
from dtrain.runtime.transport import segment
from dtrain.runtime.transport.segment import Segment

if TYPE_CHECKING:
    from distributed import Client

    from dtrain.runtime.rows import ArrayRef
    from dtrain.runtime.worker import WorkerService

#: What the files' names begin with.
NAME = "input"

#: Each array begins on a page of its own; the first page is for the file's proof.
PAGE = 4096

#: The most bytes of one message of an upload.
PIECE = 16 << 20


@dataclass(frozen=True)
class FileRef:
    """A place in a file that each machine knows by its name, wherever it has put it.

    ``token``, of 16 random bytes, proves that a file of that name is the one.
    """

    name: str
    nbytes: int
    token: bytes
    offset: int = 0

    def at(self, offset: int) -> FileRef:
        return replace(self, offset=offset)


def find(ref: FileRef) -> Segment | None:
    """Map the file if it is on this machine; read-only."""
    proof = segment.proof(ref.token)
    for place in segment.places():
        path = place / ref.name
        if segment.is_it(str(path), ref.nbytes, proof):
            with suppress(OSError):
                found = Segment(path, ref.nbytes, writable=False)
                # Whoever has it may die before the master knows of the job that it is for.
                found.renew()
                return found
    return None


def array_at(memory: np.ndarray, offset: int, shape: Sequence[int], dtype: str) -> np.ndarray:
    """An array in a mapped file; a view."""
    kind = np.dtype(dtype)
    stop = offset + math.prod(shape) * kind.itemsize
    view: np.ndarray = memory[offset:stop].view(kind).reshape(tuple(shape))
    return view


# -- what is in it ------------------------------------------------------------------------------


class Contents:
    """NumPy arrays, and where each of them lies in the file."""

    def __init__(self) -> None:
        self._arrays: list[tuple[int, np.ndarray]] = []
        self._end = PAGE

    def add(self, array: np.ndarray) -> int:
        """Returns the array's offset in bytes.  Raises DataError if it has Python objects."""
        if array.dtype.hasobject:
            raise DataError(f"found an array of dtype {array.dtype}, expected numbers or strings")
        offset = self._end
        self._arrays.append((offset, array))
        self._end += -(-array.nbytes // PAGE) * PAGE
        return offset

    def file(self) -> FileRef | None:
        """A new name for what is in it; None if that is nothing."""
        if not self._arrays:
            return None
        return FileRef(f"{NAME}-{secrets.token_hex(8)}", self._end, secrets.token_bytes(16))

    def pieces(self) -> Iterator[tuple[int, np.ndarray]]:
        """All bytes as (offset in the file, contiguous uint8), a message's worth at a time."""
        for offset, array in self._arrays:
            rows = array.reshape(1) if array.ndim == 0 else array
            row = max(rows[:1].nbytes, 1)
            step = max(PIECE // row, 1)
            for first in range(0, len(rows), step):
                some = np.ascontiguousarray(rows[first : first + step]).reshape(-1).view(np.uint8)
                for start in range(0, len(some), PIECE):
                    yield offset + first * row + start, some[start : start + PIECE]


def write_at(path: Path, start: int, data: np.ndarray) -> None:
    """Write bytes to a file; not through a mapping, which would count as the process's memory."""
    left = data.data.cast("B")
    with open(path, "r+b", buffering=0) as file:
        while len(left):
            written = os.pwrite(file.fileno(), left, start)
            left, start = left[written:], start + written


# -- the way to the machines --------------------------------------------------------------------


class Delivery:
    """Brings a file to all machines that workers are on; used by a client, from its own thread.

    Which workers share a machine is found out by trial: whoever cannot open the file is sent it,
    and then the others are asked again.

    Parameters
    ----------
    client : distributed.Client
    workers : sequence of str
        Their addresses.
    file : FileRef
    contents : Contents
    owner : str
        The scheduler's address.
    deadline, patience : float
        Seconds that each answer may take: to a question, and to a piece of the upload.
    warn : callable
        Is told, in words, that the data has to go through the scheduler.
    """

    def __init__(
        self,
        client: Client,
        workers: Sequence[str],
        file: FileRef,
        contents: Contents,
        *,
        owner: str,
        deadline: float,
        patience: float,
        warn: Callable[[str], None],
    ) -> None:
        self.file = file
        self._client = client
        self._workers = tuple(workers)
        self._contents = contents
        self._owner = owner
        self._deadline, self._patience = deadline, patience
        self._warn = warn
        #: workers that only the scheduler can reach, and why
        self._around: dict[str, str] = {}

    def deliver(self) -> None:
        """Raises an error that names the worker; then nothing is left of the file."""
        try:
            self._deliver()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove the file everywhere, as far as the workers can be reached; never raises."""
        with suppress(Exception):
            segment.discard(self.file.name)
        with suppress(Exception):
            self._client.sync(self._forget_all)

    def _deliver(self) -> None:
        made = self._make_here()
        try:
            have = self._who_has(self._workers)
            if made is not None and any(have.values()):
                self._write_here(made)
            elif made is not None:
                # This is no worker's machine.
                segment.unlink(made.path)
            while missing := [worker for worker in self._workers if not have[worker]]:
                self._upload(missing[0])
                again = self._who_has(missing)
                if not again[missing[0]]:
                    raise StorageError(
                        f"worker {missing[0]} cannot open the input file {self.file.name} that it "
                        f"has just written; expected one it can map"
                    )
                have.update(again)
        finally:
            if made is not None:
                made.close()

    def _make_here(self) -> Segment | None:
        """The file with its proof and nothing else yet; None where this machine has no room."""
        file = self.file
        try:
            made = Segment.create_as(file.name, file.nbytes, owner=self._owner, disk_first=True)
        except StorageError:
            # If the workers are here they will say the same of their own.
            return None
        made.sign(file.token)
        return made

    def _write_here(self, made: Segment) -> None:
        try:
            for start, piece in self._contents.pieces():
                write_at(made.path, start, piece)
        except OSError as error:
            raise StorageError(f"input file {made.path}: {error}") from error

    def _who_has(self, workers: Sequence[str]) -> dict[str, bool]:
        known = len(self._around)
        answers: list[bool] = self._client.sync(self._ask_all, workers)
        if self._around and not known:
            worker, error = next(iter(self._around.items()))
            self._warn(
                f"this client cannot reach worker {worker} ({error}); the data goes through the "
                f"scheduler"
            )
        return dict(zip(workers, answers, strict=True))

    async def _ask_all(self, workers: Sequence[str]) -> list[bool]:
        message = {"file": asdict(self.file)}
        return await asyncio.gather(*(self._question(w, message) for w in workers))

    async def _question(self, worker: str, message: dict[str, Any]) -> bool:
        """Whether the worker can open the file; the first question finds the way there."""
        if worker not in self._around:
            try:
                rpc = self._client.rpc(worker)
                return bool(await ask(rpc, "dtrain_open_input", self._deadline, **message))
            except (OSError, DeadlineError) as error:
                self._around[worker] = str(error)
        return bool(await self._send(worker, "dtrain_open_input", message, self._deadline))

    def _upload(self, worker: str) -> None:
        def send(op: str, **message: Any) -> None:
            self._client.sync(self._send, worker, op, message, self._patience)

        file = asdict(self.file)
        send("dtrain_begin_input", file=file)
        for start, piece in self._contents.pieces():
            send("dtrain_write_input", name=self.file.name, start=start, data=to_serialize(piece))
        send("dtrain_end_input", file=file)

    async def _send(self, worker: str, op: str, message: dict[str, Any], deadline: float) -> Any:
        """The answer of a worker, by the way that leads there."""
        try:
            if worker not in self._around:
                return await ask(self._client.rpc(worker), op, deadline, **message)
            call = self._client.scheduler.proxy(worker=worker, msg={"op": op, **message})
            return opened(await asyncio.wait_for(call, deadline), f"{op} at {worker}")
        except DTrainError as error:
            if isinstance(error, DeadlineError):
                raise
            # Its own words, from over there.
            raise type(error)(f"worker {worker}: {error}") from None
        except TimeoutError:
            raise DeadlineError(
                f"{op}: worker {worker} has not answered in {deadline:.0f} s, by way of the "
                f"scheduler"
            ) from None
        except (OSError, KeyError) as error:
            raise ClusterError(
                f"data cannot be sent to worker {worker}: {type(error).__name__}: {error}"
            ) from None

    async def _forget_all(self) -> None:
        message = {"name": self.file.name}
        try:
            # Those that are there now: some may have died, and others have taken their places.
            info = await ask(self._client.scheduler, "dtrain_info", self._deadline)
            workers = [address for address, _ in info["ready"]]
        except (OSError, DTrainError):
            workers = list(self._workers)
        calls = (self._send(w, "dtrain_forget_input", message, self._deadline) for w in workers)
        await asyncio.gather(*calls, return_exceptions=True)


# -- at a worker --------------------------------------------------------------------------------


class InputFiles:
    """The files that one worker has mapped, by name.

    They stay mapped, and so out of reach of any sweep, from the first time that they are asked
    for until the job ends or the worker does.

    Parameters
    ----------
    address : str
        The worker's.
    owner : callable
        The scheduler's address.
    """

    def __init__(self, address: str, owner: Callable[[], str]) -> None:
        self._address = address
        self._owner = owner
        #: guards the two below: replicas' threads and the handlers' come here
        self._mutex = threading.Lock()
        self._mapped: dict[str, Segment] = {}
        #: those that are being sent; not signed, so that nobody takes them for complete
        self._arriving: dict[str, Segment] = {}
        #: file -> the worker that last gave rows of it
        self.seen_at: dict[str, str] = {}

    # From any thread.

    @property
    def names(self) -> list[str]:
        """The files that this worker has mapped, or is being sent."""
        with self._mutex:
            return [*self._mapped, *self._arriving]

    def open(self, ref: FileRef) -> np.ndarray | None:
        """The file's bytes, read-only; None if this machine does not have it."""
        with self._mutex:
            found = self._mapped.get(ref.name)
            if found is None:
                found = find(ref)
                if found is None:
                    return None
                self._mapped[ref.name] = found
            return found.memory

    def begin(self, ref: FileRef) -> None:
        with self._mutex:
            before = self._arriving.pop(ref.name, None)
            # Not by its name: on a disk that machines share that may be another's, and complete.
            if before is not None:
                segment.unlink(before.path)
                before.close()
            self._arriving[ref.name] = Segment.create_as(
                ref.name, ref.nbytes, owner=self._owner(), disk_first=True
            )

    def write(self, name: str, start: int, data: np.ndarray) -> None:
        with self._mutex:
            held = self._arriving.get(name)
        if held is None:
            raise ProtocolError(f"input file {name}: found a piece of it before its beginning")
        try:
            write_at(held.path, start, data)
        except OSError as error:
            raise StorageError(f"input file {held.path}: {error}") from error

    def end(self, ref: FileRef) -> None:
        with self._mutex:
            held = self._arriving.get(ref.name)
        if held is None:
            raise ProtocolError(f"input file {ref.name}: found its end before its beginning")
        held.sign(ref.token)
        # Opened before it is let go of: somebody holds it all the time.
        self.open(ref)
        with self._mutex:
            self._arriving.pop(ref.name, None)
        held.close()

    def forget(self, name: str) -> None:
        """Remove the file from this machine; once more is harmless."""
        with self._mutex:
            held = [files.pop(name, None) for files in (self._mapped, self._arriving)]
        self.seen_at.pop(name, None)
        for one in held:
            if one is not None:
                segment.unlink(one.path)
                one.close()
        segment.discard(name)

    def close(self) -> None:
        """Let go of all; what is complete stays on the machine for those who come after."""
        with self._mutex:
            mapped, self._mapped = self._mapped, {}
            arriving, self._arriving = self._arriving, {}
        for one in arriving.values():
            segment.unlink(one.path)
        for one in (*mapped.values(), *arriving.values()):
            one.close()

    # Handlers: in the event loop.

    async def open_input(self, file: Mapping[str, Any]) -> bool:
        """Whether this worker can map the file; it then does so."""
        return await offload(self.open, FileRef(**file)) is not None

    async def begin_input(self, file: Mapping[str, Any]) -> None:
        await offload(self.begin, FileRef(**file))

    async def write_input(self, name: str, start: int, data: np.ndarray) -> None:
        await offload(self.write, name, start, data)

    async def end_input(self, file: Mapping[str, Any]) -> None:
        await offload(self.end, FileRef(**file))

    async def forget_input(self, name: str) -> None:
        await offload(self.forget, name)

    async def input_rows(
        self, file: Mapping[str, Any], shape: Sequence[int], dtype: str, rows: np.ndarray
    ) -> Any:
        """Rows of an array in a file of this machine."""
        ref = FileRef(**file)

        def read() -> np.ndarray | None:
            memory = self.open(ref)
            if memory is None:
                return None
            return np.ascontiguousarray(array_at(memory, ref.offset, shape, dtype)[rows])

        found = await offload(read)
        if found is None:
            raise DataError(f"input file {ref.name} is not at {self._address}")
        return to_serialize(found)


async def fetch_rows(
    service: WorkerService,
    ref: ArrayRef,
    rows: np.ndarray,
    holders: Sequence[str],
    deadline: float,
) -> dict[str, np.ndarray]:
    """Rows of an array whose file is on other machines, from any worker there: name -> rows.

    ``holders`` are those that had it at first.  They may have gone since, and others may have
    come to their machines, and so all that can train are asked before it is given up.
    """
    assert ref.file is not None
    name, seen_at = ref.file.name, service.files.seen_at
    failed: dict[str, str] = {}
    message = {
        "file": asdict(ref.file),
        "shape": list(ref.shape),
        "dtype": ref.dtype,
        "rows": to_serialize(rows),
    }

    async def first(addresses: Sequence[str]) -> np.ndarray | None:
        for address in addresses:
            if address in failed or address == service.address:
                continue
            failed[address] = "has not answered yet"
            try:
                # One that hangs is not to take the time of all the others.
                found = await service.ask(address, "dtrain_input_rows", deadline / 3, **message)
            except (OSError, DTrainError) as error:
                failed[address] = f"{type(error).__name__}: {error}"
                continue
            seen_at[name] = address
            return np.asarray(found)
        return None

    found = None
    with suppress(TimeoutError):
        async with asyncio.timeout(deadline):
            found = await first([seen_at[name]] if name in seen_at else [])
            if found is None:
                found = await first(await _present(service, holders, deadline / 3))
    if found is None:
        tried = "; ".join(f"{a}: {why}" for a, why in failed.items())
        raise DataError(
            f"input file {name} is not on this machine, and no worker gives its rows; it was at "
            f"{', '.join(holders) or 'none'}; tried {tried or 'none'}"
        )
    return {name: found}


async def _present(service: WorkerService, holders: Sequence[str], deadline: float) -> list[str]:
    """Whom to ask: of those that had it the ones that are still there, then all others."""
    try:
        info = await service.ask_master("dtrain_info", deadline)
    except (OSError, DTrainError):
        return list(holders)
    ready = [address for address, _ in info["ready"]]
    return sorted(ready, key=lambda address: address not in holders)
