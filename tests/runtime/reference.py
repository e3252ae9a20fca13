"""Plain single-process training, written out: what the distributed one must equal."""

from __future__ import annotations

import numpy as np

from dtrain.machines.plan import Plan, order


def batches(plan: Plan, X, y, *, seed: int, shuffle: bool, steps: int):
    """The concatenated batch of all replicas, step by step."""
    for step in range(steps):
        epoch, index = plan.locate(step)
        rows = []
        for part in plan.members(step):
            start, stop = plan.bounds[part], plan.bounds[part + 1]
            mixed = order(seed, epoch, part, stop - start, shuffle)
            mine = np.arange(start, stop) if mixed is None else start + mixed
            rows.append(mine[index * plan.batch_size : (index + 1) * plan.batch_size])
        chosen = np.concatenate(rows)
        yield X[chosen], y[chosen]


def train(
    model, optimizer: str, X, y, *, replicas, batch_size, steps, seed=0, shuffle=True, lr=0.05
):
    """Parameters after ``steps`` of SGD or Adam on the concatenated batches."""
    plan = Plan(len(X), replicas, batch_size, 10**6, steps)
    params = {k: np.array(v) for k, v in model.init(np.random.default_rng(seed)).items()}
    m = {k: np.zeros_like(v) for k, v in params.items()}
    v = {k: np.zeros_like(p) for k, p in params.items()}
    losses = []
    for t, batch in enumerate(
        batches(plan, X, y, seed=seed, shuffle=shuffle, steps=steps), start=1
    ):
        loss, grads = model.loss_and_grads(params, batch)
        losses.append(loss)
        for name, g in grads.items():
            if optimizer == "sgd":
                params[name] = params[name] - params[name].dtype.type(lr) * g
                continue
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            mean, variance = m[name] / (1 - 0.9**t), v[name] / (1 - 0.999**t)
            params[name] = params[name] - lr * mean / (np.sqrt(variance) + 1e-8)
    return params, losses


def difference(found: dict, expected: dict) -> float:
    """The largest difference over the largest value, over all parameters."""
    gap = max(float(np.abs(found[k] - expected[k]).max()) for k in expected)
    return gap / max(float(np.abs(value).max()) for value in expected.values())
