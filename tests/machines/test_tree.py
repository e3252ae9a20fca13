"""Sums over replicas follow one fixed tree: the same bits, whoever comes first."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.tree import program, reduce_into, scratch_needed, tree_sum


def words(members, replicas):
    """The program's sum, written out with brackets."""
    plan = program(tuple(members), replicas)
    if plan.leaf is not None:
        return str(plan.leaf)
    registers = {}
    for op in plan.ops:
        left = str(op.left) if op.left_leaf else registers[op.left]
        right = str(op.right) if op.right_leaf else registers[op.right]
        registers[op.out] = f"({left}+{right})"
    return registers[0]


def defined(members, lo, hi):
    """The same, from the definition: halves, the left one larger; absent ones are skipped."""
    if hi - lo == 1:
        return str(lo) if lo in members else None
    mid = (lo + hi + 1) // 2
    sides = [x for x in (defined(members, lo, mid), defined(members, mid, hi)) if x is not None]
    return f"({sides[0]}+{sides[1]})" if len(sides) == 2 else (sides or [None])[0]


def reduced(grads, weights, replicas, arrival=None):
    """``reduce_into`` as the shards call it; ``arrival`` is the order of the dict of leaves."""
    members = tuple(sorted(grads))
    leaves = {i: grads[i] for i in arrival or members}
    of = tuple(weights[i] for i in members)
    like = grads[members[0]]
    scratch = [np.full_like(like, np.nan) for _ in range(scratch_needed(members, of, replicas))]
    out = np.full_like(like, np.nan)
    before = {i: g.copy() for i, g in grads.items()}
    reduce_into(members, of, replicas, leaves, out, scratch)
    for i, grad in grads.items():
        assert grad.tobytes() == before[i].tobytes(), "a leaf was written to"
    return out


@pytest.mark.parametrize(
    ("members", "replicas", "expected"),
    [
        ([0], 1, "0"),
        ([0, 1], 2, "(0+1)"),
        ([0, 1, 2], 3, "((0+1)+2)"),
        ([0, 1, 2, 3], 4, "((0+1)+(2+3))"),
        ([0, 1, 2, 3, 4], 5, "(((0+1)+2)+(3+4))"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "(((0+1)+(2+3))+((4+5)+(6+7)))"),
        ([0, 2, 3], 4, "(0+(2+3))"),
        ([1, 3], 4, "(1+3)"),
        ([2], 4, "2"),
        ([0, 4], 5, "(0+4)"),
    ],
)
def test_the_shape_is_this_one(members, replicas, expected):
    assert words(members, replicas) == expected


@st.composite
def quorums(draw, most=40):
    """(replicas, who is there)."""
    replicas = draw(st.integers(1, most))
    members = draw(st.sets(st.integers(0, replicas - 1), min_size=1))
    return replicas, sorted(members)


@given(quorums())
def test_the_shape_is_the_definition_for_all_sizes_and_absences(quorum):
    replicas, members = quorum
    assert words(members, replicas) == defined(set(members), 0, replicas)
    plan = program(tuple(members), replicas)
    assert len(plan.ops) == len(members) - 1
    assert plan.registers <= math.ceil(math.log2(replicas)) + 1
    assert (plan.leaf is None) == (len(members) > 1)


@given(st.integers(1, 33))
def test_a_host_may_sum_a_complete_subtree_ahead(replicas):
    whole = words(range(replicas), replicas)

    def visit(lo, hi):
        assert defined(set(range(lo, hi)), 0, replicas) in whole
        if hi - lo > 1:
            mid = (lo + hi + 1) // 2
            visit(lo, mid)
            visit(mid, hi)

    visit(0, replicas)


@pytest.mark.parametrize("members", [(), (0, 3), (-1, 0), (5,)])
def test_members_that_cannot_be_are_refused(members):
    with pytest.raises(ValueError, match=r"expected ids within 0\.\.2"):
        program(members, 3)


