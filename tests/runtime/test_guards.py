"""What is not finite or does not fit is refused for the whole step, named, and changes nothing."""

from __future__ import annotations

import numpy as np
import pytest

import dtrain
from dtrain.machines.plan import Plan

from .witness import Counted, Witness, check_witness, numbered, who

REPLICAS, BATCH, EACH = 4, 8, 6
ROWS = REPLICAS * BATCH * EACH
#: replica, batch of its part: the place of the bad row
BAD = (2, 3)
BAD_ROW = BAD[0] * BATCH * EACH + BAD[1] * BATCH + 5

MODES = {
    "sync": {},
    "in-graph": {"replication": "in-graph"},
    "backups": {"mode": dtrain.Sync(backups=1)},
    "async": {"mode": dtrain.Async()},
    "bounded": {"mode": dtrain.Async(max_staleness=1)},
}


def matrix(modes, others, often):
    """Each mode with each of the others; those that are not run often are slow."""
    pairs = [(mode, other) for mode in modes for other in others]
    marked = [[] if often(*pair) else [pytest.mark.slow] for pair in pairs]
    return [pytest.param(*p, marks=m) for p, m in zip(pairs, marked, strict=True)]


class Exact:
    """Sums of small dyadic fractions: no rounding, so that no order of sums changes a bit.

    The second column of the data says what goes wrong, if it is not 0: 1 the gradient of ``a``
    (beside a sound loss), 2 the loss alone, 3 both; 4 an element of the last variable alone.
    """

    def init(self, rng):
        return {"a": np.zeros((24, 3)), "b": np.ones((16, 2)), "c": np.zeros(4)}

    def loss_and_grads(self, params, batch, *, out=None, rng=None):
        if not all(np.isfinite(value).all() for value in params.values()):
            raise RuntimeError("parameters that are not finite")
        return self.answer(params, batch[0])

    def answer(self, params, x):
        kind = int(x[:, 1].max())
        grads = {name: value / 2 + x[:, 0].mean() for name, value in params.items()}
        if kind in (1, 3):
            grads["a"][3, 1] = np.nan
        if kind == 4:
            grads["c"][3] = -np.inf
        return np.nan if kind in (2, 3) else 1.0, grads

    def predict(self, params, x):
        return np.zeros(len(x))


def data(kind=0):
    x = np.zeros((ROWS, 2))
    x[:, 0] = np.arange(ROWS) % 8
    x[BAD_ROW, 1] = kind
    return x, np.zeros(ROWS)


def job(client, model=None, kind=0, **changes):
    arguments = dict(
        optimizer=dtrain.optim.sgd(0.5, momentum=0.5), replicas=REPLICAS, shards=3,
        batch_size=BATCH, shuffle=False, epochs=1, client=client, progress=False,
    ) | changes  # fmt: skip
    return dtrain.fit(model or Exact(), *data(kind), **arguments)


def plain(steps, left_out=()):
    """The same in plain NumPy: parameters after so many steps, some of which are left out."""
    model, (x, _) = Exact(), data()
    params = {name: value.copy() for name, value in model.init(None).items()}
    momentum = {name: np.zeros_like(value) for name, value in params.items()}
    for step in range(steps):
        if step in left_out:
            continue
        at = [p * BATCH * EACH + step % EACH * BATCH for p in range(REPLICAS)]
        found = [model.answer(params, x[a : a + BATCH])[1] for a in at]
        for name, value in params.items():
            momentum[name] = 0.5 * momentum[name] + sum(g[name] for g in found) / REPLICAS
            params[name] = value - 0.5 * momentum[name]
    return params


def same(found, expected):
    for name, value in expected.items():
        assert found[name].tobytes() == value.tobytes(), name


# -- fail ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "kind"), matrix(MODES, [1, 2, 3, 4], lambda mode, kind: mode == "sync" or kind == 4)
)
def test_what_is_not_finite_ends_the_job_and_changes_nothing(anywhere, tmp_path, mode, kind):
    place = tmp_path / "saved"
    kept = dtrain.Checkpoint(place, every=1, keep=99)
    with pytest.raises(dtrain.NonFiniteError) as caught:
        job(anywhere, kind=kind, checkpoint=kept, **MODES[mode])
    assert caught.value.reason == "NON_FINITE"
    text = str(caught.value)
    assert "partition 2" in text
    assert "batch 3" in text
    if mode in ("sync", "in-graph"):
        assert "replica 2" in text
        assert "step 3" in text
        for entry in dtrain.checkpoints.find(place):
            assert entry["step"] <= 3
    else:
        assert "replica " in text
        assert "step " in text


