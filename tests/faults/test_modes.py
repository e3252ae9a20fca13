"""Deaths where steps are left out, where replicas are held back, and between two stages."""

from __future__ import annotations

import os
import signal

import pytest

import dtrain
from dtrain.runtime.updater import Updater
from tests.runtime.test_guards import BadRow
from tests.runtime.witness import Counted, numbered

from .harness import Fault, Paced, X, Y, arm, bits, once, paced, run, same, struck

pytestmark = pytest.mark.cluster


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


# -- steps that are left out --------------------------------------------------------------------

SKIP = dtrain.Recovery(on_non_finite="skip")


class Poisoned(Paced):
    """The batch with the bad row has a gradient that is not finite."""

    def loss_and_grads(self, params, batch, *, out=None, rng=None):
        loss, grads = super().loss_and_grads(params, batch, out=out, rng=rng)
        if (batch[0][:, 0] > 100).any():
            next(iter(grads.values())).reshape(-1)[-1] = float("inf")
        return loss, grads


def poisoned():
    x = X.copy()
    x[200, 0] = 1000
    return x, Y


#: A split would shuffle; without one the bad row is in the same batch of each epoch.
LEFT_OUT = dict(recovery=SKIP, shuffle=False, validation_split=None, metrics=[])

_unhurt: dict = {}


def unhurt(client):
    """The same job, and nothing happens to it."""
    if "job" not in _unhurt:
        _unhurt["job"] = run(client, paced(Poisoned), *poisoned(), **LEFT_OUT)
    return _unhurt["job"].result


@pytest.mark.parametrize(
    ("where", "fault"),
    [
        # After a step was left out in this epoch, in the one before, and right at that step.
        ("three", Fault("flipping", "chief", nth=14)),
        slow("three", Fault("flipping", "chief", nth=6)),
        slow("three", Fault("flipping", "chief", nth=7)),
        slow("three", Fault("waiting", "host", nth=20)),
        slow("three", Fault("computing", "plain", nth=16)),
        slow("three", Fault("flipping", "chief", nth=8, with_it=2)),
        slow("apart", Fault("computing", "plain", nth=9)),
        ("apart", Fault("applying", "host", nth=21)),
    ],
    ids=str,
)
def test_killed_after_a_step_was_left_out(request, tmp_path, where, fault):
    client, folder = request.getfixturevalue(where), tmp_path / "faults"
    folder.mkdir()
    expected = unhurt(client)
    assert expected.ledger.rejected == 4 * 4
    arm(client, folder, fault)
    place = dtrain.Checkpoint(tmp_path / "saved", every=4)
    kept = {"checkpoint": place} if where == "apart" else {}
    story = run(client, paced(Poisoned), *poisoned(), **LEFT_OUT, **kept)
    assert len(struck(folder)) == 1, f"never there\n{story}"
    assert story.status["losses"] == fault.with_it + 1
    found, whole = story.result.ledger, expected.ledger
    assert bits(story.result) == bits(expected), f"{story}"
    assert (found.applied, found.rejected) == (whole.applied, whole.rejected)
    assert found.samples == whole.samples


@pytest.mark.parametrize(
    "fault",
    [
        Fault("computing", "plain", nth=12),
        slow(Fault("writing", "chief", nth=20)),
        slow(Fault("computing", "host", nth=14)),
    ],
    ids=str,
)
def test_killed_after_a_gradient_was_left_out(three, tmp_path, fault):
    """What is applied and what is left out adds up; what is trained again is told."""
    arm(three, tmp_path, fault)
    rows, epochs = 192, 3
    story = run(
        three, BadRow(rows, pace=0.004), *numbered(rows), optimizer=dtrain.optim.sgd(1.0),
        mode=dtrain.Async(), batch_size=8, epochs=epochs, recovery=SKIP, shuffle=False,
        validation_split=None, metrics=[],
    )  # fmt: skip
    assert len(struck(tmp_path)) == 1, f"never there\n{story}"
    ledger, times = story.result.ledger, story.result.params["times"][:, 0]
    again = ledger.duplicates
    assert epochs <= ledger.rejected <= epochs + 1
    bad = (times == 0).nonzero()[0]
    assert len(bad) == 8
    good = [n for n in times if n]
    assert min(good) == epochs
    assert sum(n - epochs for n in good) <= 8 * again
    assert all(n >= rows - 8 for n in ledger.samples)