@settings(deadline=None)
@given(quorums(12), st.randoms(use_true_random=False), st.sampled_from(["float32", "float64"]))
def test_the_bits_do_not_depend_on_arrival(quorum, rng, dtype):
    replicas, members = quorum
    make = np.random.default_rng(rng.getrandbits(32))
    grads = {i: (make.standard_normal(7) * 10.0 ** make.integers(-6, 6)) for i in members}
    grads = {i: g.astype(dtype) for i, g in grads.items()}
    weights = {i: rng.choice([1.0, 1.0, 0.25, 1 / 3]) for i in members}
    first = reduced(grads, weights, replicas)
    for _ in range(3):
        arrival = rng.sample(members, len(members))
        assert reduced(grads, weights, replicas, arrival).tobytes() == first.tobytes()
    losses = {i: float(grads[i][0]) for i in members}
    backwards = dict(reversed(losses.items()))
    assert tree_sum(losses, replicas) == tree_sum(backwards, replicas)


@settings(deadline=None)
@given(quorums(24), st.integers(0, 2**32 - 1), st.booleans())
def test_the_mean_is_that_of_float64(quorum, seed, ragged):
    replicas, members = quorum
    make = np.random.default_rng(seed)
    grads = {i: make.standard_normal(50).astype("float32") for i in members}
    weights = {i: float(make.integers(1, 9)) / 8 if ragged else 1.0 for i in members}
    exact = np.average(
        np.array([grads[i].astype("float64") for i in members]),
        axis=0,
        weights=[weights[i] for i in members],
    )
    size = np.mean([np.abs(grads[i]) for i in members], axis=0)
    error = np.abs(reduced(grads, weights, replicas) - exact)
    # Each level of the tree rounds once, and so do the weights and the last division.
    assert (error <= (np.log2(replicas) + 4) * np.finfo("float32").eps * (size + 1e-3) * 8).all()


@given(quorums(16), st.randoms(use_true_random=False))
def test_whole_numbers_are_summed_exactly(quorum, rng):
    replicas, members = quorum
    values = {i: float(rng.randrange(-(2**40), 2**40)) for i in members}
    assert tree_sum(values, replicas) == sum(values.values())
    grads = {i: np.array([values[i], 1.0]) for i in members}
    mean = reduced(grads, dict.fromkeys(members, 1.0), replicas)
    expected = sum(values.values()) * (1.0 / len(members)) if len(members) > 1 else mean[0]
    assert mean[0] == expected


def test_the_tree_is_not_a_sum_from_left_to_right():
    values = {0: 1e16, 1: 1.0, 2: 1.0, 3: 1.0}
    assert tree_sum(values, 4) == 1e16 + 2.0
    assert ((1e16 + 1.0) + 1.0) + 1.0 == 1e16


@pytest.mark.parametrize("weight", [1.0, 0.5, 1 / 3, 7.0])
def test_the_weight_of_one_alone_cancels_to_the_bit(weight):
    grad = np.array([0.1, 1 / 3, 1e-30, -0.0], "float32")
    out = reduced({2: grad}, {2: weight}, 5)
    assert out.tobytes() == grad.tobytes()


def test_full_batches_need_no_scaling_and_no_scratch_for_it():
    members = (0, 1, 2, 3)
    assert scratch_needed(members, (1.0,) * 4, 4) == 1
    assert scratch_needed(members, (1.0, 0.5, 1.0, 0.25), 4) == 3
    assert scratch_needed((0, 1), (1.0, 1.0), 4) == 0
    assert scratch_needed((3,), (1.0,), 4) == 0


def test_who_is_absent_weighs_nothing():
    grads = {0: np.array([2.0]), 3: np.array([8.0])}
    assert reduced(grads, {0: 1.0, 3: 0.5}, 4)[0] == 4.0
    assert reduced(grads, {0: 1.0, 3: 1.0}, 4)[0] == 5.0


def test_a_value_that_is_not_finite_is_not_hidden():
    for bad in (math.nan, math.inf, -math.inf):
        grads = {i: np.array([1.0, bad if i == 2 else 1.0]) for i in range(5)}
        out = reduced(grads, {i: 1.0 if i else 0.5 for i in range(5)}, 5)
        assert math.isfinite(out[0])
        assert not math.isfinite(out[1])
        assert not math.isfinite(tree_sum({i: float(g[1]) for i, g in grads.items()}, 5))