@pytest.mark.parametrize("mode", ["sync", "in-graph"])
@pytest.mark.parametrize("kind", [1, 4])
def test_no_shard_has_anything_of_it(anywhere, tmp_path, mode, kind):
    """What goes on from the last checkpoint, with a sound row, is as if nothing had been."""
    kept = dtrain.Checkpoint(tmp_path / "saved", every=1, keep=99)
    with pytest.raises(dtrain.NonFiniteError):
        job(anywhere, kind=kind, checkpoint=kept, **MODES[mode])
    found = job(anywhere, checkpoint=kept, resume=True, **MODES[mode])
    same(found.params, plain(EACH))


class Overflows(Exact):
    """Each gradient is finite, their sum is not."""

    def answer(self, params, x):
        loss, grads = super().answer(params, x)
        if 1.0 in x[:, 0] and self.now:
            grads["b"][1] = 1.7e308
        return loss, grads

    def loss_and_grads(self, params, batch, *, out=None, rng=None):
        self.now = who(rng)[1] == 2
        return super().loss_and_grads(params, batch)


def test_a_sum_that_overflows(anywhere):
    with pytest.raises(dtrain.NonFiniteError, match="sum of the gradients overflows at step 2"):
        job(anywhere, Overflows())
    skip = dtrain.Recovery(on_non_finite="skip")
    found = job(anywhere, Overflows(), recovery=skip)
    assert found.ledger.rejected == REPLICAS
    same(found.params, plain(EACH, [2]))


# -- skip ---------------------------------------------------------------------------------------

SKIP = dtrain.Recovery(on_non_finite="skip")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", [1, 2, 4])
@pytest.mark.parametrize("mode", ["sync", "in-graph"])
def test_a_step_is_left_out(anywhere, mode, kind, shards):
    found = job(anywhere, kind=kind, epochs=2, shards=shards, recovery=SKIP, **MODES[mode])
    assert found.version == 2 * EACH
    assert found.ledger.rejected == 2 * REPLICAS
    assert found.ledger.applied == 2 * REPLICAS * (EACH - 1)
    assert found.ledger.samples == [ROWS - REPLICAS * BATCH] * 2
    assert [e["samples"] for e in found.history] == found.ledger.samples
    assert [e["loss"] for e in found.history] == [1.0, 1.0]
    same(found.params, plain(2 * EACH, [3, 3 + EACH]))


class BadRow(Counted):
    """A gradient with the bad row is not finite."""

    def note(self, grads, rows, step):
        super().note(grads, rows, step)
        if BAD_ROW in rows:
            grads["times"][0, 0] = np.inf


class BadWitness(Witness):
    def note(self, grads, rows, step):
        super().note(grads, rows, step)
        if BAD_ROW in rows:
            grads["told"][-1, -1] = np.nan


