"""Pulls and pushes between two worker processes: dtrain's own over comms, and over raw TCP.

Both are measured by one replica, within the job: its model is called once, and instead of a
gradient it makes exchanges with the shard of the other worker, in turns with those over a socket.
The other worker's replica waits in its model meanwhile.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import median
from typing import Any

import numpy as np
from distributed import Client, get_worker
from rich.table import Table

import dtrain
from benchmarks.report import say
from dtrain.arrays import aligned_bytes
from dtrain.messages import Push
from dtrain.runtime.transport import comm, open_port
from dtrain.runtime.updater import cut
from dtrain.runtime.worker import service_at

#: Seconds that a replica waits for the other one to be done.
DEADLINE = 600.0
#: Floats in a row of the one variable.
_ROW = 256
#: What is asked over the socket: an operation and a size.
_ASKED = struct.Struct("<qq")
_PULL, _BOTH, _DONE = range(3)

#: Which directions the bytes of an operation go.
WAYS = {"pull": 1, "push and pull": 2}


# -- in a worker process -----------------------------------------------------------------------


class Listener:
    """Answers over sockets, a thread for each: with the bytes asked for."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="benchmarks-tcp", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        # One replica at a time asks.
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                with connection, suppress(ConnectionError):
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        memory = memoryview(bytearray())
        asked = memoryview(bytearray(_ASKED.size))
        while True:
            receive(connection, asked)
            op, size = _ASKED.unpack(asked)
            if op == _DONE:
                self.done.set()
                return
            if len(memory) != size:
                memory = fresh(size)
            if op == _BOTH:
                receive(connection, memory)
            connection.sendall(memory)

    def close(self) -> None:
        # It wakes the thread.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5.0)


#: Of this process, while the transfers are measured.
_here: dict[str, Any] = {}


def listen() -> int:
    """Begin to answer; returns the port."""
    _here["listener"] = Listener()
    port: int = _here["listener"].port
    return port


def again() -> None:
    _here["listener"].done.clear()
    _here.pop("found", None)


def found() -> dict[str, Any] | None:
    return _here.get("found")


def leave() -> None:
    _here.pop("listener").close()


def fresh(size: int) -> memoryview:
    """Memory that is there: written to once."""
    return memoryview(np.ones(size, np.uint8)).cast("B")


def receive(connection: socket.socket, memory: memoryview) -> None:
    at = 0
    while at < len(memory):
        count = connection.recv_into(memory[at:])
        if not count:
            raise ConnectionError("closed")
        at += count


