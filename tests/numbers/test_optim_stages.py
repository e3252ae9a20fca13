"""Optimizers and transforms that PyTorch has not, and those that need norms of whole variables."""

from __future__ import annotations

import inspect
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain import optim
from dtrain.arrays import aligned_bytes, quiet, to_numpy
from dtrain.layout import Layout
from dtrain.optim import (
    adam,
    adamw,
    chain,
    clip,
    clip_by_global_norm,
    exponential,
    ftrl,
    lamb,
    linear,
    piecewise,
    sgd,
    warmup_cosine,
)
from dtrain.optim._blocks import norm, norms, scale
from dtrain.partition import partition
from tests.numbers.training import run, step

# -- FTRL-Proximal -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "grad", "steps", "arguments", "expected"),
    [
        ([0, 0], [0.1, 0.2], 3, {}, [-2.60260963, -4.29698515]),
        ([0, 0], [0.01, 0.02], 3, {}, [-0.28432083, -0.56694895]),
        ([1, 2], [0.1, 0.2], 3, {}, [-2.55607247, -3.98729396]),
        ([4, 3], [0.01, 0.02], 3, {}, [-0.28232238, -0.56096673]),
        ([1, 2], [0.1, 0.2], 10, {"l1": 0.001}, [-7.66718769, -10.91273689]),
        ([4, 3], [0.01, 0.02], 10, {"l1": 0.001}, [-0.93460727, -1.86147261]),
        ([1, 2], [0.1, 0.2], 10, {"l1": 0.001, "l2": 2}, [-0.24059935, -0.46829352]),
        ([4, 3], [0.01, 0.02], 10, {"l1": 0.001, "l2": 2}, [-0.02406147, -0.04830509]),
        ([1, 2], [0.1, 0.2], 10, {"beta": 0.1}, [-6.096838, -9.162214]),
        ([4, 3], [0.01, 0.02], 10, {"beta": 0.1}, [-0.717741, -1.425132]),
    ],
)
def test_ftrl_gives_the_values_in_tensorflows_tests(params, grad, steps, arguments, expected):
    found, _ = run(ftrl(3.0, **arguments), np.array(params, float), np.array([grad] * steps))
    np.testing.assert_allclose(found, expected, rtol=2e-7, atol=5e-7)


def keras_ftrl(params, grads, lr, lr_power, l1, l2, beta, initial):
    """The formula in the documentation of ``keras.optimizers.Ftrl``."""
    n, z = np.full_like(params, initial), np.zeros_like(params)
    for grad in grads:
        n_before, n = n, n + grad**2
        sigma = (n**-lr_power - n_before**-lr_power) / lr
        z = z + grad - sigma * params
        quadratic = n**-lr_power / lr + 2 * (l2 + beta / (2 * lr))
        params = np.where(np.abs(z) > l1, (np.sign(z) * l1 - z) / quadratic, 0.0)
    return params, n, z


def paper_ftrl(grads, alpha, beta, lambda1, lambda2):
    """Algorithm 1 of the paper, one coordinate and one step at a time."""
    weights = []
    for column in grads.T.tolist():
        z = n = w = 0.0
        for t in range(len(column) + 1):
            if abs(z) <= lambda1:
                w = 0.0
            else:
                w = -(z - math.copysign(lambda1, z)) / ((beta + math.sqrt(n)) / alpha + lambda2)
            if t < len(column):
                g = column[t]
                sigma = (math.sqrt(n + g * g) - math.sqrt(n)) / alpha
                z += g - sigma * w
                n += g * g
        weights.append(w)
    return np.array(weights)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-13)])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"l1": 0.5, "l2": 0.3},
        {"lr": 0.5, "l1": 2.0, "beta": 1.0, "initial_accumulator_value": 0.0},
        {"lr": 0.2, "lr_power": -0.75, "l2": 0.1, "beta": 0.5},
        {"lr": 0.01, "lr_power": 0.0, "l1": 0.1},
        {"lr": 0.05, "lr_power": -1.0},
    ],
)
def test_ftrl_equals_the_formula_of_keras(xp, arguments, dtype, tolerance):
    rng = np.random.default_rng(0)
    params, grads = rng.standard_normal(500), rng.standard_normal((50, 500))
    grads *= rng.random((50, 500)) < 0.3  # of many values, most steps have no gradient
    params, grads = params.astype(dtype), grads.astype(dtype)
    made = ftrl(**arguments)
    names = ("lr", "lr_power", "l1", "l2", "beta", "initial_accumulator_value")
    expected = keras_ftrl(
        params.astype(float), grads.astype(float), *(made.args[name] for name in names)
    )
    found, slots = run(made, xp.asarray(params), xp.asarray(grads))
    for ours, theirs in zip((found, slots["accumulator"], slots["linear"]), expected, strict=True):
        assert ours.dtype == dtype
        assert np.abs(to_numpy(ours) - theirs).max() < tolerance * np.abs(theirs).max()
    if made.args["l1"] > 0.1:
        assert 0 < (found == 0).mean() < 1