def test_a_step_with_backups_is_left_out(anywhere):
    epochs = 2
    model = BadWitness(ROWS, ROWS * epochs // BATCH, pace=0.001, slow={1: 0.01})
    found = dtrain.fit(
        model, *numbered(ROWS), optimizer=dtrain.optim.sgd(1.0), mode=dtrain.Sync(backups=1),
        replicas=REPLICAS, shards=3, batch_size=BATCH, epochs=epochs, shuffle=False,
        recovery=SKIP, client=anywhere, progress=False,
    )  # fmt: skip
    ledger, told = found.ledger, found.params["told"]
    empty = [step for step in range(found.version) if not told[step].any()]
    assert len(empty) == epochs, "one step an epoch is left out"
    kept = np.delete(told, empty, axis=0)
    counts = check_witness({**found.params, "told": kept}, found.version - epochs)
    assert counts[BAD_ROW] == 0
    assert epochs <= ledger.rejected <= epochs * REPLICAS
    assert ledger.applied + ledger.rejected == epochs * ROWS // BATCH
    assert sum(ledger.samples) == epochs * ROWS - ledger.rejected * BATCH == counts.sum()
    assert [e["samples"] for e in found.history] == ledger.samples


@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_a_gradient_is_left_out(anywhere, mode):
    found = dtrain.fit(
        BadRow(ROWS, pace=0.001, slow={1: 0.005}), *numbered(ROWS),
        optimizer=dtrain.optim.sgd(1.0), replicas=REPLICAS, shards=3, batch_size=BATCH,
        epochs=3, shuffle=False, recovery=SKIP, client=anywhere, progress=False, **MODES[mode],
    )  # fmt: skip
    ledger = found.ledger
    assert ledger.rejected == 3
    assert ledger.samples == [ROWS - BATCH] * 3
    assert ledger.applied == found.version == 3 * (ROWS // BATCH - 1)
    batch = BAD_ROW // BATCH * BATCH
    expected = np.full((ROWS, 2), 3.0)
    expected[batch : batch + BATCH] = 0
    np.testing.assert_array_equal(found.params["times"], expected)


# -- what does not fit --------------------------------------------------------------------------


class Odd(Exact):
    """The gradients of the batch with the bad row are not what they should be."""

    def __init__(self, change):
        self.change = change

    def answer(self, params, x):
        loss, grads = super().answer(params, x)
        return loss, self.change(grads) if x[:, 1].any() else grads


WRONG = {
    "shape": (lambda g: g | {"a": np.zeros((24, 1))}, r"'a': .*\(24, 1\).*\(24, 3\)"),
    "scalar": (lambda g: g | {"c": np.float64(1)}, r"'c': .*shape \(4,\)"),
    "dtype": (lambda g: g | {"b": g["b"].astype(np.float32)}, "'b': .*float32.*float64"),
    "missing": (lambda g: {n: g[n] for n in "ab"}, r"'c' is missing: found \['a', 'b'\]"),
    "unknown": (lambda g: g | {"d": np.zeros(1)}, "'d' is unknown: expected only"),
    "list": (list, "found list, expected a dict of arrays"),
}


@pytest.mark.parametrize(
    ("mode", "wrong"),
    matrix(MODES, WRONG, lambda mode, wrong: mode == "sync" or wrong == "shape"),
)
def test_what_does_not_fit_is_refused(anywhere, tmp_path, mode, wrong):
    change, words = WRONG[wrong]
    kept = dtrain.Checkpoint(tmp_path / "saved", every=1, keep=99)
    with pytest.raises(ValueError, match=words) as caught:
        job(anywhere, Odd(change), 9, checkpoint=kept, **MODES[mode])
    text = "".join(caught.value.__notes__)
    assert "step " in text
    assert "partition 2, batch 3" in text
    if mode in ("sync", "in-graph"):
        assert "replica 2, step 3, partition 2, batch 3" in text
        for entry in dtrain.checkpoints.find(kept.dir):
            assert entry["step"] <= 3
        if wrong == "shape":
            found = job(anywhere, checkpoint=kept, resume=True, **MODES[mode])
            same(found.params, plain(EACH))


class Puts(Exact):
    """A model that puts its arrays into ``out``, not into the arrays that are there."""

    def loss_and_grads(self, params, batch, *, out=None, rng=None):
        loss, grads = super().loss_and_grads(params, batch)
        out.update(grads)
        return loss, out


@pytest.mark.parametrize("mode", MODES)
def test_arrays_that_are_put_into_out_are_taken(anywhere, mode):
    found = job(anywhere, Puts(), epochs=1, **MODES[mode])
    if mode in ("sync", "in-graph"):
        same(found.params, plain(EACH))
    assert all(np.isfinite(value).all() for value in found.params.values())
    assert any(value.any() for value in found.params.values())


def test_the_plan_of_these_tests():
    """All parts have full batches alone, and the bad row is where it is said to be."""
    plan = Plan(ROWS, REPLICAS, BATCH, 1)
    assert [plan.batches(part) for part in range(REPLICAS)] == [EACH] * REPLICAS
    assert BAD_ROW - plan.bounds[BAD[0]] in range(BAD[1] * BATCH, (BAD[1] + 1) * BATCH)
