"""Learning-rate schedules: their values, PyTorch's, what they refuse, and that they are values."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain import optim
from dtrain.errors import SpecError
from dtrain.optim import Optimizer, Schedule, exponential, linear, piecewise, warmup_cosine
from dtrain.optim._base import KINDS
from tests.numbers import training

SCHEDULES = [
    warmup_cosine(1e-3, 100, 1000),
    warmup_cosine(peak=0.1, warmup_steps=0, total_steps=7, final=0.01),
    warmup_cosine(0.1, 5, 6, final=0.2, start=0.3),
    exponential(0.1, 0.9),
    exponential(0.1, 0.5, every=10, staircase=True),
    exponential(0.1, 1.01, every=3),
    piecewise([10, 20], [0.1, 0.01, 0.0]),
    piecewise([], [0.3]),
    linear(0.0, 0.1, 20),
    linear(0.1, 0.0, 1),
]
each = pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)

STEPS = 50

#: Ours, and its twin: the optimizer's own rate, and the scheduler's class and arguments.
TWINS = [
    (
        warmup_cosine(0.02, 10, 40, final=0.001),
        1.0,
        "LambdaLR",
        lambda: {
            "lr_lambda": lambda step: (
                0.02 * step / 10
                if step < 10
                else 0.001 + 0.019 * 0.5 * (1 + math.cos(math.pi * min((step - 10) / 30, 1)))
            )
        },
    ),
    (
        warmup_cosine(0.02, 0, STEPS, final=0.003),
        0.02,
        "CosineAnnealingLR",
        lambda: {"T_max": STEPS, "eta_min": 0.003},
    ),
    (exponential(0.02, 0.95), 0.02, "ExponentialLR", lambda: {"gamma": 0.95}),
    (
        exponential(0.02, 0.5, every=8, staircase=True),
        0.02,
        "StepLR",
        lambda: {"step_size": 8, "gamma": 0.5},
    ),
    (
        exponential(0.02, 0.5, every=8),
        0.02,
        "LambdaLR",
        lambda: {"lr_lambda": lambda step: 0.5 ** (step / 8)},
    ),
    (
        piecewise([5, 6, 30], [0.02, 0.01, 0.005, 0.0025]),
        0.02,
        "MultiStepLR",
        lambda: {"milestones": [5, 6, 30], "gamma": 0.5},
    ),
    (
        linear(0.002, 0.02, 30),
        0.02,
        "LinearLR",
        lambda: {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 30},
    ),
    (
        linear(0.02, 0.0, 40),
        0.02,
        "LinearLR",
        lambda: {"start_factor": 1.0, "end_factor": 0.0, "total_iters": 40},
    ),
]


@pytest.mark.parametrize(
    ("ours", "lr", "scheduler", "arguments"), TWINS, ids=[f"{t[0]!r}-{t[2]}" for t in TWINS]
)
@pytest.mark.parametrize(
    ("kind", "twin", "more"),
    [
        ("sgd", "SGD", {"momentum": 0.9}),
        ("adam", "Adam", {}),
        ("adamw", "AdamW", {"weight_decay": 0.1}),
        ("adagrad", "Adagrad", {"lr_decay": 0.01}),
        ("rmsprop", "RMSprop", {"momentum": 0.5}),
    ],
)
def test_training_equals_torch(ours, lr, scheduler, arguments, kind, twin, more):
    torch = pytest.importorskip("torch", reason="the reference is torch.optim.lr_scheduler")
    rng = np.random.default_rng(0)
    params = rng.standard_normal(500).astype("float32")
    grads = rng.standard_normal((STEPS, 500)).astype("float32")

    tensor = torch.nn.Parameter(torch.tensor(params.copy()))
    reference = getattr(torch.optim, twin)([tensor], lr=lr, **more)
    schedule = getattr(torch.optim.lr_scheduler, scheduler)(reference, **arguments())
    for step, grad in enumerate(grads):
        assert ours(step) == pytest.approx(reference.param_groups[0]["lr"], rel=1e-12, abs=1e-15)
        tensor.grad = torch.tensor(grad)
        reference.step()
        schedule.step()
    expected = tensor.detach().numpy()

    optimizer = optim.from_name(kind, lr=ours, **more)
    slots, scratch = optimizer.init(params), optim.make_scratch(optimizer, "float32")
    found = params.copy()
    for t, grad in enumerate(grads, 1):
        optim.apply(optimizer, t, grad.copy(), found, slots, found, slots, scratch)
    assert np.abs(found - expected).max() < 1e-6 * np.abs(expected).max()
    assert np.abs(expected - params).max() > 1e-2  # it moved


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (
            warmup_cosine(1.0, 2, 6),
            {0: 0, 1: 0.5, 2: 1, 3: 0.5 + math.sqrt(0.125), 4: 0.5, 6: 0, 7: 0, 10**9: 0},
        ),
        (warmup_cosine(1.0, 4, 5, final=0.5, start=0.2), {0: 0.2, 1: 0.4, 4: 1, 5: 0.5, 6: 0.5}),
        (warmup_cosine(1.0, 0, 2, start=0.7), {0: 1, 1: 0.5, 2: 0}),
        (exponential(1.0, 0.25, every=2), {0: 1, 1: 0.5, 2: 0.25, 4: 0.0625, 10**9: 0}),
        (exponential(1.0, 0.25, every=2, staircase=True), {0: 1, 1: 1, 2: 0.25, 3: 0.25}),
        (exponential(1.0, 2.0), {1: 2, 10**9: math.inf}),
        (exponential(0.0, 2.0), {1: 0, 10**9: 0}),
        (piecewise([2, 3], [3.0, 2.0, 1.0]), {0: 3, 1: 3, 2: 2, 3: 1, 10**9: 1}),
        (piecewise([], [3.0]), {0: 3, 9: 3}),
        (linear(0.0, 1.0, 4), {0: 0, 1: 0.25, 4: 1, 5: 1, 10**9: 1}),
        (linear(0.3, 0.1, 3), {0: 0.3, 3: 0.1, 4: 0.1}),
    ],
    ids=repr,
)
def test_values(schedule, values):
    for step, value in values.items():
        assert schedule(step) == pytest.approx(value, rel=1e-15, abs=1e-15)


@each
@given(step=st.integers(0, 10**6))
def test_a_rate_is_a_float_from_zero_up_and_always_the_same(schedule, step):
    value = schedule(step)
    assert type(value) is float
    assert value >= 0
    assert schedule(np.int64(step)) == value
    assert type(schedule(np.int64(step))) is float


def test_steps_count_from_zero():
    with pytest.raises(ValueError, match="step: found -1"):
        linear(0, 1, 2)(-1)


def test_the_first_update_uses_the_first_rate():
    grad, params = np.ones(3), np.ones(3)
    made = optim.sgd(linear(0.0, 0.5, 1))
    for t, value in ((1, 1.0), (2, 0.5), (3, 0.0)):
        made.update(t, grad.copy(), params, {}, params, {}, [np.empty(3)])
        assert params.tolist() == [value] * 3


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"chain"}))
def test_a_rate_of_zero_leaves_the_parameters(kind):
    decay = {} if kind == "ftrl" else {"weight_decay": 0.1}
    made = optim.from_name(kind, lr=warmup_cosine(0.1, 5, 10), **decay)
    params = np.linspace(-1, 1, 9)
    slots, found = made.init(params), params.copy()
    training.step(made, 1, np.ones(9), found, slots, found, slots)
    assert found.tobytes() == params.tobytes()
    training.step(made, 2, np.ones(9), found, slots, found, slots)
    assert (found != params).all()


@each
def test_a_schedule_is_a_value(schedule):
    plain = json.loads(json.dumps(schedule.to_dict()))
    for again in (
        Schedule.from_dict(plain),
        pickle.loads(pickle.dumps(schedule)),
        eval(repr(schedule), vars(optim).copy()),
    ):
        assert again == schedule
        assert hash(again) == hash(schedule)
        assert type(again) is type(schedule)
    name = dataclasses.fields(schedule)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(schedule, name, 1.0)


@each
@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"chain"}))
def test_it_travels_in_its_optimizer(kind, schedule):
    optimizer = optim.from_name(kind, lr=schedule)
    plain = json.loads(json.dumps(optimizer.to_dict()))
    assert plain["lr"]["kind"] == schedule.kind
    again = Optimizer.from_dict(plain)
    assert again == optimizer
    assert hash(again) == hash(optimizer)
    assert again.args["lr"] == schedule


def test_different_schedules_differ():
    assert len(set(SCHEDULES)) == len(SCHEDULES)
    assert linear(0.1, 0.2, 3) != linear(0.1, 0.2, 4)


def test_numbers_of_any_kind_become_plain_ones():
    made = piecewise(boundaries=[np.int64(3), 5.0], values=(1, np.float32(0.5), 0))
    assert made.to_dict() == {"kind": "piecewise", "boundaries": [3, 5], "values": [1.0, 0.5, 0.0]}
    assert {type(b) for b in made.boundaries} == {int}
    assert {type(v) for v in made.values} == {float}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: warmup_cosine(-1, 1, 2), "warmup_cosine.peak: found -1, expected a finite number"),
        (lambda: warmup_cosine(1, -1, 2), "warmup_cosine.warmup_steps: found -1, .* from 0 up"),
        (lambda: warmup_cosine(1, 1.5, 2), "warmup_cosine.warmup_steps: found 1.5, .* whole"),
        (lambda: warmup_cosine(1, 0, 0), "warmup_cosine.total_steps: found 0, .* from 1 up"),
        (
            lambda: warmup_cosine(1, 9, 9),
            "warmup_cosine.total_steps: found 9 with 9 steps of warm-up, expected more",
        ),
        (lambda: warmup_cosine(1, 1, 2, final=math.nan), "warmup_cosine.final: found nan"),
        (lambda: warmup_cosine(1, 1, 2, start="0"), "warmup_cosine.start: found '0'"),
        (lambda: exponential(0.1, -0.5), "exponential.decay: found -0.5"),
        (lambda: exponential(math.inf, 0.5), "exponential.lr: found inf"),
        (lambda: exponential(0.1, 0.5, every=0), "exponential.every: found 0, .* from 1 up"),
        (
            lambda: exponential(0.1, 0.5, staircase=1),
            "exponential.staircase: found 1, expected True or False",
        ),
        (lambda: piecewise(3, [1]), "piecewise.boundaries: found 3, expected a list of numbers"),
        (lambda: piecewise([0], [1, 2]), r"piecewise.boundaries\[0\]: found 0, .* from 1 up"),
        (lambda: piecewise([3], [1, -2]), r"piecewise.values\[1\]: found -2"),
        (lambda: piecewise([3], "ab"), "piecewise.values: found 'ab', expected a list"),
        (
            lambda: piecewise([3, 3], [1, 2, 3]),
            r"piecewise.boundaries: found \[3, 3\], expected each above the one before",
        ),
        (
            lambda: piecewise([3], [1, 2, 3]),
            "piecewise.values: found 3 with 1 boundaries, expected one more",
        ),
        (lambda: linear(0, 1, True), "linear.steps: found True, expected a whole number"),
        (lambda: Schedule.from_dict({"kind": "line"}), "schedule.kind: found 'line'.*'linear'"),
        (
            lambda: Schedule.from_dict({"kind": "linear", "start": 1}, "lr"),
            "lr: found no argument 'stop', expected at least 'start', 'stop', 'steps'",
        ),
        (
            lambda: Schedule.from_dict({"kind": "exponential", "rate": 1}),
            "schedule: found an argument 'rate', expected only 'lr', 'decay'",
        ),
    ],
)
def test_refused(make, message):
    with pytest.raises(SpecError, match=message):
        make()


def test_a_schedule_of_ones_own_could_not_travel():
    @dataclasses.dataclass(frozen=True)
    class mine(Schedule):
        def _rate(self, step):
            return 0.1

    with pytest.raises(SpecError, match=r"sgd.lr.kind: found 'mine', expected one of 'warmup"):
        optim.sgd(mine())
