from __future__ import annotations

import inspect
import json
import pickle
import tracemalloc
import warnings
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain import optim, schedules
from dtrain.arrays import ALIGNMENT, address, to_numpy, xp_of
from dtrain.errors import SpecError
from dtrain.optim import (
    Optimizer,
    Schedule,
    Transform,
    _transforms,
    adagrad,
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
    rmsprop,
    sgd,
    warmup_cosine,
)
from dtrain.optim._base import KINDS
from tests.numbers.training import run, step

OPTIMIZERS = [
    sgd(),
    sgd(0.1),
    sgd(0.1, weight_decay=0.05),
    sgd(0.1, momentum=0.9),
    sgd(0.01, momentum=0.9, weight_decay=0.01),
    sgd(0.1, momentum=0.5, nesterov=True),
    sgd(0.01, momentum=0.95, nesterov=True, weight_decay=0.1),
    adam(),
    adam(0.1, betas=(0.5, 0.9)),
    adam(0.01, eps=1e-3, weight_decay=0.1),
    adam(0.01, betas=(0.0, 0.999)),
    adamw(),
    adamw(0.05, betas=(0.8, 0.99), weight_decay=0.3),
    adamw(0.01, eps=1e-2, weight_decay=0.0),
    adagrad(),
    adagrad(0.1, lr_decay=0.02, weight_decay=0.05),
    adagrad(0.05, initial_accumulator_value=0.3, eps=1e-3),
    rmsprop(),
    rmsprop(0.02, alpha=0.8, eps=1e-4, weight_decay=0.1),
    rmsprop(0.01, momentum=0.9),
    rmsprop(0.01, centered=True),
    rmsprop(0.005, alpha=0.98, weight_decay=0.02, momentum=0.5, centered=True),
    sgd(linear(0.1, 0.01, 20), momentum=0.9),
    adam(warmup_cosine(0.1, 10, 40, final=0.01, start=0.02), weight_decay=0.1),
    adamw(exponential(0.05, 0.9), weight_decay=0.3),
    adagrad(piecewise([3, 30], [0.1, 0.02, 0.05]), lr_decay=0.01),
    rmsprop(linear(0.001, 0.02, 60), momentum=0.5, centered=True),
    ftrl(),
    ftrl(0.5, lr_power=-0.3, l1=0.2, l2=0.1, beta=1.0, initial_accumulator_value=0.0),
    ftrl(linear(0.1, 0.5, 20), l2=0.01),
    lamb(),
    lamb(0.1, betas=(0.5, 0.9), eps=1e-3, weight_decay=0.0),
    lamb(warmup_cosine(0.1, 10, 40, final=0.01, start=0.02), weight_decay=0.1),
    chain(clip(0.5), adam(0.1)),
    chain(clip(0.5), ftrl(0.1)),
    chain(clip_by_global_norm(1.0), sgd(0.1, momentum=0.9)),
    chain(clip_by_global_norm(30.0), clip(0.5), clip_by_global_norm(3.0), rmsprop(0.01)),
    chain(clip(2.0), clip_by_global_norm(1.0), adamw(linear(0.1, 0.01, 20))),
    chain(clip_by_global_norm(1.0), clip(0.1), lamb(0.1)),
]
ONE_PASS = [optimizer for optimizer in OPTIMIZERS if optimizer.stages == 1]
each = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
each_in_one_pass = pytest.mark.parametrize("optimizer", ONE_PASS, ids=repr)
CLASSES = {
    "sgd": "SGD",
    "adam": "Adam",
    "adamw": "AdamW",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
}
each_of_torch = pytest.mark.parametrize(
    "optimizer", [made for made in OPTIMIZERS if made.inner.kind in CLASSES], ids=repr
)


def rate(optimizer, step):
    """The learning rate after `step` steps."""
    lr = optimizer.inner.args["lr"]
    return lr(step) if isinstance(lr, Schedule) else lr


def problem(dtype, n=1000, steps=50, seed=0):
    rng = np.random.default_rng(seed)
    scales = 10.0 ** rng.uniform(-3, 1, n)
    params = rng.standard_normal(n).astype(dtype)
    return params, (rng.standard_normal((steps, n)) * scales).astype(dtype)


