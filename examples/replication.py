"""Every way of replication on the same digits: python examples/replication.py

docs/replication.md says what each is for, in TensorFlow's words and in ours.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from digits_data import load

import dtrain

#: What to call it, and what a job says for it.
WAYS = {
    "between-graph, sync": dict(mode=dtrain.Sync()),
    "between-graph, sync, 1 backup": dict(mode=dtrain.Sync(backups=1), replicas=3),
    "between-graph, async": dict(mode=dtrain.Async()),
    "between-graph, async, bounded": dict(mode=dtrain.Async(max_staleness=2)),
    "in-graph, sync": dict(replication="in-graph"),
}


def main() -> None:
    X, y = load()
    with dtrain.connect(workers=2) as client:
        print(f"{'':30} accuracy  steps  seconds  late  staleness")
        for name, way in WAYS.items():
            result = dtrain.fit(
                dtrain.models.MLP([64, 128, 10]),
                X,
                y,
                optimizer=dtrain.optim.adam(3e-3),
                batch_size=32,
                epochs=15,
                validation_split=0.2,
                metrics=["accuracy"],
                client=client,
                progress=False,
                **{"replicas": 2, **way},
            )
            seconds = sum(epoch["seconds"] for epoch in result.history)
            accuracy, oldest = result.metrics["val_accuracy"], max(result.ledger.staleness)
            print(
                f"{name:30} {accuracy:8.4f} {result.version:6} {seconds:8.2f} "
                f"{result.ledger.late:5} {oldest:10}"
            )
        in_graph_async(client, X, y)


def in_graph_async(client, X, y):
    """A train op for each replica, each called from a thread of this very program."""
    model, steps, began = dtrain.models.MLP([64, 128, 10]), 300, time.perf_counter()
    rows = np.random.default_rng(0).permutation(len(X))
    train, test = rows[360:], rows[:360]
    with dtrain.Session("replication", client=client) as session:
        session.create(model, optimizer=dtrain.optim.adam(3e-3))
        parts = [(X[part], y[part]) for part in np.array_split(train, 2)]
        ops = session.train_ops(parts, batch_size=32)
        with ThreadPoolExecutor(len(ops)) as threads:
            list(threads.map(lambda op: [op() for _ in range(steps)], ops))
        snapshot = session.pull()
        shards = dtrain.sessions.show("replication", client)["shards"].values()
        session.reset()
    accuracy = np.mean(model.predict(snapshot.params, X[test]).argmax(axis=1) == y[test])
    seconds, oldest = time.perf_counter() - began, max(max(s["staleness"]) for s in shards)
    print(
        f"{'in-graph, async':30} {accuracy:8.4f} {snapshot.version:6} {seconds:8.2f} "
        f"{0:5} {oldest:10}"
    )


# The processes of the cluster import this file: only the first may start one.
if __name__ == "__main__":
    main()