class Probe:
    """One variable of so many bytes; its gradient is an occasion to measure."""

    uses_rng = False

    def __init__(self, size: int, ports: Mapping[str, int], rounds: int, seconds: float) -> None:
        self.size, self.ports, self.rounds, self.seconds = size, dict(ports), rounds, seconds

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"weight": np.zeros((self.size // (4 * _ROW), _ROW), np.float32)}

    def loss_and_grads(self, params: Any, batch: Any, *, out: Any) -> tuple[float, Any]:
        address = get_worker().address
        service = service_at(address)
        assert service is not None
        (host,) = service.hosts.values()
        if host.is_chief:
            if not _here["listener"].done.wait(DEADLINE):
                raise RuntimeError(f"nothing was measured in {DEADLINE:.0f} s")
        elif "found" not in _here:
            with socket.create_connection(
                ("127.0.0.1", self.ports[host.launch.chief.address])
            ) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                try:
                    _here["found"] = self._measure(host, connection)
                finally:
                    connection.sendall(_ASKED.pack(_DONE, 0))
        out["weight"].fill(0)
        return 0.0, out

    def predict(self, params: Any, x: Any) -> Any:
        return np.zeros(len(x), np.float32)

    def _measure(self, host: Any, connection: socket.socket) -> dict[str, Any]:
        port = open_port(host, 0)
        assert isinstance(port, comm.AsyncPort)
        (replica,) = host.plan.replicas
        ranges = host.shard_plan.shards[0].ranges
        into = cut(aligned_bytes(host.layout.nbytes), ranges)
        gradient = cut(host.arena.grads[replica], ranges)
        memory = fresh(self.size)
        # Written to, so that it is memory of its own and not the system's one page of zeros.
        host.arena.grads[replica].fill(0)

        def exchange(grads: Any) -> None:
            # By its number the gradient is a repeated one: it travels, and is not applied.
            port.start(Push(replica, -1, 0, None, 0, grads), into)
            port.finish(replica)

        def tcp(op: int) -> None:
            connection.sendall(_ASKED.pack(op, self.size))
            if op == _BOTH:
                connection.sendall(memory)
            receive(connection, memory)

        sides: dict[tuple[str, str], Callable[[], None]] = {
            ("pull", "dtrain"): lambda: exchange(None),
            ("pull", "tcp"): lambda: tcp(_PULL),
            ("push and pull", "dtrain"): lambda: exchange(gradient),
            ("push and pull", "tcp"): lambda: tcp(_BOTH),
        }
        times: dict[str, dict[str, list[float]]] = {op: {} for op in WAYS}
        for act in sides.values():
            act()
        for _ in range(self.rounds):
            for (op, side), act in sides.items():
                times[op].setdefault(side, []).append(_each(act, self.seconds))
        return times


def _each(act: Callable[[], None], seconds: float) -> float:
    count, now = 0, 0.0
    began = time.perf_counter()
    while now < began + seconds:
        act()
        count += 1
        now = time.perf_counter()
    return (now - began) / count


# -- at the client -----------------------------------------------------------------------------


def measured(
    sizes: Sequence[int], rounds: int, seconds: float, client: Client
) -> list[dict[str, Any]]:
    """Plain values for each size; ``client`` is of a cluster of two workers without shared
    memory."""
    ports = client.run(listen)
    try:
        return [_measured(size, ports, rounds, seconds, client) for size in sizes]
    finally:
        client.run(leave)


def _measured(
    size: int, ports: Mapping[str, int], rounds: int, seconds: float, client: Client
) -> dict[str, Any]:
    client.run(again)
    handle = dtrain.submit(
        Probe(size, ports, rounds, seconds),
        np.zeros((2, 1), np.float32),
        np.zeros(2, np.float32),
        optimizer=dtrain.optim.sgd(0.01),
        mode=dtrain.Async(),
        replicas=2,
        shards=1,
        batch_size=1,
        client=client,
        detach=False,
    )
    state = handle.wait(progress=False)
    if state != "SUCCEEDED":
        handle.result()
    handle.release()
    (times,) = [times for times in client.run(found).values() if times is not None]
    answer: dict[str, Any] = {"bytes": size, "seconds": times}
    for op, of in times.items():
        medians = {side: median(each) for side, each in of.items()}
        answer[op] = {
            "us": {side: 1e6 * each for side, each in medians.items()},
            "gb_per_s": {side: WAYS[op] * size / each / 1e9 for side, each in medians.items()},
            "over tcp": medians["tcp"] / medians["dtrain"],
        }
        rates = ", ".join(f"{side} {rate:.3f}" for side, rate in answer[op]["gb_per_s"].items())
        say(f"{size:,} bytes, {op}: {rates} GB/s")
    return answer


def table(sizes: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each size and operation."""
    table = Table()
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("operation", no_wrap=True)
    for heading in ("dtrain, µs", "tcp, µs", "dtrain, GB/s", "tcp, GB/s", "over tcp"):
        table.add_column(heading, justify="right")
    for found in sizes:
        for op in WAYS:
            of = found[op]
            table.add_row(
                _size(found["bytes"]),
                op,
                *(f"{us:,.0f}" for us in of["us"].values()),
                *(f"{rate:.3f}" for rate in of["gb_per_s"].values()),
                f"{of['over tcp']:.2f}",
            )
    return table


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