def clipped_by_torch(tensor, transforms):
    torch = pytest.importorskip("torch")
    for transform in transforms:
        (limit,) = transform.args.values()
        if transform.kind == "clip":
            torch.nn.utils.clip_grad_value_([tensor], limit)
        else:
            # PyTorch divides by the norm + 1e-6, so let it have a limit that undoes this.
            length = float(torch.linalg.vector_norm(tensor.grad, dtype=torch.float64))
            undone = limit * (length + 1e-6) / length if length > limit else limit
            torch.nn.utils.clip_grad_norm_([tensor], undone)


@each_of_torch
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-13)])
def test_equals_torch(xp, optimizer, dtype, tolerance):
    torch = pytest.importorskip("torch", reason="the reference is torch.optim")
    params, grads = problem(dtype)
    tensor = torch.nn.Parameter(torch.tensor(params.copy()))
    kind = optimizer.inner.kind
    arguments = {**optimizer.inner.args, "lr": rate(optimizer, 0)}
    reference = getattr(torch.optim, CLASSES[kind])([tensor], **arguments)
    for number, grad in enumerate(grads):
        reference.param_groups[0]["lr"] = rate(optimizer, number)
        tensor.grad = torch.tensor(grad)
        clipped_by_torch(tensor, optimizer.transforms)
        reference.step()
    expected = tensor.detach().numpy()
    found, slots = run(optimizer, xp.asarray(params), xp.asarray(grads))
    assert found.dtype == dtype
    assert np.abs(to_numpy(found) - expected).max() < tolerance * np.abs(expected).max()
    for name, slot in slots.items():
        value = reference.state[tensor][name].numpy()
        assert np.abs(to_numpy(slot) - value).max() < tolerance * np.abs(value).max()
    assert np.abs(expected - params).max() > 1e-3  # it moved


@pytest.mark.parametrize("kind", CLASSES)
def test_defaults_are_those_of_torch(kind):
    torch = pytest.importorskip("torch", reason="the reference is torch.optim")
    theirs = inspect.signature(getattr(torch.optim, CLASSES[kind])).parameters
    for name, value in Optimizer(kind).args.items():
        assert value == theirs[name].default


@each_in_one_pass
@settings(max_examples=15, deadline=None)
@given(cuts=st.sets(st.integers(1, 299), max_size=6), seed=st.integers(0, 99))
def test_slices_and_buffers_do_not_change_a_bit(optimizer, cuts, seed):
    params, grads = problem("float32", n=300, steps=3, seed=seed)
    whole, whole_slots = run(optimizer, params, grads)
    for in_place in (False, True):
        for a, b in pairwise([0, *sorted(cuts), 300]):
            part, part_slots = run(optimizer, params[a:b], grads[:, a:b], in_place=in_place)
            assert part.tobytes() == whole[a:b].tobytes()
            for name in optimizer.slots:
                assert part_slots[name].tobytes() == whole_slots[name][a:b].tobytes()


@each_in_one_pass
def test_an_update_is_the_one_stage_and_can_go_in_chunks(optimizer):
    params, grads = problem("float32", n=300, steps=3)
    expected, expected_slots = run(optimizer, params, grads)
    slots, scratch = optimizer.init(params), optim.make_scratch(optimizer, "float32", 37)
    for t, grad in enumerate(grads, 1):
        optim.apply(optimizer, t, grad.copy(), params, slots, params, slots, scratch, 37)
    assert params.tobytes() == expected.tobytes()
    assert all(slots[name].tobytes() == expected_slots[name].tobytes() for name in slots)


@each
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_update_leaves_its_inputs_alone(xp, optimizer, dtype):
    params, grads = (xp.asarray(a) for a in problem(dtype, steps=1))
    slots = {name: xp.full_like(params, 0.5) for name in optimizer.slots}
    before = params.copy()
    out, out_slots = xp.empty_like(params), {name: xp.empty_like(params) for name in slots}
    # More scratch arrays than needed, and longer ones.
    scratch = optim.make_scratch(optimizer, dtype, 2000, xp) * 3
    step(optimizer, 1, grads[0], params, slots, out, out_slots, scratch=scratch)
    assert (params == before).all()
    assert all((slot == 0.5).all() for slot in slots.values())
    assert not (out == before).all()
    assert out.dtype == dtype


