"""Models whose parameters tell what was applied, and replicas that are slow by their number."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np


def who(rng) -> tuple[int, int]:
    """Which replica computes, and from which version: its generator is keyed by them."""
    return tuple(rng.bit_generator.seed_seq.entropy[2:])


class Counted:
    """With ``sgd(1)``, ``times`` counts for each row how often a gradient of it was applied.

    Parameters
    ----------
    rows : int
    pace : float
        Seconds that a batch takes.
    slow : mapping of int to float
        Likewise, for some replicas.
    log : path
        A file for a line at the begin and the end of each batch: replica, ``b`` or ``e``, version.
    """

    uses_rng = True

    def __init__(self, rows: int, *, pace=0.0, slow: Mapping[int, float] | None = None, log=None):
        self.rows, self.pace, self.slow = rows, pace, dict(slow or {})
        self.log = None if log is None else str(log)

    def init(self, rng):
        # Several columns, so that there is something to cut into shards.
        return {"times": np.zeros((self.rows, 2))}

    def loss_and_grads(self, params, batch, *, out=None, rng=None):
        replica, step = who(rng)
        self._write(replica, "b", step)
        before = {name: np.array(value) for name, value in params.items()}
        self.look(before, step)
        time.sleep(self.slow.get(replica, self.pace))
        for name, value in params.items():
            if value.tobytes() != before[name].tobytes():
                raise RuntimeError(f"{name} has changed under replica {replica} at step {step}")
        rows = batch[0][:, 0].astype(int)
        grads = {name: np.zeros_like(value) for name, value in params.items()}
        self.note(grads, rows, step)
        self._write(replica, "e", step)
        return 1.0 + float(rows.mean()), grads

    def look(self, params, step):
        """At the parameters that are read."""

    def note(self, grads, rows, step):
        """What of the gradients is not 0."""
        grads["times"][rows] = -1

    def _write(self, *words):
        if self.log is not None:
            line = " ".join(map(str, words)) + "\n"
            handle = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(handle, line.encode())
            os.close(handle)

    def predict(self, params, x):
        return np.zeros(len(x))


class Witness(Counted):
    """With ``sgd(1)``, row ``t`` of ``told`` has 1 / n for the n rows that made step ``t``."""

    def __init__(self, rows: int, steps: int, **arguments):
        super().__init__(rows, **arguments)
        self.steps = steps

    def init(self, rng):
        return {"times": np.zeros((self.rows, 2)), "told": np.zeros((self.steps, self.rows))}

    def look(self, params, step):
        """All shards are at the version that is said to be read."""
        told, times = params["told"], params["times"]
        if told[step:].any() or not np.allclose(told.sum(0), times[:, 0], rtol=1e-9, atol=0):
            raise RuntimeError(f"parameters of step {step} are those of another, or of several")

    def note(self, grads, rows, step):
        grads["times"][rows] = -1 / len(rows)
        grads["told"][step, rows] = -1 / len(rows)


def numbered(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Data whose first column is the number of the row."""
    x = np.zeros((rows, 2))
    x[:, 0] = np.arange(rows)
    return x, np.zeros(rows)


def check_witness(params, version: int, epochs: int | None = None) -> np.ndarray:
    """Each step is what its members have computed for that very step, on all shards alike.

    Returns how often each row was trained on.
    """
    told, times = np.asarray(params["told"]), np.asarray(params["times"])
    assert not told[version:].any(), "a step that never was"
    for step, row in enumerate(told[:version]):
        found = row[row != 0]
        assert found.size, f"step {step} has no gradient"
        np.testing.assert_allclose(found, 1 / found.size, rtol=1e-12, err_msg=f"step {step}")
    np.testing.assert_allclose(times, np.stack([told.sum(0)] * 2, axis=1), rtol=1e-12)
    counts = (told != 0).sum(0)
    if epochs is not None:
        assert counts.tolist() == [epochs] * told.shape[1], "each row once an epoch"
    return counts


def lines(log: Path) -> list[tuple[int, str, int]]:
    """What a model has written to its file."""
    found = (line.split() for line in log.read_text().splitlines())
    return [(int(replica), what, int(step)) for replica, what, step in found]
