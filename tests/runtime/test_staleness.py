"""``Async(max_staleness=s)``: nobody is more than ``s`` steps ahead of the slowest."""

from __future__ import annotations

import pytest

import dtrain
from dtrain.machines.plan import Plan

from .witness import Counted, lines, numbered

SGD = dtrain.optim.sgd(1.0)


def job(client, tmp_path, *, rows=173, epochs=2, **changes):
    """A job that counts how often each row was applied; its result, and who computed when."""
    arguments = dict(
        optimizer=SGD, mode=dtrain.Async(max_staleness=1), replicas=4, shards=3, batch_size=5,
        epochs=epochs, client=client, progress=False,
    ) | changes  # fmt: skip
    slow, pace = arguments.pop("slow", {}), arguments.pop("pace", 0.001)
    log = tmp_path / "log"
    model = Counted(rows, pace=pace, slow=slow, log=log)
    result = dtrain.fit(model, *numbered(rows), **arguments)
    ledger = result.ledger
    assert ledger.applied == result.version == sum(ledger.staleness.values())
    assert (ledger.late, ledger.rejected, ledger.replayed, ledger.duplicates) == (0, 0, 0, 0)
    if arguments.get("steps") is None:
        assert ledger.samples == [rows] * epochs
        assert (result.params["times"] == epochs).all()
    plan = Plan(rows, arguments["replicas"], arguments["batch_size"], epochs)
    return result, by_epoch(lines(log), plan.batches_per_epoch)


def by_epoch(log, batches):
    """The lines of each epoch: between two of them all wait for each other."""
    return [log[at : at + 2 * batches] for at in range(0, len(log), 2 * batches)]


def widest(log, replicas):
    """How far ahead of the slowest somebody was, at the most, as he began a batch.

    A gradient is applied after the end of its batch: so the slowest may be further behind than
    is seen here, but not less far.  Nobody waits for who has ended the last batch that he got.
    """
    ends = [[k for k, line in enumerate(log) if line[:2] == (i, "e")] for i in range(replicas)]
    until = min(max(of, default=0) for of in ends)
    begun, ended, gap = [0] * replicas, [0] * replicas, 0
    for replica, what, _ in log[:until]:
        if what == "e":
            ended[replica] += 1
            continue
        gap = max(gap, begun[replica] - min(ended))
        begun[replica] += 1
    return gap


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("replicas", [3, 4])
def test_the_gap_and_the_ages_are_bounded(anywhere, tmp_path, replicas, bound):
    result, epochs = job(
        anywhere, tmp_path, replicas=replicas, slow={1: 0.012},
        mode=dtrain.Async(max_staleness=bound),
    )  # fmt: skip
    for epoch in epochs:
        assert widest(epoch, replicas) <= bound
    assert max(result.ledger.staleness) <= (replicas - 1) * (2 * bound + 1)


def test_without_a_bound_the_fast_run_ahead(anywhere, tmp_path):
    """What is measured above can be too much."""
    result, epochs = job(anywhere, tmp_path, slow={1: 0.06}, mode=dtrain.Async())
    assert max(widest(epoch, 4) for epoch in epochs) > 3
    assert max(result.ledger.staleness) > 3 * (2 * 1 + 1)


@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize(("replicas", "batch_size"), [(6, 5), (9, 3)])
def test_several_replicas_of_one_worker(anywhere, tmp_path, replicas, batch_size, bound):
    """They wait for each other, and one thread runs them."""
    result, epochs = job(
        anywhere, tmp_path, replicas=replicas, batch_size=batch_size, slow={4: 0.005},
        mode=dtrain.Async(max_staleness=bound),
    )  # fmt: skip
    for epoch in epochs:
        assert widest(epoch, replicas) <= bound
    assert max(result.ledger.staleness) <= (replicas - 1) * (2 * bound + 1)


@pytest.mark.parametrize(("replicas", "shards"), [(1, 1), (2, 1), (5, 4)])
def test_numbers_of_replicas_and_shards(anywhere, tmp_path, replicas, shards):
    job(
        anywhere, tmp_path, replicas=replicas, shards=shards, epochs=3,
        mode=dtrain.Async(max_staleness=0), pace=0.0,
    )  # fmt: skip


def test_steps_end_it(anywhere, tmp_path):
    for steps in (1, 17, 50):
        result, _ = job(
            anywhere, tmp_path, steps=steps, mode=dtrain.Async(max_staleness=1), slow={0: 0.01}
        )
        assert result.version == steps


def test_it_learns(anywhere, digits):
    X, y = digits
    result = dtrain.fit(
        dtrain.models.MLP([64, 64, 10]), X, y, optimizer=dtrain.optim.adam(3e-3),
        mode=dtrain.Async(max_staleness=1), replicas=4, batch_size=16, epochs=12,
        validation_split=0.2, metrics=["accuracy"], client=anywhere, progress=False,
    )  # fmt: skip
    assert result.metrics["val_accuracy"] >= 0.95
    assert result.ledger.samples == [1438] * 12
    assert max(result.ledger.staleness) <= 3 * 3
