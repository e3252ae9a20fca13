"""The fixed binary tree over logical replicas that every sum over replicas follows.

Its shape depends on the number of replicas alone, so a sum has the same bits whatever the
transport, the workers, or the order of arrival.  Absent replicas are skipped: their node is
its other child.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np


class Op(NamedTuple):
    """One addition: ``registers[out] = left + right``.

    An operand is a leaf (``leaf=True``: the index of a replica) or a register.
    """

    out: int
    left: int
    left_leaf: bool
    right: int
    right_leaf: bool


class Program(NamedTuple):
    """Additions in order; the sum is in register 0, or is the one leaf if there are none."""

    ops: tuple[Op, ...]
    registers: int
    leaf: int | None


@lru_cache(maxsize=256)
def program(members: tuple[int, ...], replicas: int) -> Program:
    """The additions that sum ``members`` (sorted logical ids) out of ``replicas``."""
    present = frozenset(members)
    if not present or min(present) < 0 or max(present) >= replicas:
        raise ValueError(f"members: found {members}, expected ids within 0..{replicas - 1}")
    ops: list[Op] = []
    used = 0

    def visit(lo: int, hi: int, register: int) -> tuple[int, bool] | None:
        nonlocal used
        if hi - lo == 1:
            return (lo, True) if lo in present else None
        mid = (lo + hi + 1) // 2
        left = visit(lo, mid, register)
        # The left sum may occupy `register`, so the right one goes to the next.
        right = visit(mid, hi, register + 1 if left and not left[1] else register)
        if left is None or right is None:
            return left or right
        ops.append(Op(register, *left, *right))
        used = max(used, register + 1)
        return register, False

    root = visit(0, replicas, 0)
    assert root is not None
    return Program(tuple(ops), used, root[0] if root[1] else None)


def tree_sum(values: Mapping[int, float], replicas: int) -> float:
    """Sum plain floats (losses, weights) in the tree's order."""
    plan = program(tuple(sorted(values)), replicas)
    if plan.leaf is not None:
        return float(values[plan.leaf])
    registers = [0.0] * plan.registers
    for op in plan.ops:
        left = values[op.left] if op.left_leaf else registers[op.left]
        right = values[op.right] if op.right_leaf else registers[op.right]
        registers[op.out] = float(left) + float(right)
    return registers[0]


@lru_cache(maxsize=256)
def _prepared(
    members: tuple[int, ...], weights: tuple[float, ...], replicas: int
) -> tuple[Program, float]:
    """What all the slices of a step have in common: the additions, and the sum of the weights."""
    total = tree_sum(dict(zip(members, weights, strict=True)), replicas)
    return program(members, replicas), total


def reduce_into(
    members: tuple[int, ...],
    weights: Sequence[float],
    replicas: int,
    leaves: Mapping[int, Any],
    out: Any,
    scratch: Sequence[Any],
    xp: Any = np,
) -> None:
    """Write ``sum(w_i g_i) / sum(w_i)`` over ``members`` to ``out``; zeros if no row counts.

    Parameters
    ----------
    members, weights
        Sorted logical ids, and the weight of each (1.0 for a full batch).
    leaves : mapping of int to ndarray, shape (n,)
        The gradients, or a slice of each; not written to.
    out : ndarray, shape (n,)
    scratch : sequence of ndarray, shape (n,)
        At least :func:`scratch_needed` of them.
    """
    plan, total = _prepared(members, tuple(weights), replicas)
    if plan.leaf is not None:
        # One member: its weight cancels out, to the bit.
        out[...] = leaves[plan.leaf]
        return
    count = out.dtype.type
    registers = [out, *scratch[: max(plan.registers - 1, 0)]]
    terms = leaves
    if any(weight != 1.0 for weight in weights):
        spare = iter(scratch[max(plan.registers - 1, 0) :])
        terms = {
            member: leaves[member]
            if weight == 1.0
            else xp.multiply(leaves[member], count(weight), out=next(spare))
            for member, weight in zip(members, weights, strict=True)
        }
    for op in plan.ops:
        left = terms[op.left] if op.left_leaf else registers[op.left]
        right = terms[op.right] if op.right_leaf else registers[op.right]
        xp.add(left, right, out=registers[op.out])
    if total != 1.0:
        xp.multiply(out, count(1.0 / total if total else 0.0), out=out)


def scratch_needed(members: tuple[int, ...], weights: Sequence[float], replicas: int) -> int:
    """How many scratch arrays :func:`reduce_into` wants for these members."""
    scaled = sum(weight != 1.0 for weight in weights)
    return max(program(members, replicas).registers - 1, 0) + scaled