def test_ftrl_equals_the_algorithm_of_the_paper():
    grads = np.random.default_rng(1).standard_normal((40, 300))
    expected = paper_ftrl(grads, alpha=0.3, beta=1.0, lambda1=1.5, lambda2=0.4)
    made = ftrl(0.3, l1=1.5, l2=0.2, beta=1.0, initial_accumulator_value=0.0)
    found, _ = run(made, np.zeros(300), grads)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-14)
    assert 0 < (expected == 0).sum() < 300
    assert (found[expected == 0] == 0).all()


@pytest.mark.parametrize(
    "schedule",
    [
        linear(0.1, 1.0, 20),
        linear(1.0, 0.01, 15),
        piecewise([3, 6, 9, 20], [0.5, 0.0, 0.1, 0.0, 0.3]),
        warmup_cosine(0.5, 4, 25),
    ],
    ids=repr,
)
def test_without_penalties_ftrl_is_gradient_descent_at_a_rate_of_each_value_its_own(schedule):
    grads = np.random.default_rng(2).standard_normal((30, 50))
    made = ftrl(schedule, beta=1.0, initial_accumulator_value=0.0)
    total, expected = np.zeros(50), np.zeros(50)
    for t, grad in enumerate(grads):
        if schedule(t):
            total += grad**2
            expected -= schedule(t) / (1 + np.sqrt(total)) * grad
        found, _ = run(made, np.zeros(50), grads[: t + 1])
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-13)


def test_a_rate_of_zero_leaves_ftrl_as_it_is():
    made = ftrl(piecewise([2], [0.1, 0.0]))
    params, grads = np.linspace(-1, 1, 9), np.ones((3, 9))
    before, slots_before = run(made, params, grads[:2])
    after, slots_after = run(made, params, grads)
    assert after.tobytes() == before.tobytes()
    assert all(slots_after[name].tobytes() == slots_before[name].tobytes() for name in made.slots)


def test_ftrl_stays_finite_as_its_rate_vanishes():
    grads = np.ones((400, 8), "float32")
    grads[:, 4:] = 0
    found, slots = run(ftrl(exponential(0.1, 0.5), beta=1.0), np.ones(8, "float32"), grads)
    assert np.isfinite(found).all()
    assert all(np.isfinite(slot).all() for slot in slots.values())
    settled, _ = run(ftrl(exponential(0.1, 0.5), beta=1.0), np.ones(8, "float32"), grads[:60])
    np.testing.assert_allclose(found, settled, rtol=1e-5)


def test_defaults_of_ftrl_and_lamb_are_those_of_keras_and_the_paper():
    assert {n: p.default for n, p in inspect.signature(ftrl).parameters.items()} == {
        "lr": 0.001,
        "lr_power": -0.5,
        "l1": 0.0,
        "l2": 0.0,
        "beta": 0.0,
        "initial_accumulator_value": 0.1,
    }
    assert ftrl().initial == {"accumulator": 0.1, "linear": 0.0}
    assert lamb().args == {
        "lr": 0.001,
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.01,
    }


# -- LAMB ----------------------------------------------------------------------------------------


def paper_lamb(variables, grads, lr, betas, eps, weight_decay):
    """Algorithm 2 of the paper; ``grads``: a list of the variables' gradients for each step."""
    (beta1, beta2), variables = betas, [x.copy() for x in variables]
    m, v = [0.0] * len(variables), [0.0] * len(variables)
    for t, step_grads in enumerate(grads, 1):
        rate = lr(t - 1) if callable(lr) else lr
        for i, g in enumerate(step_grads):
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g**2
            r = (m[i] / (1 - beta1**t)) / (np.sqrt(v[i] / (1 - beta2**t)) + eps)
            u = r + weight_decay * variables[i]
            x_norm, u_norm = np.linalg.norm(variables[i]), np.linalg.norm(u)
            ratio = x_norm / u_norm if x_norm > 0 and u_norm > 0 else 1.0
            variables[i] = variables[i] - rate * ratio * u
    return np.concatenate(variables)


