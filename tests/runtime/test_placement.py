"""Where replicas and shards go."""

from __future__ import annotations

import random
import time

import pytest

from dtrain.machines.membership import Member
from dtrain.runtime.placement import better, place


def members(count):
    return [Member(f"tcp://{i}", f"w{i}", 0.0) for i in range(count)]


def test_replicas_go_where_their_rows_lie():
    lies = {0: {"tcp://2": 10}, 1: {"tcp://0": 5, "tcp://1": 7}, 2: {"tcp://0": 9}}
    hosts = place(members(3), 3, 3, lies)
    assert {h.address: h.replicas for h in hosts} == {
        "tcp://2": (0,),
        "tcp://1": (1,),
        "tcp://0": (2,),
    }
    assert hosts[0].replicas == (0,)


def test_one_worker_with_all_rows_does_not_get_all_replicas():
    lies = {i: {"tcp://0": 100 + i} for i in range(4)}
    hosts = place(members(2), 4, 2, lies)
    assert sorted(len(h.replicas) for h in hosts) == [2, 2]
    # Those with the most rows there stay there.
    assert next(h for h in hosts if h.address == "tcp://0").replicas == (2, 3)


@pytest.mark.parametrize("seed", range(30))
def test_every_replica_and_shard_has_one_home_and_the_load_is_even(seed):
    rng = random.Random(seed)
    workers, replicas, shards = rng.randint(1, 6), rng.randint(1, 12), rng.randint(1, 9)
    ready = members(workers)
    lies = {
        i: {w.address: rng.randint(0, 3) for w in rng.sample(ready, rng.randint(0, workers))}
        for i in range(replicas)
    }
    lies[0]["tcp://gone"] = 100
    hosts = place(ready, replicas, shards, lies)
    assert sorted(i for h in hosts for i in h.replicas) == list(range(replicas))
    assert max(len(h.replicas) for h in hosts) == -(-replicas // workers)
    assert hosts[0].replicas
    # There are hosts for all shards, and none of the others is there for nothing.
    assert all(h.replicas for h in hosts[shards:])
    assert len(hosts) >= min(workers, shards)
    assert len(place(ready, replicas, None, lies)) == workers
    assert place(ready, replicas, shards, lies) == hosts


@pytest.mark.parametrize("seed", range(30))
def test_the_chief_is_near_the_state_if_anybody_is(seed):
    """Even where no rows lie near it; the load is as even as ever."""
    rng = random.Random(seed)
    workers, replicas, shards = rng.randint(1, 6), rng.randint(1, 8), rng.randint(1, 9)
    ready = members(workers)
    close = {w.address for w in rng.sample(ready, rng.randint(0, workers))}
    lies = {i: {w.address: 9 for w in ready if w.address not in close} for i in range(replicas)}
    hosts = place(ready, replicas, shards, lies, lambda member: member.address in close)
    assert not close or hosts[0].address in close
    assert hosts[0].replicas
    assert sorted(i for h in hosts for i in h.replicas) == list(range(replicas))
    assert max(len(h.replicas) for h in hosts) == -(-replicas // workers)


@pytest.mark.parametrize(
    ("before", "after", "replicas", "is_better"),
    [(1, 2, 2, True), (1, 2, 1, False), (2, 3, 2, False), (2, 3, 4, False), (2, 4, 4, True)],
)
def test_more_workers_are_better_where_the_busiest_has_fewer_replicas_then(
    before, after, replicas, is_better
):
    hosts = place(members(before), replicas, 1, {})
    assert better(hosts, after, replicas) is is_better


def test_ten_thousand_workers_are_placed_in_seconds():
    ready = members(10_000)
    lies = {i: {f"tcp://{(i * 7) % 10_000}": 1, f"tcp://{i}": 1} for i in range(10_000)}
    start = time.monotonic()
    place(ready, 10_000, 10_000, lies)
    assert time.monotonic() - start < 10