@each
def test_zero_padding_stays_as_it_is(optimizer):
    zeros = np.zeros(16, "float32")
    for in_place in (False, True):
        params, slots = run(optimizer, zeros, np.zeros((3, 16), "float32"), in_place=in_place)
        assert not params.any()
        for name, slot in slots.items():
            assert (slot == np.float32(optimizer.initial[name])).all()


@each
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_init(xp, optimizer, dtype):
    params = xp.ones(1001, dtype)[1:]
    slots = optimizer.init(params)
    assert tuple(slots) == optimizer.slots == tuple(optimizer.initial)
    for name, slot in slots.items():
        assert (xp_of(slot), slot.dtype, slot.shape) == (xp, dtype, (1000,))
        assert address(slot) % ALIGNMENT == 0
        assert (slot == slot.dtype.type(optimizer.initial[name])).all()


@each
def test_a_step_allocates_no_arrays(optimizer):
    params, grads = problem("float32", n=100_000, steps=1)
    slots = optimizer.init(params)
    scratch = optim.make_scratch(optimizer, "float32", params.size)
    blocks = dict(starts=np.arange(0, params.size, 10_000), scratch=scratch)
    step(optimizer, 1, grads[0], params, slots, params, slots, **blocks)
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        step(optimizer, 2, grads[0], params, slots, params, slots, **blocks)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < 20_000  # a block is 40 kB


@each_in_one_pass
def test_not_a_number_flows_through_without_a_warning(optimizer):
    params, grads = problem("float32", n=8, steps=1)
    grads[0, :3] = np.nan, np.inf, 3e38
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, _ = run(optimizer, params, grads)
    assert np.isnan(found[0])
    assert np.isfinite(found[3:]).all()


def test_steps_count_from_one():
    zeros = np.zeros(2)
    with pytest.raises(ValueError, match="t: found 0"):
        sgd().update(0, zeros, zeros, {}, zeros, {}, [zeros])


@pytest.mark.parametrize(
    ("optimizer", "stages", "sums", "scratch"),
    [
        (sgd(), 1, 0, 1),
        (ftrl(), 1, 0, 2),
        (lamb(), 2, 2, 1),
        (chain(clip(1), sgd()), 1, 0, 1),
        (chain(clip(1), clip(2), rmsprop()), 1, 0, 2),
        (chain(clip_by_global_norm(1), adam()), 2, 1, 1),
        (chain(clip_by_global_norm(1), clip(1), clip_by_global_norm(1), adam()), 3, 1, 1),
        (chain(clip_by_global_norm(1), lamb()), 3, 2, 1),
        (chain(clip(1), lamb()), 2, 2, 1),
    ],
    ids=repr,
)
def test_stages(optimizer, stages, sums, scratch):
    assert (optimizer.stages, optimizer.sums, optimizer.scratch) == (stages, sums, scratch)
    one = np.ones(1)
    slots = optimizer.init(one)
    arguments = (1, one, one, slots, one, slots, [one, one], np.zeros(1, int), None)
    for index in (-1, stages):
        with pytest.raises(ValueError, match=f"index: found {index}, expected a stage below"):
            optimizer.stage(index, *arguments)
    for index in (-1, stages - 1):
        with pytest.raises(ValueError, match=f"index: found {index}, expected one below"):
            optimizer.resolve(index, np.ones((sums, 1)), np.zeros(1, int))
    if stages > 1:
        with pytest.raises(ValueError, match=f"in one pass, expected {stages} stages"):
            optimizer.update(1, one, one, slots, one, slots, [one, one])


@each
def test_an_optimizer_is_a_value(optimizer):
    plain = json.loads(json.dumps(optimizer.to_dict()))
    for again in (
        Optimizer.from_dict(plain),
        optim.from_name(plain.pop("kind"), **plain),
        pickle.loads(pickle.dumps(optimizer)),
        eval(repr(optimizer), vars(optim).copy()),
    ):
        assert again == optimizer
        assert hash(again) == hash(optimizer)
        assert again.args == optimizer.args
    assert len(optim.make_scratch(optimizer, "float64", 10)) == optimizer.scratch