# -- replicas that are held back ----------------------------------------------------------------


@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize(
    "fault",
    [
        Fault("computing", "plain", nth=6),
        slow(Fault("writing", "chief", nth=9)),
        slow(Fault("applying", "host", nth=9)),
        slow(Fault("computing", "chief", nth=7, with_it=2)),
        slow(Fault("computing", "host", nth=2)),
    ],
    ids=str,
)
def test_killed_while_others_are_held_back(three, tmp_path, bound, fault):
    """Those who waited for the dead go on, and no batch is lost."""
    arm(three, tmp_path, fault)
    rows, epochs = 203, 3
    story = run(
        three, Counted(rows, pace=0.003, slow={3: 0.01}), *numbered(rows), batch_size=5,
        optimizer=dtrain.optim.sgd(1.0), mode=dtrain.Async(max_staleness=bound), epochs=epochs,
        validation_split=None, metrics=[],
    )  # fmt: skip
    assert len(struck(tmp_path)) == 1, f"never there\n{story}"
    assert not story.said("from (start|checkpoint)")
    ledger, times = story.result.ledger, story.result.params["times"]
    assert times.min() == epochs, "a batch was lost"
    # What was applied in part, or not known to be, is applied again, and told.
    assert (times - epochs).sum(axis=0).max() <= 5 * ledger.duplicates
    assert max(ledger.staleness) <= 3 * (2 * bound + 1)


# -- between two stages -------------------------------------------------------------------------

CLIPPED = {
    "optimizer": dtrain.optim.chain(dtrain.optim.clip_by_global_norm(0.05), dtrain.optim.lamb(1e-2))
}


@pytest.mark.parametrize("nth", [4, *map(slow, (5, 6, 7, 8, 9))])
@pytest.mark.parametrize("role", ["chief", slow("host"), slow("plain")])
def test_killed_between_two_stages(three, tmp_path, role, nth):
    """What it had begun cannot be done twice: the step is cut, and made anew."""
    arm(three, tmp_path, Fault("applying", role, nth=nth))
    story = run(three, **CLIPPED)
    assert len(struck(tmp_path)) == 1, f"never there\n{story}"
    same(story, **CLIPPED)
    assert not story.said("from (start|checkpoint)")


def _dies_after(nth: int, marker: str) -> None:
    """In a worker: dies once, with a stage done and its flag not set."""
    done = 0
    original = Updater.go_on

    def go_on(self, index, *arguments):
        nonlocal done
        original(self, index, *arguments)
        # The last stage may be done twice: it writes to the next version alone.
        done += index == 1
        if index == 1 and done == nth and once(marker):
            os.kill(os.getpid(), signal.SIGKILL)

    Updater.go_on = go_on
    Updater._original = original


def _heal() -> None:
    Updater.go_on = getattr(Updater, "_original", Updater.go_on)


@pytest.mark.parametrize("nth", [3, slow(2), slow(4)])
def test_a_stage_is_never_done_twice(three, tmp_path, nth):
    """The gradient is scaled in place: those who live on must not scale it again."""
    three.run(_dies_after, nth, str(tmp_path / "died"))
    try:
        story = run(three, **CLIPPED)
    finally:
        three.wait_for_workers(3, timeout=60)
        three.run(_heal)
    assert (tmp_path / "died").exists()
    assert story.status["losses"] == 1
    same(story, **CLIPPED)


@pytest.mark.parametrize("nth", [slow(25), slow(26), 27])
def test_killed_between_two_stages_where_memory_is_not_shared(apart, tmp_path, nth):
    (tmp_path / "faults").mkdir()
    arm(apart, tmp_path / "faults", Fault("applying", "host", nth=nth))
    kept = dtrain.Checkpoint(tmp_path / "saved", every=4)
    story = run(apart, paced(pace=0.02), checkpoint=kept, **CLIPPED)
    assert len(struck(tmp_path / "faults")) == 1, f"never there\n{story}"
    same(story, **CLIPPED)
