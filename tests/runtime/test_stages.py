"""Optimizers in several stages, whose shards exchange sums: same bits, and what papers define."""

from __future__ import annotations

import numpy as np
import pytest

import dtrain
from dtrain.machines.plan import Plan
from dtrain.models import MLP
from dtrain.optim import adam, chain, clip, clip_by_global_norm, lamb, sgd

from .conftest import processes
from .reference import batches, difference
from .witness import Counted, numbered

IN_STAGES = {
    "clip+adam": lambda c: chain(clip_by_global_norm(c), adam(3e-3)),
    "clip+momentum": lambda c: chain(clip_by_global_norm(c), sgd(0.1, momentum=0.9)),
    "clips+momentum": lambda c: chain(clip(c / 20), clip_by_global_norm(c), sgd(0.1, momentum=0.9)),
    "lamb": lambda c: lamb(3e-3),
    "clip+lamb": lambda c: chain(clip_by_global_norm(c), lamb(3e-3)),
}


# -- bits ---------------------------------------------------------------------------------------


def job(digits, client, optimizer, *, longest=0.3, **changes):
    X, y = digits
    arguments = dict(
        optimizer=IN_STAGES[optimizer](longest), replicas=4, shards=2, batch_size=40, epochs=2,
        validation_split=0.2, metrics=["log_loss"], seed=7, client=client, progress=False,
    ) | changes  # fmt: skip
    return dtrain.fit(MLP([64, 96, 10]), X, y, **arguments)


def bits(result):
    timing = ("seconds", "samples_per_s")
    history = [{k: v for k, v in e.items() if k not in timing} for e in result.history]
    return {name: p.tobytes() for name, p in result.params.items()}, history


_base: dict = {}


@pytest.fixture
def base(digits, threaded, optimizer):
    """Two workers in this process, two shards; once for each optimizer."""
    if optimizer not in _base:
        _base[optimizer] = bits(job(digits, threaded, optimizer))
    return _base[optimizer]


@pytest.mark.parametrize("replication", ["between-graph", "in-graph"])
@pytest.mark.parametrize("optimizer", IN_STAGES)
def test_shards_and_transports_do_not_change_a_bit(anywhere, digits, base, optimizer, replication):
    for shards in (1, 3) if replication == "between-graph" else (3,):
        found = job(digits, anywhere, optimizer, shards=shards, replication=replication)
        assert bits(found) == base


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("transport", ["auto", "comm"])
@pytest.mark.parametrize(("workers", "threads"), [(1, 1), (1, 2), (2, 1), (3, 1)])
@pytest.mark.parametrize("optimizer", IN_STAGES)
def test_workers_do_not_change_a_bit(digits, base, optimizer, workers, threads, transport):
    with processes(workers, threads, **{"dtrain.transport": transport}) as client:
        for shards in (1, 2, 3, 5):
            assert bits(job(digits, client, optimizer, shards=shards)) == base
        assert bits(job(digits, client, optimizer, replication="in-graph")) == base


def test_clipping_changes_bits(digits, threaded):
    """The comparison can fail."""
    found = job(digits, threaded, "clip+adam", longest=0.2)
    assert bits(found) != bits(job(digits, threaded, "clip+adam"))


# -- parity -------------------------------------------------------------------------------------

ROWS, FEATURES = 211, 7
#: the longest gradient that is not clipped: some are longer, some are not
LONGEST = {"clip+adam": 0.7, "clip+momentum": 0.5, "clip+lamb": 0.75, "lamb": 0.8}


def plain(optimizer, model, X, y, *, replicas, batch_size, steps, seed=0):
    """Training on the concatenated batches, written out; and how many steps were clipped."""
    plan = Plan(len(X), replicas, batch_size, 10**6, steps)
    params = {k: np.array(v) for k, v in model.init(np.random.default_rng(seed)).items()}
    m = {k: np.zeros_like(v) for k, v in params.items()}
    v = {k: np.zeros_like(p) for k, p in params.items()}
    clipped, longest = 0, LONGEST[optimizer]
    rows = batches(plan, X, y, seed=seed, shuffle=True, steps=steps)
    for t, batch in enumerate(rows, start=1):
        _, grads = model.loss_and_grads(params, batch)
        grads = {k: np.array(g) for k, g in grads.items()}
        if optimizer.startswith("clip"):
            norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in grads.values()))
            clipped += norm > longest
            grads = {k: g * g.dtype.type(longest / max(norm, longest)) for k, g in grads.items()}
        for name, g in grads.items():
            if optimizer.endswith("momentum"):
                m[name] = 0.9 * m[name] + g
                params[name] = params[name] - 0.1 * m[name]
                continue
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            mean, variance = m[name] / (1 - 0.9**t), v[name] / (1 - 0.999**t)
            if optimizer.endswith("adam"):
                params[name] = params[name] - 3e-3 * mean / (np.sqrt(variance) + 1e-8)
                continue
            update = mean / (np.sqrt(variance) + 1e-6) + 0.01 * params[name]
            of, to = np.linalg.norm(params[name]), np.linalg.norm(update)
            ratio = of / to if of > 0 and to > 0 else 1.0
            params[name] = (params[name] - 3e-3 * ratio * update).astype(g.dtype)
    return params, clipped