def test_different_optimizers_differ():
    assert len(set(OPTIMIZERS)) == len(OPTIMIZERS)
    with pytest.raises(TypeError):
        sgd().args["lr"] = 1.0


def test_slots():
    assert sgd().slots == ()
    assert sgd(momentum=0.9).slots == ("momentum_buffer",)
    assert adam().slots == adamw().slots == ("exp_avg", "exp_avg_sq")
    assert adagrad().initial == {"sum": 0.0}
    assert adagrad(initial_accumulator_value=0.1).initial == {"sum": 0.1}
    assert rmsprop().slots == ("square_avg",)
    everything = rmsprop(momentum=0.9, centered=True)
    assert everything.slots == ("square_avg", "grad_avg", "momentum_buffer")


@pytest.mark.parametrize("alpha", [0.0, 0.9, 0.99])
def test_centered_rmsprop_of_a_constant_gradient_is_finite(alpha):
    """The variance is then all rounding error: PyTorch takes the root of a negative number."""
    grads = np.full((3000, 64), np.linspace(0.1, 10, 64), "float32")
    optimizer = rmsprop(1e-3, alpha=alpha, centered=True)
    params, _ = run(optimizer, np.zeros(64, "float32"), grads)
    # No step is longer than the rate over the root of the least variance.
    limit = 3000 * 1e-3 / np.sqrt(np.finfo("float32").eps)
    assert (params < 0).all()
    assert (params > -1.01 * limit).all()


def test_the_parts_of_a_chain():
    made = chain(clip(2), clip_by_global_norm(1), adam(0.1))
    assert made.transforms == (clip(2.0), clip_by_global_norm(1.0))
    assert made.inner == adam(0.1)
    assert made.slots == adam().slots
    assert repr(made) == (
        "chain(clip(clip_value=2.0), clip_by_global_norm(max_norm=1.0), "
        "adam(lr=0.1, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0))"
    )
    assert made.to_dict() == {
        "kind": "chain",
        "transforms": [
            {"kind": "clip", "clip_value": 2.0},
            {"kind": "clip_by_global_norm", "max_norm": 1.0},
        ],
        "optimizer": adam(0.1).to_dict(),
    }
    assert (sgd().inner, sgd().transforms) == (sgd(), ())


def test_a_chain_in_a_chain_is_flat():
    flat = chain(clip(1), clip_by_global_norm(2), clip(3), adam())
    assert chain(clip(1), chain(clip_by_global_norm(2), chain(clip(3), adam()))) == flat
    nested = {"kind": "adam"}
    for transform in (clip(3), clip_by_global_norm(2), clip(1)):
        nested = {"kind": "chain", "transforms": [transform.to_dict()], "optimizer": nested}
    assert Optimizer.from_dict(nested) == flat
    for _ in range(2000):
        nested = {"kind": "chain", "transforms": [clip(1)], "optimizer": nested}
    deep = Optimizer.from_dict(nested)
    assert deep.transforms == (clip(1),) * 2000 + flat.transforms
    assert deep.stages == 2


def test_a_transform_is_a_value():
    for made in (clip(1), clip_by_global_norm(0.5)):
        plain = made.to_dict()
        for again in (
            Transform(plain.pop("kind"), plain),
            pickle.loads(pickle.dumps(made)),
            eval(repr(made), vars(optim).copy()),
        ):
            assert again == made
            assert hash(again) == hash(made)
    assert clip(1) != clip(2)
    assert clip(1) != clip_by_global_norm(1)
    with pytest.raises(TypeError):
        clip(1).args["clip_value"] = 2.0


