"""The same job gives the same bits, whatever runs it."""

from __future__ import annotations

import pytest

import dtrain

from .conftest import processes


def job(digits, client, **changes):
    X, y = digits
    arguments = dict(
        optimizer=dtrain.optim.adam(3e-3),
        replicas=4,
        shards=2,
        batch_size=24,
        epochs=2,
        validation_split=0.2,
        metrics=["accuracy", "log_loss"],
        seed=7,
        client=client,
        progress=False,
    )
    return dtrain.fit(dtrain.models.MLP([64, 96, 10]), X, y, **{**arguments, **changes})


def bits(result):
    """Everything of a result that must not depend on what ran it."""
    timing = ("seconds", "samples_per_s")
    history = [{k: v for k, v in e.items() if k not in timing} for e in result.history]
    return {name: p.tobytes() for name, p in result.params.items()}, history


@pytest.fixture(scope="module")
def base(digits, threaded):
    """Two workers in one process, two shards."""
    return bits(job(digits, threaded))


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_shards(digits, threaded, base, shards):
    assert bits(job(digits, threaded, shards=shards)) == base


def last_first(sizes, workers):
    """The chief, which is the first worker, has the last shard alone."""
    others = [1 + shard % (len(workers) - 1) for shard in range(len(sizes) - 1)]
    return [*others, 0]


#: How the variables may be cut and placed.
PLACED = [
    {"partitioner": partitioner, "placement": placement, "shards": None}
    for partitioner in (
        dtrain.FixedShards(5),
        dtrain.MinSize("4kB", max_shards=3),
        dtrain.MaxSize("5 kiB"),
    )
    for placement in ("greedy", "round-robin", last_first)
]


@pytest.mark.parametrize("placed", PLACED)
def test_partitioners_and_placements(digits, threaded, base, placed):
    assert bits(job(digits, threaded, **placed)) == base


def test_a_placement_in_graph(digits, threaded, base):
    placed = {"replication": "in-graph", "epochs": 1, "shards": 5}
    expected = bits(job(digits, threaded, **placed))
    assert bits(job(digits, threaded, placement=last_first, **placed)) == expected


@pytest.mark.cluster
@pytest.mark.parametrize("transport", ["auto", "comm"])
def test_partitioners_and_placements_on_processes(digits, base, transport):
    with processes(3, **{"dtrain.transport": transport}) as client:
        for placed in PLACED:
            assert bits(job(digits, client, **placed)) == base


@pytest.mark.cluster
@pytest.mark.parametrize("transport", ["auto", "comm"])
@pytest.mark.parametrize(("workers", "threads"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)])
def test_worker_processes(digits, base, workers, threads, transport):
    """Shared memory between them, and the network between them."""
    with processes(workers, threads, **{"dtrain.transport": transport}) as client:
        assert bits(job(digits, client)) == base
        assert bits(job(digits, client, shards=3)) == base


def test_another_seed_gives_other_bits(digits, threaded, base):
    assert bits(job(digits, threaded, seed=8)) != base


def test_another_number_of_replicas_gives_other_bits(digits, threaded, base):
    """The comparison can fail: the sums' order depends on the number of replicas."""
    assert bits(job(digits, threaded, replicas=2)) != base
