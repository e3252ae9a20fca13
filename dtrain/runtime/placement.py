"""Which worker runs which replicas and hosts which shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtrain.machines.jobs import HostPlan
from dtrain.machines.membership import Member


def place(
    workers: Sequence[Member],
    replicas: int,
    shards: int,
    local_bytes: Mapping[int, Mapping[str, int]],
) -> tuple[HostPlan, ...]:
    """Spread replicas evenly, each where most of its part lies, and shards over the hosts.

    Parameters
    ----------
    workers : sequence of Member
        Those that are ready, in order of joining.
    local_bytes : mapping of int to mapping of str to int
        Replica -> address -> bytes of its part that lie there.

    Returns
    -------
    tuple of HostPlan
        The first is the chief: it has replicas and shard 0.
    """
    addresses = [w.address for w in workers]
    most = -(-replicas // len(workers))
    load = dict.fromkeys(addresses, 0)
    home: dict[int, str] = {}
    # Those with the most to gain choose first; ties go to the lower id.
    gain = sorted(
        range(replicas), key=lambda i: (-max(local_bytes.get(i, {}).values(), default=0), i)
    )
    for i in gain:
        lies = local_bytes.get(i, {})
        open_ = [a for a in addresses if load[a] < most]
        home[i] = max(open_, key=lambda a: (lies.get(a, 0), -load[a], -addresses.index(a)))
        load[home[i]] += 1
    # Replicas first: a shard beside a replica saves its messages.
    ranked = sorted(addresses, key=lambda a: (load[a] == 0, min(_of(home, a), default=replicas)))
    hosted: dict[str, list[int]] = {a: [] for a in ranked}
    for shard in range(shards):
        hosted[ranked[shard % len(ranked)]].append(shard)
    names = {w.address: w.name for w in workers}
    return tuple(
        HostPlan(a, names[a], tuple(sorted(_of(home, a))), tuple(hosted[a]))
        for a in ranked
        if load[a] or hosted[a]
    )


def _of(home: Mapping[int, str], address: str) -> list[int]:
    return [i for i, at in home.items() if at == address]
