"""A calculation server and its collecting workers: python examples/calculation_server.py

The main program has a model of its own and trains it. What it trains on are decisions, which
workers make with the model of the moment, and their rewards: REINFORCE (Williams, 1992) on a
contextual bandit. The model goes to the cluster by `assign`, the data comes back by a queue.
"""

import time

import numpy as np

import dtrain

NAME, CONTEXT, ACTIONS, RATE = "bandit", 8, 4, np.float32(4)
#: Which action is the best one in a context: what the policy is to find out.
TRUTH = np.random.default_rng(7).standard_normal((CONTEXT, ACTIONS))


class Policy:
    """A softmax over linear scores of a context, float32 (n, CONTEXT)."""

    def init(self, rng):
        return {
            "weight": np.zeros((CONTEXT, ACTIONS), np.float32),
            "bias": np.zeros(ACTIONS, np.float32),
        }

    def predict(self, params, x):
        return x @ params["weight"] + params["bias"]

    def probabilities(self, params, x):
        scores = self.predict(params, x)
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    def loss_and_grads(self, params, batch):
        """Minus the mean of log p(action) times its advantage."""
        x, action, advantage = batch["x"], batch["action"], batch["advantage"]
        p, rows = self.probabilities(params, x), np.arange(len(x))
        loss = -np.mean(np.log(p[rows, action]) * advantage)
        p[rows, action] -= 1
        slope = p * (advantage / len(x))[:, None]
        return loss, {"weight": x.T @ slope, "bias": slope.sum(axis=0)}


def collect(seed):
    """On a worker: act with the newest model, until nobody wants more; how many fragments."""
    rng, policy, made = np.random.default_rng(seed), Policy(), 0
    with dtrain.Session(NAME) as session:
        queue = session.queue("experience")
        while True:
            snapshot = session.pull()
            x = rng.standard_normal((256, CONTEXT), np.float32)
            p = policy.probabilities(snapshot.params, x)
            action = (p.cumsum(axis=1) < rng.random((256, 1))).sum(axis=1).clip(max=ACTIONS - 1)
            reward = ((x @ TRUTH).argmax(axis=1) == action).astype(np.float32)
            try:
                queue.put({"x": x, "action": action, "reward": reward})
            except dtrain.QueueClosed:
                return made
            made += 1


def main():
    policy = Policy()
    params, began = policy.init(np.random.default_rng(0)), time.monotonic()
    with dtrain.connect(workers=2) as client, dtrain.Session(NAME, client=client) as session:
        # The cluster's variables, from the main program's model; and where the data comes back.
        session.create(policy, optimizer=dtrain.optim.sgd(1.0))
        session.assign(params)
        queue = session.queue("experience", capacity=8)
        collectors = [client.submit(collect, seed, pure=False) for seed in range(2)]
        step, mean = 0, 1 / ACTIONS
        while mean < 0.9 and step < 2000:
            batch = queue.get()
            mean += 0.05 * (batch["reward"].mean() - mean)
            batch["advantage"] = batch["reward"] - np.float32(mean)
            loss, grads = policy.loss_and_grads(params, batch)
            params = {name: value - RATE * grads[name] for name, value in params.items()}
            session.assign(params)
            step += 1
            if step % 50 == 0:
                print(f"step {step}: loss {loss:+.3f}, mean reward {mean:.2f}")
        queue.close()
        queue.done()
        made = client.gather(collectors)
        session.reset()
    print(f"mean reward {mean:.2f} after {step} steps and {time.monotonic() - began:.0f} s")
    print(f"fragments by collector: {made}")


if __name__ == "__main__":
    main()
