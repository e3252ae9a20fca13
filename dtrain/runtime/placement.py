"""Which worker runs which replicas, and which may host shards."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

from dtrain.machines.jobs import HostPlan
from dtrain.machines.membership import Member


def place(
    workers: Sequence[Member],
    replicas: int,
    shards: int | None,
    local_bytes: Mapping[int, Mapping[str, int]],
    near: Callable[[Member], bool] = lambda member: True,
) -> tuple[HostPlan, ...]:
    """Spread replicas evenly, each where most of its part lies, and choose who may have shards.

    Parameters
    ----------
    workers : sequence of Member
        Those that are ready, in order of joining.
    shards : int or None
        How many shards there are at most, if that is known; which of the hosts has which shard is
        chosen once the model is known (:func:`dtrain.partition.assign`).
    local_bytes : mapping of int to mapping of str to int
        Replica -> address -> bytes of its part that lie there.
    near : callable
        Whether a worker can look into the memory where the job's state is: the chief is such a
        one, if there is any.

    Returns
    -------
    tuple of HostPlan
        Those with replicas first, and of these the chief.
    """
    addresses = [w.address for w in workers]
    rank = {address: number for number, address in enumerate(addresses)}
    most = -(-replicas // len(workers))
    at: dict[str, list[int]] = {address: [] for address in addresses}
    # The least loaded first, in order of joining; entries of a load that has changed are stale.
    idle = [(0, number) for number in range(len(addresses))]
    gain = {i: max(local_bytes.get(i, {}).values(), default=0) for i in range(replicas)}
    # Those with the most to gain choose first; ties go to the lower id.
    for i in sorted(gain, key=lambda i: (-gain[i], i)):
        holding = [
            (-rows, len(at[a]), rank[a])
            for a, rows in local_bytes.get(i, {}).items()
            if a in at and len(at[a]) < most
        ]
        if holding:
            home = addresses[min(holding)[2]]
        else:
            while len(at[addresses[idle[0][1]]]) != idle[0][0]:
                heapq.heappop(idle)
            home = addresses[idle[0][1]]
        at[home].append(i)
        heapq.heappush(idle, (len(at[home]), rank[home]))
    far = {w.address for w in workers if not near(w)}
    close = [a for a in addresses if a not in far]
    if close and not any(at[a] for a in close):
        # The chief has replicas, and can look into the memory where the state is.
        busiest = max(addresses, key=lambda a: (len(at[a]), -rank[a]))
        at[close[0]].append(at[busiest].pop())
    # Replicas first: a shard beside a replica saves its messages.
    ranked = sorted(addresses, key=lambda a: (not at[a], a in far, min(at[a], default=replicas)))
    count = len(ranked) if shards is None else shards
    names = {w.address: w.name for w in workers}
    return tuple(
        HostPlan(a, names[a], tuple(sorted(at[a])))
        for number, a in enumerate(ranked)
        if at[a] or number < count
    )


def better(hosts: Sequence[HostPlan], workers: int, replicas: int) -> bool:
    """Whether with so many workers the busiest would have fewer replicas than it has now."""
    busiest = max((len(h.replicas) for h in hosts), default=replicas)
    return -(-replicas // max(workers, 1)) < busiest
