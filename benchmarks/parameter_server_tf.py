"""The coordinator of TensorFlow's ParameterServerStrategy: a program for an environment of its own.

Started by :mod:`benchmarks.parameter_server`; imports nothing that comes with dtrain.  Each line
on its standard input is an order, each on its standard output an answer; it ends, and ends its
servers, once its input does.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import threading
import time
from itertools import pairwise
from typing import Any

from benchmarks import environment
from benchmarks.workloads import LEARNING_RATE, MOMENTUM

WORKERS, SERVERS = 2, 1
#: Seconds of one scheduled function.  It has as many steps as fit: TensorFlow's own advice, against
#: the cost of scheduling, which would be most of a small model's step.
PACKED = 0.1


def main() -> None:
    environment.check()
    wire = os.fdopen(os.dup(1), "w")
    # What TensorFlow prints is not for whoever reads the answers.
    os.dup2(2, 1)
    quiet()
    jobs = {"worker": WORKERS, "ps": SERVERS, "chief": 1}
    spec = addresses(jobs)
    context = multiprocessing.get_context("spawn")
    servers, lines = [], []
    for job in ("worker", "ps"):
        for index in range(jobs[job]):
            theirs, ours = context.Pipe(duplex=False)
            process = context.Process(target=serve, args=(theirs, job, index, spec), daemon=True)
            process.start()
            theirs.close()
            servers.append(process)
            lines.append(ours)

    import tensorflow as tf

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=wire, flush=True)

    tf.config.threading.set_intra_op_parallelism_threads(1)
    cluster = tf.train.ClusterSpec(spec)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    answer(tensorflow=tf.__version__, servers=[server.pid for server in servers])
    job = None
    for line in sys.stdin:
        order = json.loads(line)
        if "workload" in order:
            job = Job(tf, strategy, coordinator, order["workload"])
        assert job is not None
        answer(rate=job.rate(order["seconds"]), packed=job.packed)
    for server in servers:
        server.terminate()
    for server in servers:
        server.join(5)
        if server.is_alive():
            server.kill()
    # The coordinator's threads still look for its workers.
    os._exit(0)


def quiet() -> None:
    os.environ.update(
        TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="", GRPC_FAIL_FAST="use_caller"
    )


def addresses(jobs: dict[str, int]) -> dict[str, list[str]]:
    """Addresses that are free; they are held until all are found, so that no two are alike."""
    held: list[socket.socket] = []

    def free() -> str:
        held.append(socket.socket())
        held[-1].bind(("127.0.0.1", 0))
        return f"127.0.0.1:{held[-1].getsockname()[1]}"

    found = {job: [free() for _ in range(count)] for job, count in jobs.items()}
    for each in held:
        each.close()
    return found


def serve(line: Any, job: str, index: int, spec: dict[str, list[str]]) -> None:
    """The body of a worker or a server; it ends when the coordinator has."""

    def leave() -> None:
        try:
            line.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=leave, daemon=True).start()
    environment.check()
    quiet()
    import tensorflow as tf

    # One thread computes; the second one moves what it computes with.
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=1, inter_op_parallelism_threads=2
    )
    cluster = tf.train.ClusterSpec(spec)
    tf.distribute.Server(
        cluster, job_name=job, task_index=index, protocol="grpc", config=config
    ).join()


class Job:
    """A model on the server, and a step that the workers run."""

    def __init__(self, tf: Any, strategy: Any, coordinator: Any, workload: dict[str, Any]) -> None:
        widths, self.batch, seed = workload["widths"], workload["batch"], workload["seed"]
        self.coordinator = coordinator
        with strategy.scope():
            weights = [
                tf.Variable(tf.random.normal([a, b], stddev=(2 / a) ** 0.5, seed=seed))
                for a, b in pairwise(widths)
            ]
            biases = [tf.Variable(tf.zeros([b])) for b in widths[1:]]
            variables = [*weights, *biases]
            optimizer = tf.keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)
            optimizer.build(variables)

        def replica(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
                    x = tf.matmul(x, weight) + bias
                    if i < len(weights) - 1:
                        x = tf.nn.relu(x)
                loss = tf.reduce_mean(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=x)
                )
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        @tf.function
        def steps(iterator: Any, count: Any) -> None:
            for _ in tf.range(count):
                strategy.run(replica, args=next(iterator))

        def batches() -> Any:
            """On a worker: batches of mixed rows, made one ahead."""
            read = {name: tf.io.read_file(path) for name, path in workload["rows"].items()}
            x = tf.reshape(tf.io.decode_raw(read["x"], tf.float32), [-1, widths[0]])
            y = tf.io.decode_raw(read["y"], tf.int64)
            rows = tf.shape(x, out_type=tf.int64)[0]
            order = tf.data.Dataset.range(rows).shuffle(rows).repeat()
            order = order.batch(self.batch, drop_remainder=True)
            return order.map(lambda of: (tf.gather(x, of), tf.gather(y, of))).prefetch(1)

        self.steps = steps
        self.iterator = iter(coordinator.create_per_worker_dataset(batches))
        self.packed = 1
        # A tensor: for each Python number the function would be made anew.
        self.count = tf.constant(1)
        for _ in range(2):
            self.seconds(2)
        each = self.seconds(2)
        self.packed = max(1, round(PACKED / each))
        self.count = tf.constant(self.packed)

    def seconds(self, rounds: int) -> float:
        """How long so many scheduled functions for each worker take."""
        began = time.perf_counter()
        for _ in range(rounds * WORKERS):
            self.coordinator.schedule(self.steps, args=(self.iterator, self.count))
        self.coordinator.join()
        return time.perf_counter() - began

    def rate(self, seconds: float) -> float:
        """Samples/s."""
        rounds = max(1, round(seconds * 2 / self.seconds(2)))
        return rounds * WORKERS * self.packed * self.batch / self.seconds(rounds)


if __name__ == "__main__":
    main()