def test_numbers_of_any_kind_become_plain_ones():
    made = sgd(lr=np.float32(0.5), momentum=1, nesterov=True)
    assert made.args == {"lr": 0.5, "momentum": 1.0, "nesterov": True, "weight_decay": 0.0}
    assert {type(value) for value in made.args.values()} == {float, bool}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sgd(lr=-0.1), "sgd.lr: found -0.1, expected a finite number from 0 up"),
        (lambda: sgd(lr=True), "sgd.lr: found True"),
        (lambda: sgd(lr="0.1"), "sgd.lr: found '0.1', expected .*, or a schedule of dtrain.optim"),
        (lambda: adam(lr=abs), "adam.lr: found <built-in function abs>, expected a finite number"),
        (lambda: adam(lr={"peak": 1}), "adam.lr.kind: found None, expected one of 'warmup_cosine'"),
        (
            lambda: adam(lr={"kind": "lienar"}),
            r"adam.lr.kind: found 'lienar'.*did you mean 'linear'",
        ),
        (
            lambda: adam(lr={"kind": "linear", "start": 0.1, "stop": -1, "steps": 3}),
            "adam.lr.stop: found -1, expected a finite number from 0 up",
        ),
        (
            lambda: adam(lr={"kind": "linear", "start": 0.1, "steps": 3}),
            "adam.lr: found no argument 'stop', expected at least 'start', 'stop', 'steps'",
        ),
        (
            lambda: adam(lr={"kind": "linear", "begin": 0.1}),
            "adam.lr: found an argument 'begin', expected only 'start', 'stop', 'steps'",
        ),
        (lambda: adagrad(eps=0.0), "adagrad.eps: found 0.0, expected a finite number from 1e-30"),
        (lambda: adagrad(lr_decay=-1), "adagrad.lr_decay: found -1"),
        (
            lambda: adagrad(initial_accumulator_value=-0.1),
            "adagrad.initial_accumulator_value: found -0.1, expected a finite number from 0 up",
        ),
        (lambda: rmsprop(alpha=1.0), "rmsprop.alpha: found 1.0, expected .*0 up and below 1"),
        (lambda: rmsprop(centered=1), "rmsprop.centered: found 1, expected True or False"),
        (lambda: sgd(lr=float("nan")), "sgd.lr: found nan"),
        (lambda: sgd(lr=float("inf")), "sgd.lr: found inf"),
        (lambda: sgd(lr=10**400), "sgd.lr: found 1000"),
        (lambda: sgd(momentum=-1), "sgd.momentum: found -1"),
        (lambda: sgd(momentum=0.9, nesterov=1), "sgd.nesterov: found 1, expected True or False"),
        (lambda: sgd(nesterov=True), "sgd.nesterov: found True with momentum 0"),
        (lambda: sgd(weight_decay=None), "sgd.weight_decay: found None"),
        (lambda: adam(betas=(0.9, 1.0)), r"adam.betas\[1\]: found 1.0, .*0 up and below 1"),
        (lambda: adam(betas=(-0.1, 0.9)), r"adam.betas\[0\]: found -0.1"),
        (lambda: adam(betas=0.9), "adam.betas: found 0.9, expected two numbers"),
        (lambda: adam(betas=(0.9,)), "adam.betas: found"),
        (lambda: adamw(eps=0), "adamw.eps: found 0, expected a finite number from 1e-30 up"),
        (lambda: ftrl(lr_power=0.5), "ftrl.lr_power: found 0.5, expected a number from -1 to 0"),
        (lambda: ftrl(lr_power=-1.1), "ftrl.lr_power: found -1.1, expected a number from -1 to 0"),
        (lambda: ftrl(lr_power=False), "ftrl.lr_power: found False"),
        (lambda: ftrl(l1=-1), "ftrl.l1: found -1, expected a finite number from 0 up"),
        (lambda: ftrl(l2=None), "ftrl.l2: found None"),
        (lambda: ftrl(beta="1"), "ftrl.beta: found '1'"),
        (
            lambda: ftrl(initial_accumulator_value=0),
            "ftrl.beta: found 0.0 with initial_accumulator_value 0.0, expected one of them from",
        ),
        (lambda: lamb(betas=(1.0, 0.9)), r"lamb.betas\[0\]: found 1.0"),
        (lambda: lamb(eps=0), "lamb.eps: found 0, expected a finite number from 1e-30 up"),
        (lambda: clip(0), "clip.clip_value: found 0, expected a finite number from 1e-30 up"),
        (lambda: clip(None), "clip.clip_value: found None"),
        (lambda: clip_by_global_norm(-1), "clip_by_global_norm.max_norm: found -1"),
        (lambda: clip_by_global_norm(float("inf")), "clip_by_global_norm.max_norm: found inf"),
        (lambda: Transform("clip"), "clip: found no argument 'clip_value', expected it"),
        (lambda: Transform("clop", {}), "transform: found 'clop'.*did you mean 'clip'"),
        (lambda: chain(), "chain: found no parts, expected transforms and last an optimizer"),
        (lambda: chain(adam()), r"chain.transforms: found \(\), expected a list .*, not empty"),
        (lambda: chain(clip(1)), r"chain: found clip\(clip_value=1.0\) as the last part"),
        (lambda: chain(clip(1), clip(2)), r"chain: found clip\(clip_value=2.0\) as the last part"),
        (lambda: chain(adam(), adam()), r"chain.transforms\[0\]: found adam\(.*a transform of"),
        (lambda: chain(clip(1), "adam"), "chain.optimizer: found 'adam', expected an optimizer"),
        (
            lambda: optim.from_name("chain", transforms=[{"kind": "clip"}], optimizer=adam()),
            r"chain.transforms\[0\]: found no argument 'clip_value'",
        ),
        (
            lambda: optim.from_name(
                "chain", transforms=[clip(1), {"kind": "clip", "max_norm": 1}], optimizer=adam()
            ),
            r"chain.transforms\[1\]: found an argument 'max_norm', expected only 'clip_value'",
        ),
        (
            lambda: optim.from_name("chain", transforms=[{"kind": "norm"}], optimizer=adam()),
            r"chain.transforms\[0\].kind: found 'norm', expected one of 'clip'",
        ),
        (
            lambda: optim.from_name("chain", transforms={"kind": "clip"}, optimizer=adam()),
            "chain.transforms: found {'kind': 'clip'}, expected a list of transforms",
        ),
        (
            lambda: optim.from_name("chain", transforms=[clip(1)], optimizer={"kind": "adm"}),
            "chain.optimizer.kind: found 'adm'.*did you mean 'adam'",
        ),
        (
            lambda: chain(clip(1), {"kind": "adam", "lr": {"kind": "exponential", "lr": -1}}),
            "chain.optimizer.lr.lr: found -1",
        ),
        (
            lambda: chain(clip(1), {"kind": "sgd", "nesterov": True}),
            "chain.optimizer.nesterov: found True with momentum 0",
        ),
        (
            lambda: chain(
                clip(1), {"kind": "chain", "transforms": [{"kind": "clip", "clip_value": 0}]}
            ),
            "chain.optimizer: found no argument 'optimizer', expected transforms and optimizer",
        ),
        (
            lambda: optim.from_name("chain", optimizer=adam()),
            "chain: found no argument 'transforms', expected transforms and optimizer",
        ),
        (
            lambda: optim.from_name("chain", transforms=[clip(1)], optimizer=adam(), lr=1),
            "chain: found an argument 'lr', expected only 'transforms', 'optimizer'",
        ),
        (lambda: optim.from_name("adm"), "optimizer: found 'adm'.*'sgd'.*did you mean 'adam'"),
        (lambda: optim.from_name(["sgd"]), "optimizer: found"),
        (lambda: Optimizer.from_dict({"lr": 0.1}), "optimizer: found None"),
        (
            lambda: optim.from_name("adam", learning_rate=0.1),
            "adam: found an argument 'learning_rate', expected only 'lr', 'betas'",
        ),
        (lambda: optim.from_name("sgd", momentun=0.1), "did you mean 'momentum'"),
    ],
)
def test_refused(make, message):
    with pytest.raises(SpecError, match=message):
        make()


def test_public_names():
    assert {optimizer.kind for optimizer in OPTIMIZERS} == set(KINDS)
    kinds = [name for name in optim.__all__ if name.islower()]
    made = {**KINDS, **schedules._KINDS, **_transforms._KINDS}
    assert kinds == sorted(made)
    assert set(optim.__all__) - set(kinds) == {"Optimizer", "Schedule", "Transform"}