#: Blocks of 40 elements, but for the last, and which variable each is part of.
STARTS, VARIABLES = list(range(0, 400, 40)), [0, 1, 1, 1, 2, 3, 3, 4, 4, 4]
BOUNDS = [0, 40, 160, 200, 280, 410]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-13)])
@pytest.mark.parametrize(
    "optimizer",
    [
        lamb(),
        lamb(0.1, betas=(0.5, 0.9), eps=1e-3, weight_decay=0.1),
        lamb(linear(0.01, 0.2, 10), weight_decay=0.0),
    ],
    ids=repr,
)
def test_lamb_equals_the_algorithm_of_the_paper(xp, optimizer, dtype, tolerance):
    rng = np.random.default_rng(3)
    params = rng.standard_normal(410).astype(dtype)
    params[BOUNDS[2] : BOUNDS[3]] = 0  # a variable that begins with zeros
    grads = (rng.standard_normal((30, 410)) * 10.0 ** rng.uniform(-3, 2, 410)).astype(dtype)
    cut = [[g[a:b].astype(float) for a, b in pairwise(BOUNDS)] for g in grads]
    variables = [params[a:b].astype(float) for a, b in pairwise(BOUNDS)]
    expected = paper_lamb(variables, cut, **optimizer.args)
    found, _ = run(
        optimizer, xp.asarray(params), xp.asarray(grads), starts=STARTS, variables=VARIABLES
    )
    assert found.dtype == dtype
    assert np.abs(to_numpy(found) - expected).max() < tolerance * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_trust_ratio_is_one_where_a_norm_is_zero(dtype):
    params = np.array([0, 0, 3, 4, 5, 12, 0, 0], dtype)
    grad = np.array([1, -1, 0, 0, 1, 1, 0, 0], dtype)
    made = lamb(0.5, eps=1e-30, weight_decay=0.0)
    slots = made.init(params)
    (ratios,) = step(made, 1, grad, params, slots, params, slots, starts=[0, 2, 4, 6])
    # The first Adam step is the sign of the gradient.
    np.testing.assert_allclose(ratios, [1, 1, 13 / math.sqrt(2), 1], rtol=1e-6)
    length = 6.5 / math.sqrt(2)
    expected = [-0.5, 0.5, 3, 4, 5 - length, 12 - length, 0, 0]
    np.testing.assert_allclose(params, expected, rtol=1e-6)


def test_lamb_moves_a_variable_of_tiny_values_by_the_same_part():
    values = np.random.default_rng(4).standard_normal(64)
    moved = []
    for size in (1.0, 2.0**-100):  # the squares of the latter are 0 in float32
        params = (values * size).astype("float32")
        found, _ = run(lamb(0.1, weight_decay=0.0), params, np.ones((1, 64), "float32"))
        moved.append(found / np.float32(size))
    np.testing.assert_allclose(moved[1], moved[0], rtol=1e-6)


# -- The same bits, however the blocks are grouped -----------------------------------------------

STAGED = [
    sgd(0.1, momentum=0.9),
    ftrl(0.1, l1=0.01),
    lamb(0.1),
    chain(clip(0.5), adam(0.1)),
    chain(clip_by_global_norm(1.0), adam(0.1)),
    chain(clip_by_global_norm(5.0), clip(0.3), clip_by_global_norm(3.0), adamw(0.1)),
    chain(clip(1.0), clip_by_global_norm(1.0), clip(0.01), lamb(0.1)),
]
each = pytest.mark.parametrize("optimizer", STAGED, ids=repr)

SHAPES = {
    "table": ((300, 411), "float32"),
    **{f"bias{i}": ((7 + i,), "float32") for i in range(40)},
    "scalar": ((), "float64"),
    "wide": ((3, 40_001), "float32"),
    "double": ((50_000,), "float64"),
    "last": ((19, 3), "float32"),
}


def model(seed=0):
    """A layout, its parameters and two gradients, as buffers."""
    rng = np.random.default_rng(seed)
    layout = Layout.of({name: np.empty(shape, dtype) for name, (shape, dtype) in SHAPES.items()})
    buffers = [aligned_bytes(layout.nbytes) for _ in range(3)]
    for buffer in buffers:
        for view in layout.views(buffer).values():
            view[...] = rng.standard_normal(view.shape) * 10.0 ** rng.uniform(-2, 1)
    return layout, buffers[0], buffers[1:]


