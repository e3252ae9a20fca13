"""SIGKILL at each point of a step: training goes on, and ends with the same bits."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import pytest

import dtrain
from tests.conftest import until

from .harness import Fault, arm, bits, paced, reference, run, same, struck

pytestmark = pytest.mark.cluster

#: Who passes which point: the verdict is the chief's alone.
PASSES = [
    (role, point)
    for role in ("chief", "host", "plain")
    for point in ("computing", "writing", "waiting", "applying", "flipping")
    if role == "chief" or point != "flipping"
]
OFTEN = [("chief", "flipping"), ("plain", "applying")]


def strike(client, folder, fault, **changes):
    """A job with this fault; it has been struck as often as it should."""
    arm(client, folder, fault)
    story = run(client, **changes)
    assert len(struck(folder)) == 1, f"never there\n{story}"
    return story


def matrix(pairs, often):
    return [
        pytest.param(*pair, id="-".join(pair), marks=[] if pair in often else [pytest.mark.slow])
        for pair in pairs
    ]


@pytest.mark.parametrize(("role", "point"), matrix(PASSES, OFTEN))
def test_one_is_killed(three, tmp_path, role, point):
    story = strike(three, tmp_path, Fault(point, role, nth=3 if point == "applying" else 9))
    same(story)
    assert story.status["losses"] == len(story.losses) == 1
    assert len(story.said("from memory")) >= 1
    assert not story.said("from (start|checkpoint)")
    (blow,) = struck(tmp_path)
    noticed = story.losses[0]["time"] - blow.at
    print(f"noticed after {noticed:.3f} s")
    assert noticed < 1.0


@pytest.mark.parametrize(
    ("others", "point"),
    [
        pytest.param(2, "flipping"),
        pytest.param(1, "waiting", marks=pytest.mark.slow),
        pytest.param(2, "computing", marks=pytest.mark.slow),
        pytest.param(2, "writing", marks=pytest.mark.slow),
        pytest.param(2, "applying", marks=pytest.mark.slow),
    ],
)
def test_several_are_killed_at_once(three, tmp_path, others, point):
    """Also all of them: those that are started anew find the file of the job."""
    nth = 3 if point == "applying" else 9
    story = strike(three, tmp_path, Fault(point, "chief", with_it=others, nth=nth))
    same(story)
    assert story.status["losses"] == others + 1
    assert not story.said("from (start|checkpoint)")
    assert story.said("from memory")


#: More shards than hosts: the next generation has others of them at other hosts.
TURNS = {"shards": 5, "placement": "round-robin"}


@pytest.mark.parametrize(
    ("role", "point"),
    matrix([pair for pair in PASSES if pair[0] != "plain"], [("chief", "applying")]),
)
def test_hosts_of_many_shards_are_killed(three, tmp_path, role, point):
    """All hosts but the chief, or the chief."""
    arm(three, tmp_path, Fault(point, role))
    story = run(three, **TURNS)
    assert len(struck(tmp_path)) >= 1, f"never there\n{story}"
    same(story, **TURNS)
    assert not story.said("from (start|checkpoint)")
    assert story.said(r"it had replicas \[.*\] and shards \[(0, 3|1, 4|2)\]")


@pytest.mark.parametrize("role", ["chief", pytest.param("host", marks=pytest.mark.slow)])
def test_hosts_of_many_shards_are_killed_where_memory_is_not_shared(apart, tmp_path, role):
    changes = {**kept(tmp_path), **TURNS}
    arm(apart, tmp_path / "faults", Fault("writing", role, nth=21))
    story = run(apart, **changes)
    assert len(struck(tmp_path / "faults")) >= 1, f"never there\n{story}"
    same(story, **TURNS)
    assert story.said("goes on from step [0-9]+, from checkpoint")


APART = [(role, point) for role, point in PASSES if point in ("computing", "writing", "applying")]
APART = [pair for pair in APART if pair != ("plain", "applying")]  # it has no shard


@pytest.mark.parametrize(("role", "point"), matrix(APART, [("host", "applying")]))
def test_killed_where_memory_is_not_shared(apart, tmp_path, role, point):
    """A shard is gone with its worker: from the last checkpoint, else from the start."""
    story = strike(apart, tmp_path / "faults", Fault(point, role, nth=21), **kept(tmp_path))
    same(story)
    source = "memory" if role == "plain" else "checkpoint"
    assert story.said(f"goes on from step [0-9]+, from {source}")
    assert story.status["losses"] == 1


def kept(folder):
    (folder / "faults").mkdir()
    return {"checkpoint": dtrain.Checkpoint(folder / "saved", every=4), "model": paced(pace=0.02)}


#: Who does what in an in-graph job: gradients, updates, and at the chief the verdict.
GRAPH = [*APART, ("chief", "flipping")]


@pytest.mark.parametrize(("role", "point"), matrix(GRAPH, [("host", "applying")]))
def test_killed_in_graph(three, tmp_path, role, point):
    """The graph of the step is gone; what is lost is as where memory is not shared."""
    fault = Fault(point, role, nth=13)
    arguments = {"replication": "in-graph", **kept(tmp_path)}
    story = strike(three, tmp_path / "faults", fault, **arguments)
    same(story)
    source = "memory" if role == "plain" else "checkpoint"
    assert story.said(f"goes on from step [0-9]+, from {source}")
    assert story.status["losses"] == 1
    (blow,) = struck(tmp_path / "faults")
    assert story.losses[0]["time"] - blow.at < 10.0
    scheduler = three.cluster.scheduler
    until(
        lambda: not [name for name in scheduler.clients if "driver" in name],
        10,
        f"left: {list(scheduler.clients)}",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        Fault("flipping", "chief", with_it=2, nth=13),
        Fault("computing", "chief", act="SIGSTOP", nth=13),
        Fault("computing", "plain", act="SIGSTOP", nth=13),
    ],
    ids=str,
)
def test_worse_in_graph(three, tmp_path, fault):
    """All workers are killed at once; or one is stopped, and its tasks neither end nor fail."""
    arguments = {"replication": "in-graph", **kept(tmp_path)}
    story = strike(three, tmp_path / "faults", fault, **arguments)
    for blow in struck(tmp_path / "faults"):
        with suppress(ProcessLookupError):
            os.kill(blow.pid, signal.SIGCONT)
    same(story)
    assert story.said("goes on from step [0-9]+, from (memory|checkpoint)")


@pytest.mark.slow
@pytest.mark.parametrize("role", ["chief", "host"])
def test_killed_without_a_checkpoint(apart, tmp_path, role):
    # Late enough for the master to have heard of some steps, which it says are lost.
    fault = Fault("writing", role, nth=30)
    story = strike(apart, tmp_path, fault, model=paced(pace=0.05))
    same(story)
    assert story.said("goes on from step 0, from start, [0-9]+ steps are lost")


#: In asynchronous mode nobody waits, and no step is decided.
FREE = [(role, point) for role, point in PASSES if point in ("computing", "writing", "applying")]


def free(where, often):
    return [
        pytest.param(where, *pair, marks=[] if pair in often else [pytest.mark.slow])
        for pair in FREE
        # Over the network a gradient is applied by the shard's host.
        if (where, *pair) != ("apart", "plain", "applying")
    ]


@pytest.mark.parametrize(
    ("where", "role", "point"), [*free("three", [("chief", "writing")]), *free("apart", [])]
)
def test_killed_in_asynchronous_mode(request, tmp_path, where, role, point):
    """Every batch is applied at least once; which ones again is told."""
    client = request.getfixturevalue(where)
    story = strike(client, tmp_path, Fault(point, role), mode=dtrain.Async())
    ledger, whole = story.result.ledger, reference().ledger
    assert story.status["losses"] == 1
    assert story.result.version >= whole.applied
    assert ledger.applied >= whole.applied, ledger
    assert all(a >= b for a, b in zip(ledger.samples, whole.samples, strict=True)), ledger
    if story.said("from memory"):
        # What is applied again is at most what each replica had at hand.
        assert ledger.applied <= whole.applied + 4, ledger
        assert ledger.applied - whole.applied <= ledger.duplicates, ledger


def lead_last(sizes, workers):
    """The chief has the last shard alone: that one is the lead shard."""
    return [1 % len(workers)] * (len(sizes) - 1) + [0]


@pytest.mark.parametrize("where", ["three", pytest.param("apart", marks=pytest.mark.slow)])
def test_killed_where_another_shard_has_the_lead(request, tmp_path, where):
    """It is another one after that, and neither a step nor a gradient is lost for it."""
    client, mode = request.getfixturevalue(where), dtrain.Async()
    story = strike(client, tmp_path, Fault("writing"), mode=mode, shards=4, placement=lead_last)
    ledger, whole = story.result.ledger, reference().ledger
    assert story.status["shards"]["3"] != story.status["shards"]["0"]
    assert ledger.applied >= whole.applied, ledger
    if story.said("from memory"):
        assert ledger.applied <= whole.applied + 4, ledger


@pytest.mark.parametrize("point", ["computing", pytest.param("writing", marks=pytest.mark.slow)])
def test_an_error_there_is_no_death(three, tmp_path, point):
    """What raises is told at once, and nobody is waited for or lost."""
    story = strike(three, tmp_path, Fault(point, "plain", act="raise"))
    assert story.status["state"] == "FAILED"
    assert "struck at" in story.status["message"]
    assert story.status["losses"] == 0
    (blow,) = struck(tmp_path)
    assert story.events[-1]["time"] - blow.at < 5


def test_the_reference_is_not_blind():
    """Bits of another seed, or of a step less, are others."""
    assert bits(reference()) != bits(reference(seed=4))
    assert bits(reference()) != bits(reference(epochs=3))