def problem(dtype):
    rng = np.random.default_rng(5)
    X = rng.standard_normal((ROWS, FEATURES)).astype(dtype)
    labels = np.argmax(X @ rng.standard_normal((FEATURES, 4)), axis=1)
    return MLP([FEATURES, 9, 4], activation="tanh", dtype=dtype), X, labels


def compare(client, optimizer, dtype, bound, *, replicas, batch_size, **changes):
    model, X, y = problem(dtype)
    result = dtrain.fit(
        model, X, y, optimizer=IN_STAGES[optimizer](LONGEST[optimizer]), replicas=replicas,
        batch_size=batch_size, steps=100, client=client, progress=False, **changes,
    )  # fmt: skip
    expected, clipped = plain(
        optimizer, model, X, y, replicas=replicas, batch_size=batch_size, steps=100
    )
    if optimizer.startswith("clip"):
        assert 5 < clipped < 95, "some steps are clipped, and some are not"
    assert result.version == 100
    assert difference(result.params, expected) < bound
    return result


@pytest.mark.parametrize(("replicas", "batch_size"), [(1, 16), (3, 13)])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("float64", 1e-9)])
@pytest.mark.parametrize("optimizer", ["clip+adam", "clip+momentum", "lamb", "clip+lamb"])
def test_parity(threaded, optimizer, dtype, bound, replicas, batch_size):
    """Parts of uneven size whose last batches are ragged."""
    compare(threaded, optimizer, dtype, bound, replicas=replicas, batch_size=batch_size, shards=3)


# -- asynchronous -------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("optimizer", ["clip+adam", "lamb", "clip+lamb"])
def test_one_asynchronous_replica_is_a_plain_loop(anywhere, optimizer, shards):
    """A variable is not cut where the update needs the norm of the whole of it."""
    compare(
        anywhere, optimizer, "float64", 1e-9, replicas=1, batch_size=16, shards=shards,
        mode=dtrain.Async(),
    )  # fmt: skip


class Steep(Counted):
    """Gradients of length 5, as long as they are whole: 3 in one variable and 4 in another."""

    def init(self, rng):
        return {"a": np.zeros((self.rows, 2)), "b": np.zeros((self.rows, 2))}

    def note(self, grads, rows, step):
        grads["a"][rows[0], 0] = -3
        grads["b"][rows[0], 1] = -4


@pytest.mark.parametrize("mode", [dtrain.Async(), dtrain.Async(max_staleness=1)], ids=str)
def test_each_asynchronous_gradient_is_clipped_by_its_own_norm(anywhere, mode):
    """Over all shards, and alone: whatever else is applied at the same time."""
    rows, epochs = 60, 4
    result = dtrain.fit(
        Steep(rows, slow={1: 0.002}), *numbered(rows), mode=mode, replicas=4, shards=3,
        optimizer=chain(clip_by_global_norm(1.0), sgd(1.0)), batch_size=1, epochs=epochs,
        client=anywhere, progress=False,
    )  # fmt: skip
    assert result.ledger.applied == rows * epochs
    np.testing.assert_allclose(result.params["a"][:, 0], 0.6 * epochs, rtol=1e-12)
    np.testing.assert_allclose(result.params["b"][:, 1], 0.8 * epochs, rtol=1e-12)
    assert not result.params["a"][:, 1].any()


@pytest.mark.parametrize("optimizer", ["clip+adam", "clip+lamb"])
def test_with_backups_it_learns(anywhere, digits, optimizer):
    found = job(
        digits, anywhere, optimizer, mode=dtrain.Sync(backups=1), epochs=12, metrics=["accuracy"]
    )
    assert found.ledger.samples == [1438] * 12
    assert found.metrics["val_accuracy"] > 0.9