def train(optimizer, layout, buffer, grads, shards, *, limit=None):
    """Shard by shard, in slices of whole blocks of about ``limit`` bytes; parameters and slots."""
    params = buffer.copy()
    slots = {name: aligned_bytes(layout.nbytes) for name in optimizer.slots}
    for s in layout.segments:
        for name, value in optimizer.initial.items():
            slots[name][s.start : s.stop].view(s.dtype)[:] = value
    names = [v.name for v in layout.variables]
    variables = np.array([names.index(block.variable) for block in layout.blocks])
    slices, at = [], 0
    for shard in partition(layout, shards).shards:
        for r in shard.ranges:
            while at < len(layout.blocks) and layout.blocks[at].start < r.stop:
                first, size = at, 0
                while at < len(layout.blocks) and layout.blocks[at].start < r.stop:
                    block = layout.blocks[at]
                    size += block.stop - block.start
                    if limit is not None and at > first and size > limit:
                        break
                    at += 1
                slices.append((first, at))
    assert at == len(layout.blocks)
    for t, whole in enumerate(grads, 1):
        grad, factors = whole.copy(), None
        for index in range(optimizer.stages):
            sums = []
            for first, last in slices:
                blocks = layout.blocks[first:last]
                start, stop, dtype = blocks[0].start, blocks[-1].stop, blocks[0].dtype
                views = {name: slot[start:stop].view(dtype) for name, slot in slots.items()}
                starts = [(b.start - start) // np.dtype(dtype).itemsize for b in blocks]
                flat = params[start:stop].view(dtype)
                sums.append(
                    optimizer.stage(
                        index,
                        t,
                        grad[start:stop].view(dtype),
                        flat,
                        views,
                        flat,
                        views,
                        optim.make_scratch(optimizer, dtype, flat.size),
                        np.array(starts),
                        None if factors is None else factors[first:last],
                    )
                )
            if index < optimizer.stages - 1:
                factors = optimizer.resolve(index, np.concatenate(sums, axis=1), variables)
    return params, slots


def same(one, other):
    assert one[0].tobytes() == other[0].tobytes()
    assert one[1].keys() == other[1].keys()
    assert all(slot.tobytes() == other[1][name].tobytes() for name, slot in one[1].items())


@each
def test_shards_and_slices_do_not_change_a_bit(optimizer):
    layout, params, grads = model()
    expected = train(optimizer, layout, params, grads, 1)
    assert expected[0].tobytes() != params.tobytes()
    assert not padding(layout, expected[0]).any()
    for shards, limit in ((1, 1), (1, 100_000), (2, None), (3, 1000), (1000, None)):
        same(train(optimizer, layout, params, grads, shards, limit=limit), expected)


def padding(layout, buffer):
    """All bytes that belong to no variable."""
    own = np.zeros(layout.nbytes, bool)
    for v in layout.variables:
        own[v.offset : v.offset + v.nbytes] = True
    return buffer[~own]


@each
@settings(max_examples=15, deadline=None)
@given(
    cuts=st.sets(st.integers(1, 9), max_size=9),
    seed=st.integers(0, 99),
    in_place=st.booleans(),
)
def test_groups_of_blocks_and_buffers_do_not_change_a_bit(optimizer, cuts, seed, in_place):
    rng = np.random.default_rng(seed)
    params = rng.standard_normal(410).astype("float32")
    grads = rng.standard_normal((3, 410)).astype("float32")
    blocks = dict(starts=STARTS, variables=VARIABLES)
    whole, whole_slots = run(optimizer, params, grads, **blocks)
    part, part_slots = run(optimizer, params, grads, in_place=in_place, cuts=sorted(cuts), **blocks)
    assert part.tobytes() == whole.tobytes()
    assert all(part_slots[name].tobytes() == whole_slots[name].tobytes() for name in whole_slots)


@each
def test_transforms_of_a_whole_gradient_are_those_of_the_stages(optimizer):
    layout, params, grads = model()
    expected = train(optimizer, layout, params, grads, 3)
    transformed = [grad.copy() for grad in grads]
    for grad in transformed:
        flat, starts = [], []
        for s in layout.segments:
            own = [b.start - s.start for b in layout.blocks if s.start <= b.start < s.stop]
            flat.append(grad[s.start : s.stop].view(s.dtype))
            starts.append(np.array(own) // np.dtype(s.dtype).itemsize)
        optimizer.transform(flat, starts)
        assert not padding(layout, grad).any()
    changed = any(a.tobytes() != b.tobytes() for a, b in zip(grads, transformed, strict=True))
    assert changed == bool(optimizer.transforms)
    same(train(optimizer.inner, layout, params, transformed, 2), expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=8),
    before=st.integers(0, 70),
    seed=st.integers(0, 99),
)
@settings(max_examples=50, deadline=None)
def test_the_norm_of_a_block_depends_on_nothing_but_the_block(dtype, sizes, before, seed):
    rng = np.random.default_rng(seed)
    blocks = [(rng.standard_normal(n) * 10.0 ** rng.uniform(-30, 30)).astype(dtype) for n in sizes]
    array = np.concatenate([np.ones(before, dtype), *blocks])[before:]  # anywhere in memory
    starts = np.cumsum([0, *sizes[:-1]])
    with quiet():
        found = norms(array, starts, np.empty_like(array))
        alone = [norms(block, np.zeros(1, int), np.empty_like(block)).item() for block in blocks]
    assert alone == found.tolist()
    for block, own in zip(blocks, found, strict=True):
        exact = np.sqrt((block.astype(np.longdouble) ** 2).sum())
        assert own == pytest.approx(float(exact), rel=1e-6 if dtype == "float32" else 1e-14)


# -- Clipping ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float32", 2.0**k) for k in (-140, -120, -100, 0, 100, 124)]
    + [("float64", 2.0**k) for k in (-1060, -1000, -600, 0, 600, 1015)],
)
def test_norms_hold_over_the_whole_range_of_the_type(dtype, size):
    values = np.array([3, 4, 0, 0, 0, 5, 12, 0, 0], dtype) * np.array(size, dtype)
    with quiet():
        found = norms(values, np.array([0, 2, 5, 7]), np.empty_like(values))
        together = norm(found)
    np.testing.assert_allclose(found, np.array([5, 0, 13, 0]) * size, rtol=1e-6)
    assert together == pytest.approx(math.hypot(5, 13) * size, rel=1e-6)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 1e38), ("float64", 1e305)])
