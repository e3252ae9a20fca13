"""Items through a shared queue, and shared variables, beside Dask's own ways."""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from distributed import Client, Queue, Variable, get_client
from rich.console import RenderableType
from rich.table import Table

import dtrain
from benchmarks import report
from benchmarks.ours import cluster, idle_cores
from benchmarks.report import Turn, say
from benchmarks.training import at_least
from dtrain.sessions import queue as queues

HELP = "milliseconds of a shared queue's items and of shared variables, beside Dask's own ways"

#: Bytes of an item, and of a model.
SIZES = {"small": 100, "1 MiB": 1 << 20}
#: Items that may wait.
CAPACITY = 8
#: Who puts and who gets.
PAIRS = (("client", "client"), ("client", "task"), ("task", "task"))
OURS, QUEUE, VARIABLE, ACTOR = "dtrain", "Dask Queue", "Dask Variable", "Dask actor"
SPREAD = f"{OURS}, a shard on each worker"
SENT, LEFT = f"{OURS}, sent", f"{OURS}, left"

LEGEND = (
    "Milliseconds, medians of interleaved turns.  Clients are processes of their own, tasks are on "
    "different workers; whoever gets ends with an array of its own that it may write to.  Small: "
    "100 bytes, which Dask's Queue and Variable take as they are; 1 MiB: an array of float32, "
    "scattered straight to a worker, whose future goes through them, and fetched straight from "
    "there."
)
QUEUES_LEGEND = (
    "a put and a get: by one client, one after the other.  Else time for each item of a stream, "
    f"of which at most {CAPACITY} wait; the actor keeps an asyncio.Queue, on a third worker, as "
    "the queue of dtrain is.  sent: as if that were on another machine, so that nothing can be "
    "lent.  left: so, and large items stay with the worker of whoever puts them."
)
VARIABLES_LEGEND = (
    "assign and pull: one client assigns a model, and once it has, another pulls it.  push: one "
    "client has a gradient applied by SGD.  dtrain has these variables in one shard unless it is "
    "said otherwise; the actor keeps the array, as the parameter server of Dask's documentation "
    "does."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rounds", type=at_least(1), default=5, help="turns of each side; default: 5")
    add("--items", type=at_least(4), default=200, help="items of a turn; default: 200")


def run(args: argparse.Namespace) -> dict[str, Any]:
    with cluster(3) as client, ExitStack() as stack:
        places = Places(client, stack)
        found: dict[str, Any] = {
            "settings": {"rounds": args.rounds, "items": args.items},
            "idle_cores": idle_cores(client),
            "queues": {},
            "variables": {},
        }
        for size, nbytes in SIZES.items():
            say(f"{size}, a put and a get")
            of = found["queues"].setdefault("a put and a get", {})
            of[size] = _beside(_alone, (OURS, QUEUE, ACTOR), places, nbytes, args)
            for pair in PAIRS:
                words = " to ".join(pair)
                say(f"{size}, {words}")
                own = (OURS, SENT, LEFT) if pair == ("task", "task") else (OURS,)
                stream = partial(_stream, pair)
                of = found["queues"].setdefault(words, {})
                of[size] = _beside(stream, (*own, QUEUE, ACTOR), places, nbytes, args)
            for words, measure, theirs in (
                ("assign and pull", _assigned, (VARIABLE, ACTOR)),
                ("push", _pushed, (ACTOR,)),
            ):
                say(f"{size}, {words}")
                of = found["variables"].setdefault(words, {})
                of[size] = _beside(measure, (OURS, SPREAD, *theirs), places, nbytes, args)
    return found


def tables(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    for kind, legend in (("queues", QUEUES_LEGEND), ("variables", VARIABLES_LEGEND)):
        table = Table()
        table.add_column(kind)
        table.add_column("")
        for size in SIZES:
            table.add_column(f"{size}: ms", justify="right")
            table.add_column("dtrain is faster by", justify="right")
        for words, sizes in found[kind].items():
            for number, side in enumerate(next(iter(sizes.values()))["medians"]):
                row = ["" if number else words, side]
                for each in sizes.values():
                    ratio = each["ratios"].get(f"over {side}")
                    row.append(f"{1e3 / each['medians'][side]:.2f}")
                    row.append("" if ratio is None else f"{ratio:.2f}")
                table.add_row(*row)
            table.add_section()
        yield table
        yield legend
    yield LEGEND
    yield f"The cluster, idle, takes {found['idle_cores']:.2f} cores."


def _beside(
    measure: Callable[..., float],
    sides: tuple[str, ...],
    places: Places,
    nbytes: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Turns of all sides, and how many times the first is faster than each other."""

    def turn(side: str) -> Turn:
        rate = measure(places, side, nbytes, args.items)
        return Turn(rate, [rate])

    turns = {side: partial(turn, side) for side in sides}
    found = report.interleaved(turns, args.rounds, say, "a second")
    return report.summary(found, {f"over {side}": (sides[0], side) for side in sides[1:]})


def array_of(nbytes: int) -> np.ndarray:
    return np.random.default_rng(0).random(nbytes // 4, "f4")


def own(found: Any) -> Any:
    """What was got, as an array that may be written to."""
    array = np.frombuffer(found, "f4") if isinstance(found, bytes) else found
    return array if array.flags.writeable else array.copy()


def rate(what: Callable[[], Any], times: int) -> float:
    """How often a second; the first time, which may have to wait for others, does not count."""
    what()
    began = time.perf_counter()
    for _ in range(times):
        what()
    return times / (time.perf_counter() - began)


# -- who does it ------------------------------------------------------------------------------


class Places:
    """Two client processes, which have a pipe between them, and the workers of a cluster."""

    def __init__(self, client: Client, stack: ExitStack) -> None:
        self.client = client
        self.workers = sorted(client.scheduler_info(-1)["workers"])
        context = multiprocessing.get_context("spawn")
        self._pools = [
            stack.enter_context(
                ProcessPoolExecutor(1, context, _connect, (client.scheduler.address, end))
            )
            for end in context.Pipe()
        ]

    def start(self, where: str, number: int, what: Callable[..., Any], *args: Any) -> Any:
        """Run it at the first or second client, or in a task on such a worker; a future."""
        if where == "client":
            return self._pools[number].submit(what, *args)
        worker = [self.workers[number]]
        return self.client.submit(what, *args, workers=worker, pure=False)

    @contextmanager
    def actor(self, kind: type) -> Iterator[Any]:
        """On the third worker."""
        made = self.client.submit(kind, actor=True, workers=[self.workers[2]], pure=False)
        with self.client.as_current():
            yield made.result()
        made.release()


#: Of a client process: its end of the pipe.
_other: Connection


def _connect(address: str, end: Connection) -> None:
    global _other
    _other = end
    # It becomes the process's current client, which the others find.
    Client(address, direct_to_workers=True)


# -- queues -----------------------------------------------------------------------------------


class Shelf:
    """An actor that keeps items."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[Any] = asyncio.Queue(CAPACITY)

    async def put(self, item: Any) -> None:
        await self.items.put(item)

    async def get(self) -> Any:
        return await self.items.get()


@contextmanager
def _shared(places: Places, side: str) -> Iterator[Any]:
    """A queue of that side: its name, or the actor.  That of dtrain is on the third worker."""
    name = uuid.uuid4().hex
    if side == ACTOR:
        with places.actor(Shelf) as shelf:
            yield shelf
    elif side == QUEUE:
        made = Queue(name, client=places.client, maxsize=CAPACITY)
        yield name
        made.close()
    else:
        with dtrain.Session(name, places.client) as session:
            number = 0
            while session.queue(f"{number}", CAPACITY).place.host != places.workers[2]:
                number += 1
            yield name, f"{number}"
            session.reset()


@contextmanager
def _opened(
    side: str, shared: Any, nbytes: int
) -> Iterator[tuple[Callable[[Any], Any], Callable[[], Any]]]:
    """How that side puts and gets."""
    if side == ACTOR:
        yield lambda item: shared.put(item).result(), lambda: own(shared.get().result())
    elif side == QUEUE:
        client = get_client()
        queue = Queue(shared, client=client, maxsize=CAPACITY)
        if nbytes < 1000:
            yield lambda item: queue.put(item.tobytes()), lambda: own(queue.get())
        else:
            yield (
                lambda item: queue.put(client.scatter(item, direct=True, hash=False)),
                lambda: own(client.gather(queue.get(), direct=True)),
            )
    else:
        large = queues.LARGE
        queues.LARGE = 1 if side == LEFT else large
        try:
            session, name = shared
            with dtrain.Session(session) as opened:
                mine = opened.queue(name)
                mine._near = side == OURS
                yield mine.put, lambda: own(mine.get())
        finally:
            queues.LARGE = large


def _alone(places: Places, side: str, nbytes: int, items: int) -> float:
    with _shared(places, side) as shared:
        return places.start("client", 0, _put_and_get, side, shared, nbytes, items).result()


def _put_and_get(side: str, shared: Any, nbytes: int, items: int) -> float:
    item = array_of(nbytes)
    with _opened(side, shared, nbytes) as (put, get):

        def both() -> Any:
            put(item)
            return get()

        assert np.array_equal(both(), item)
        return rate(both, items)


def _stream(pair: tuple[str, str], places: Places, side: str, nbytes: int, items: int) -> float:
    with _shared(places, side) as shared:
        getting = places.start(pair[1], 1, _get, side, shared, nbytes, items)
        places.start(pair[0], 0, _put, side, shared, nbytes, items).result()
        return getting.result()


def _put(side: str, shared: Any, nbytes: int, items: int) -> None:
    item = array_of(nbytes)
    with _opened(side, shared, nbytes) as (put, _):
        for _ in range(items + 1):
            put(item)


def _get(side: str, shared: Any, nbytes: int, items: int) -> float:
    with _opened(side, shared, nbytes) as (_, get):
        return rate(get, items)


# -- variables --------------------------------------------------------------------------------


class Model:
    """So many parameters, and no gradient."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"w": array_of(self.nbytes).reshape(-1, 1)}

    def loss_and_grads(self, params: Any, batch: Any, *, out: Any = None) -> Any:
        raise NotImplementedError("this model is only assigned and pulled")


class ParameterServer:
    """An actor that keeps parameters."""

    def __init__(self) -> None:
        self.params = np.zeros(0, "f4")

    def set(self, params: np.ndarray) -> None:
        # Its own, to be written to.
        self.params = params if params.flags.writeable else params.copy()

    def get(self) -> np.ndarray:
        return self.params

    def push(self, grads: np.ndarray) -> None:
        self.params -= 0.1 * grads


@contextmanager
def _variables(places: Places, side: str, nbytes: int) -> Iterator[Any]:
    """Variables of that side: their name, or the actor."""
    name = uuid.uuid4().hex
    if side == ACTOR:
        with places.actor(ParameterServer) as server:
            server.set(array_of(nbytes)).result()
            yield server
    elif side == VARIABLE:
        made = Variable(name, client=places.client)
        yield name
        made.delete()
    else:
        with dtrain.Session(name, places.client) as session:
            cut = dtrain.FixedShards(len(places.workers)) if side == SPREAD else None
            sgd = dtrain.optim.sgd(0.1)
            session.create(Model(nbytes), optimizer=sgd, partitioner=cut)
            yield name
            session.reset()


@contextmanager
def _attached(
    side: str, shared: Any, nbytes: int
) -> Iterator[tuple[Callable[[Any], Any], Callable[[], Any], Callable[[Any], Any]]]:
    """How that side assigns, pulls and pushes."""
    if side == ACTOR:
        yield (
            lambda params: shared.set(params).result(),
            lambda: own(shared.get().result()),
            lambda grads: shared.push(grads).result(),
        )
    elif side == VARIABLE:
        client = get_client()
        variable = Variable(shared, client=client)
        if nbytes < 1000:
            yield lambda p: variable.set(p.tobytes()), lambda: own(variable.get()), _none
        else:
            yield (
                lambda p: variable.set(client.scatter(p, direct=True, hash=False)),
                lambda: own(client.gather(variable.get(), direct=True)),
                _none,
            )
    else:
        with dtrain.Session(shared) as session:
            yield (
                lambda params: session.assign({"w": params.reshape(-1, 1)}),
                lambda: own(session.pull().params["w"]).reshape(-1),
                lambda grads: session.push({"w": grads.reshape(-1, 1)}),
            )


def _none(grads: Any) -> None:
    raise NotImplementedError("a variable of Dask applies no gradients")


def _assigned(places: Places, side: str, nbytes: int, items: int) -> float:
    with _variables(places, side, nbytes) as shared:
        pulling = places.start("client", 1, _pulls, side, shared, nbytes, items)
        found: float = places.start("client", 0, _assigns, side, shared, nbytes, items).result()
        pulling.result()
        return found


def _assigns(side: str, shared: Any, nbytes: int, items: int) -> float:
    params = array_of(nbytes)
    with _attached(side, shared, nbytes) as (assign, _, _):

        def assigned() -> None:
            assign(params)
            _other.send_bytes(b"assigned")
            _other.recv_bytes()

        return rate(assigned, items)


def _pulls(side: str, shared: Any, nbytes: int, items: int) -> None:
    expected = array_of(nbytes)
    with _attached(side, shared, nbytes) as (_, pull, _):
        for number in range(items + 1):
            _other.recv_bytes()
            found = pull()
            assert number or np.array_equal(found, expected)
            _other.send_bytes(b"pulled")


def _pushed(places: Places, side: str, nbytes: int, items: int) -> float:
    with _variables(places, side, nbytes) as shared:
        return places.start("client", 0, _pushes, side, shared, nbytes, items).result()


def _pushes(side: str, shared: Any, nbytes: int, items: int) -> float:
    grads = array_of(nbytes)
    with _attached(side, shared, nbytes) as (_, _, push):
        return rate(lambda: push(grads), items)