@pytest.mark.parametrize("starts", [[0], [0, 3, 50]])
def test_a_finite_gradient_is_clipped_whatever_its_size(dtype, size, starts):
    direction = np.random.default_rng(5).uniform(0.1, 1, 64)
    grad = (direction * size).astype(dtype)
    params, slots = np.zeros(64, dtype), {}
    made = chain(clip_by_global_norm(2.0), sgd(1.0))
    step(made, 1, grad, params, slots, params, slots, starts=starts)
    expected = -2.0 * direction / np.linalg.norm(direction)
    np.testing.assert_allclose(params, expected, rtol=1e-6)


def test_a_gradient_within_the_norm_keeps_its_bits():
    grad = np.random.default_rng(6).standard_normal(100).astype("float32")
    for limit, kept in ((11.0, True), (1.0, False)):
        found = grad.copy()
        chain(clip_by_global_norm(limit), sgd()).transform([found], [np.array([0, 30])])
        assert (found.tobytes() == grad.tobytes()) == kept
        assert np.linalg.norm(found) <= limit * (1 + 1e-6)


def test_the_order_of_transforms_counts():
    grad = np.array([3.0, 4.0])
    for transforms, expected in (
        ((clip(2), clip_by_global_norm(1)), [math.sqrt(0.5)] * 2),
        ((clip_by_global_norm(1), clip(0.7)), [0.6, 0.7]),
    ):
        found = grad.copy()
        chain(*transforms, sgd()).transform([found], [np.zeros(1, int)])
        np.testing.assert_allclose(found, expected, rtol=1e-15)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("length", [3, 5000])
def test_factors_of_blocks(xp, dtype, length):
    rng = np.random.default_rng(7)
    factors = np.array([0.0, 0.5, 0.5, 1.0, -2.0, 1e-3, 1e-3, 3.0])
    array = rng.standard_normal(8 * length).astype(dtype)
    starts = np.arange(8) * length
    out = xp.empty(array.size, dtype)
    scale(xp.asarray(array), starts, factors, out)
    expected = array * np.repeat(factors.astype(dtype), length)
    assert to_numpy(out).tobytes() == expected.tobytes()
    # A factor that float32 has not: its product with a number of the other extreme is one.
    array = np.full(8 * length, 2.0**-120, dtype)
    factors[3] = 2.0**140
    with quiet():
        scale(xp.asarray(array), starts, factors, out)
    assert (to_numpy(out)[3 * length : 4 * length] == 2.0**20).all()


def test_the_blocks_of_a_variable_may_lie_apart():
    sums = np.array([[3.0, 1.0, 4.0, 0.0, 2.0], [6.0, 2.0, 8.0, 5.0, 0.0]])
    found = lamb().resolve(0, sums, np.array([7, 2, 7, 3, 9]))
    assert found.tolist() == [0.5, 0.5, 0.5, 1.0, 1.0]
