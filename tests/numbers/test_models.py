from __future__ import annotations

import json
import pickle
import threading
import tracemalloc
import warnings

import numpy as np
import pytest

from dtrain import models
from dtrain.arrays import ALIGNMENT, address, aligned_bytes, to_numpy
from dtrain.errors import DataError, SpecError
from dtrain.layout import Layout
from dtrain.models import MLP, Linear, Logistic

N_FEATURES = 5


def zoo(dtype="float64"):
    """Every model, loss, activation, with and without l2, one and more outputs."""
    made = []
    for l2 in (0.0, 0.3):
        common = {"l2": l2, "dtype": dtype}
        for loss in ("squared", "huber", "poisson"):
            made += [Linear(N_FEATURES, k, loss=loss, **common) for k in (1, 3)]
        made += [Logistic(N_FEATURES, k, **common) for k in (2, 4)]
        for activation in ("relu", "tanh"):
            common["activation"] = activation
            made += [
                MLP([N_FEATURES, 7, 6, 3], loss="cross_entropy", **common),
                MLP([N_FEATURES, 7, 2], loss="squared", **common),
                MLP([N_FEATURES, 7, 6, 8, 1], loss="squared", **common),
                MLP([N_FEATURES, 7, 1], loss="logistic", **common),
            ]
    return [*made, MLP([N_FEATURES, 4], dtype=dtype)]


each = pytest.mark.parametrize("model", zoo(), ids=repr)
each32 = pytest.mark.parametrize("model", zoo("float32"), ids=repr)


def example(model, n=11, *, seed=0, weights=False):
    """Parameters away from zero, and a batch."""
    rng = np.random.default_rng(seed)
    params = {
        name: (0.5 * rng.standard_normal(value.shape)).astype(value.dtype)
        for name, value in model.init(rng).items()
    }
    x = rng.standard_normal((n, N_FEATURES)).astype(model.dtype)
    if model.task == "classification":
        y = rng.integers(0, model.n_classes, n)
    else:
        k = model.widths[-1]
        y = 2 * rng.standard_normal((n, k) if k > 1 else n).astype(model.dtype)
        if model.loss_name == "poisson":
            y = np.floor(np.abs(y))
    return params, (x, y, rng.uniform(0, 3, n)) if weights else (x, y)


def on(xp, params, batch):
    return {k: xp.asarray(v) for k, v in params.items()}, tuple(map(xp.asarray, batch))


def close(a, b, tolerance):
    a, b = np.asarray(to_numpy(a), "float64"), np.asarray(to_numpy(b), "float64")
    return a.shape == b.shape and np.abs(a - b).max() <= tolerance * max(1e-3, np.abs(b).max())


def torch_loss(torch, model, params, batch):
    """The same loss written in torch; (loss, params as tensors)."""
    f = torch.nn.functional
    tensors = {k: torch.tensor(v, requires_grad=True) for k, v in params.items()}
    x, y, *w = (torch.tensor(np.asarray(a)) for a in batch)
    a = x
    for i, (weight, bias) in enumerate(model.names):
        a = a @ tensors[weight] + tensors[bias]
        if i < len(model.names) - 1:
            a = torch.relu(a) if model.activation == "relu" else torch.tanh(a)
    if model.loss_name == "cross_entropy":
        rows = f.cross_entropy(a, y, reduction="none")
    elif model.loss_name == "logistic":
        rows = f.binary_cross_entropy_with_logits(a[:, 0], y.to(a.dtype), reduction="none")
    else:
        functions = {
            "squared": f.mse_loss,
            "huber": f.huber_loss,
            "poisson": f.poisson_nll_loss,
        }
        rows = functions[model.loss_name](a, y.reshape(a.shape), reduction="none").mean(1)
    w = w[0] if w else torch.ones_like(rows)
    loss = (w * rows).sum() / w.sum()
    loss = loss + model.l2 / 2 * sum((tensors[name] ** 2).sum() for name, _ in model.names)
    return loss, tensors


@each
@pytest.mark.parametrize("weights", [False, True])
def test_gradients_equal_finite_differences(model, weights):
    params, batch = example(model, weights=weights)
    value, grads = model.loss_and_grads(params, batch)
    assert value == pytest.approx(model.loss(params, batch), rel=1e-12)
    assert list(grads) == list(params)
    h = 1e-6
    for name, param in params.items():
        slope = np.empty_like(param)
        for at in np.ndindex(param.shape):
            kept = param[at]
            param[at] = kept + h
            up = model.loss(params, batch)
            param[at] = kept - h
            slope[at] = (up - model.loss(params, batch)) / (2 * h)
            param[at] = kept
        assert close(grads[name], slope, 1e-6), name


@each
@pytest.mark.parametrize("weights", [False, True])
def test_loss_and_gradients_equal_torch(xp, model, weights):
    torch = pytest.importorskip("torch", reason="the reference is torch's autograd")
    params, batch = example(model, n=40, seed=1, weights=weights)
    loss, tensors = torch_loss(torch, model, params, batch)
    loss.backward()
    value, grads = model.loss_and_grads(*on(xp, params, batch))
    assert value == pytest.approx(loss.item(), rel=1e-12)
    for name, tensor in tensors.items():
        assert close(grads[name], tensor.grad.numpy(), 1e-12), name


@each32
def test_float32_stays_float32(xp, model):
    params, (x, y, w) = example(model, n=30, weights=True)
    exact = type(model)(**{**model.config(), "dtype": "float64"})
    wide = {k: v.astype("float64") for k, v in params.items()}
    expected, slopes = exact.loss_and_grads(wide, (x.astype("float64"), y, w))
    for cast in ("float32", "float64"):
        y_cast = y if model.task == "classification" else y.astype(cast)
        batch = (x.astype(cast), y_cast, w.astype(cast))
        value, grads = model.loss_and_grads(*on(xp, params, batch))
        assert type(value) is float
        assert value == pytest.approx(expected, rel=1e-5)
        for name, grad in grads.items():
            assert grad.dtype == np.float32
            assert close(grad, slopes[name], 1e-5)
        assert model.predict(*on(xp, params, batch[:1])[:1], xp.asarray(batch[0])).dtype == "f4"


@each32
@pytest.mark.parametrize("weights", [False, True])
def test_out_views_get_the_same_bits(xp, model, weights):
    params, batch = on(xp, *example(model, n=30, weights=weights))
    layout = Layout.of(params)
    buffer = aligned_bytes(layout.nbytes, xp)
    buffer[:] = 255
    views = layout.views(buffer)
    value, out = model.loss_and_grads(params, batch, out=views)
    assert out is views
    expected_value, expected = model.loss_and_grads(params, batch)
    assert value == expected_value
    for name, view in views.items():
        assert (view == expected[name]).all()
        assert expected[name] is not view


@each32
def test_ragged_batches_and_fresh_results(model):
    params, (x, y) = example(model, n=64)
    expected = {
        n: type(model)(**model.config()).loss_and_grads(params, (x[:n], y[:n])) for n in (64, 30, 1)
    }
    kept = {}
    for n in (30, 64, 1, 30, 64):
        value, grads = model.loss_and_grads(params, (x[:n], y[:n]))
        assert value == expected[n][0]
        kept.setdefault(n, []).append(grads)
    for n, results in kept.items():  # later steps have not touched earlier results
        for grads in results:
            for name, grad in grads.items():
                assert np.array_equal(grad, expected[n][1][name])


@each32
def test_inputs_are_only_read(model):
    params, batch = example(model, weights=True)
    copies = pickle.loads(pickle.dumps((params, batch)))
    for array in (*params.values(), *batch):
        array.flags.writeable = False
    model.loss_and_grads(params, batch)
    model.loss(params, batch)
    model.predict(params, batch[0])
    for name, value in params.items():
        assert np.array_equal(value, copies[0][name])
    for value, copy in zip(batch, copies[1], strict=True):
        assert np.array_equal(value, copy)


@each32
def test_forms_of_the_same_batch(model):
    params, (x, y, w) = example(model, n=20, weights=True)
    expected, grads = model.loss_and_grads(params, (x, y, w))
    wide = np.zeros((20, 2 * N_FEATURES))
    wide[:, ::2] = x
    column = y.reshape(20, -1)
    forms = [
        (x, column, w.reshape(-1, 1)),
        (np.asfortranarray(x), np.asfortranarray(column), w),
        (wide[:, ::2], y, np.repeat(w, 2)[::2]),
        (x.reshape(20, N_FEATURES, 1), y, 7 * w),
        [x.tolist(), y.tolist(), w.tolist()],
    ]
    if model.task == "classification":
        forms.append((x, y.astype("uint8"), w))
    for form in forms:
        value, again = model.loss_and_grads(params, form)
        assert value == pytest.approx(expected, rel=1e-5)
        assert model.loss(params, form) == pytest.approx(expected, rel=1e-5)
        for name in grads:
            assert close(again[name], grads[name], 1e-5)


@each
def test_weights_count_as_repeated_rows(model):
    params, (x, y) = example(model, n=6)
    times = np.array([3, 0, 1, 2, 0, 1])
    value, grads = model.loss_and_grads(params, (x, y, times))
    repeated = (np.repeat(x, times, 0), np.repeat(y, times, 0))
    expected, slopes = model.loss_and_grads(params, repeated)
    assert value == pytest.approx(expected, rel=1e-12)
    for name in grads:
        assert close(grads[name], slopes[name], 1e-12)


@each
def test_weights_that_are_all_zero_leave_the_penalty(model):
    params, (x, y) = example(model, n=4)
    value, grads = model.loss_and_grads(params, (x, y, np.zeros(4)))
    assert value == pytest.approx(
        model.l2 / 2 * sum((params[w] ** 2).sum() for w, _ in model.names)
    )
    for weight, bias in model.names:
        assert close(grads[weight], model.l2 * params[weight], 1e-12)
        assert not grads[bias].any()


@each32
def test_large_inputs_take_bounded_memory(model):
    """`loss` and `predict` go through the rows in pieces and give what one pass would."""
    params, (x, y, w) = example(model, n=2500, weights=True)
    scores = model.predict(params, x)
    for batch in ((x, y), (x, y, w)):
        assert model.loss(params, batch) == pytest.approx(
            model.loss_and_grads(params, batch)[0], rel=1e-5
        )
    for a, b in ((0, 7), (1020, 1030), (2400, 2500)):
        assert close(scores[a:b], model.predict(params, x[a:b]), 1e-5)


@each32
def test_predict_shapes(xp, model):
    params, (x, _) = example(model, n=9)
    params, (x,) = on(xp, params, (x,))
    k = model.widths[-1]
    shape = (9,) if k == 1 else (9, k)
    scores = model.predict(params, x)
    assert scores.shape == shape
    kept = scores.copy()
    model.predict(params, -x)
    assert (scores == kept).all()  # its own memory
    assert model.predict(params, x[:0]).shape == (0, *shape[1:])


def test_predict_is_the_raw_score():
    model = Linear(2, dtype="float64")
    params = {"weight": np.array([[2.0], [3.0]]), "bias": np.array([1.0])}
    assert model.predict(params, np.array([[1, 1], [0, 10]])).tolist() == [6.0, 31.0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_huge_logits_are_stable(xp, dtype, size):
    x = np.array([[size], [-size]])
    model = Logistic(1, dtype=dtype)
    params = {"weight": np.ones((1, 1), dtype), "bias": np.zeros(1, dtype)}
    value, grads = model.loss_and_grads(*on(xp, params, (x, np.array([1, 0]))))
    assert value == pytest.approx(0, abs=1e-40)
    assert float(abs(grads["weight"]).max()) < 1e-30
    value, grads = model.loss_and_grads(*on(xp, params, (x, np.array([0, 1]))))
    assert value == pytest.approx(size)
    assert float(grads["weight"][0, 0]) == pytest.approx(size)
    model = Logistic(1, 3, dtype=dtype)
    params = {"weight": np.array([[1, 0, -1]], dtype), "bias": np.zeros(3, dtype)}
    value, grads = model.loss_and_grads(*on(xp, params, (x, np.array([0, 2]))))
    assert value == pytest.approx(0, abs=1e-40)
    value, grads = model.loss_and_grads(*on(xp, params, (x, np.array([2, 0]))))
    assert value == pytest.approx(2 * size)
    assert to_numpy(grads["weight"]).tolist() == [pytest.approx([size, 0, -size])]


@each32
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e38])
def test_not_a_number_flows_through_without_a_warning(model, bad):
    params, (x, y) = example(model)
    x[3] = bad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value, _ = model.loss_and_grads(params, (x, y))
        model.predict(params, x)
        again = model.loss(params, (x, y))
    if np.isnan(bad):
        assert np.isnan(value)
        assert np.isnan(again)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(
    ("model", "n"),
    [
        # Many rows: each array with a row axis has at least 128 kB.
        (MLP([20, 30, 4], l2=0.1), 32_000),
        (MLP([20, 30, 25, 1], activation="tanh", loss="logistic"), 32_000),
        (MLP([20, 30, 2], loss="squared"), 32_000),
        (Linear(20, 2, loss="huber"), 32_000),
        (Linear(20, 2, loss="poisson", l2=0.1), 32_000),
        (Logistic(20, 4), 32_000),
        # Large weights: each has at least 400 kB.
        (MLP([400, 300, 350], l2=0.1), 8),
        (Linear(400, 300), 8),
    ],
    ids=repr,
)
def test_a_step_allocates_no_arrays(model, n, weights):
    rng = np.random.default_rng(0)
    params, out = model.init(rng), model.init(rng)
    x = rng.standard_normal((n, model.widths[0]))  # float64: it is cast in the workspace
    y = rng.integers(0, 2, n) if model.n_classes else rng.random((n, model.widths[-1]))
    batch = (x, y, np.ones(n, "float32")) if weights else (x, y)
    model.loss_and_grads(params, batch, out=out)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(2):
            model.loss_and_grads(params, batch, out=out)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    # What is left are NumPy's own buffers, for broadcasting and casting 8192 elements at a time.
    assert peak < 100_000


def test_threads_do_not_share_scratch():
    model = MLP([N_FEATURES, 50, 3], dtype="float32")
    cases = [example(model, n=200, seed=seed) for seed in range(2)]
    expected = [model.loss_and_grads(*case) for case in cases]
    wrong = []
    start = threading.Barrier(2, timeout=30)

    def work(i):
        start.wait()
        for _ in range(200):
            value, grads = model.loss_and_grads(*cases[i])
            if value != expected[i][0] or any((grads[k] != expected[i][1][k]).any() for k in grads):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_scratch_is_aligned_and_of_the_parameters_dtype():
    model = MLP([N_FEATURES, 9, 3])
    params, batch = example(model, n=7)
    model.loss_and_grads(params, batch)
    space = model._spaces.like(params["dense0.weight"])
    floats = [v for v in space._flat.values() if v.dtype.kind == "f"]
    assert len(floats) >= 5
    assert all(v.dtype == "float32" and address(v) % ALIGNMENT == 0 for v in floats)


def test_scratch_grows_to_the_largest_batch_and_keeps_nothing_else_alive():
    model = MLP([N_FEATURES, 9, 3])
    params, (x, y) = example(model, n=600)
    for n in (10, 300, 7, *range(1, 600)):
        model.loss_and_grads(params, (x[:n], y[:n]))
    space = model._spaces.like(params["dense0.weight"])
    assert space._flat["act0"].size == 599 * 9
    for (name, rows, _), view in space._views.items():
        assert len(view) == rows
        assert name == "row_starts" or np.shares_memory(view, space._flat[name])
    assert len(space._views) <= 512


@each
def test_a_model_is_a_value(model):
    params, batch = example(model)
    value, _ = model.loss_and_grads(params, batch)  # has scratch now
    rebuilt = type(model)(**json.loads(json.dumps(model.config())))
    copy = pickle.loads(pickle.dumps(model))
    assert len(pickle.dumps(model)) < 2000
    evaluated = eval(repr(model), {"MLP": MLP, "Linear": Linear, "Logistic": Logistic})
    named = models.from_name(type(model).__name__.lower(), **model.config())
    for again in (rebuilt, copy, evaluated, named):
        assert again == model
        assert hash(again) == hash(model)
        assert again.loss_and_grads(params, batch)[0] == value


def test_different_models_differ():
    made = zoo() + zoo("float32")
    assert len(set(made)) == len(made)
    assert Linear(3) != Logistic(3)
    assert Linear(3) != "Linear(3)"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_initial_values(dtype):
    for model in (Linear(3, 2, dtype=dtype), Logistic(3, dtype=dtype)):
        params = model.init(np.random.default_rng(0))
        assert {k: v.shape for k, v in params.items()} == {
            "weight": model.widths,
            "bias": model.widths[1:],
        }
        assert all(not v.any() and v.dtype == dtype for v in params.values())
    for activation, variance in (("relu", 2 / 400), ("tanh", 2 / 700)):
        model = MLP([400, 300, 10], activation=activation, dtype=dtype)
        params = model.init(np.random.default_rng(0))
        again = model.init(np.random.default_rng(0))
        assert list(params) == ["dense0.weight", "dense0.bias", "dense1.weight", "dense1.bias"]
        assert all(np.array_equal(params[k], again[k]) for k in params)
        assert all(v.dtype == dtype for v in params.values())
        assert params["dense0.weight"].var() == pytest.approx(variance, rel=0.02)
        assert params["dense0.weight"].mean() == pytest.approx(0, abs=1e-3)
        assert not params["dense0.bias"].any()
        assert params["dense1.weight"].shape == (300, 10)


def test_task_and_classes():
    assert (Linear(3).task, Linear(3).n_classes) == ("regression", None)
    assert (Logistic(3).task, Logistic(3).n_classes) == ("classification", 2)
    assert Logistic(3, 5).n_classes == MLP([3, 5]).n_classes == 5
    assert MLP([3, 1], loss="logistic").n_classes == 2
    assert MLP([3, 1], loss="squared").n_classes is None


nan = float("nan")


@pytest.mark.parametrize(
    ("model", "x_shape", "dtype", "y_shape"),
    [
        (Linear(4), (9, 4), "float32", (9,)),
        (Linear(4), (9, 4), "int64", (9, 1)),
        (Linear(4), (nan, 4), "bool", (nan,)),
        (Linear(4), (None, 4), "float16", (9,)),
        (Linear(4), (9, 4), "float64", None),
        (Linear(4, 2), (9, 4), "float32", (9, 2)),
        (Linear(4), (9, 2, 2), "uint8", (9,)),
        (Linear(1), (9,), "float32", (9,)),
        (Logistic(4, 3), (9, 4), "float32", (9,)),
        (MLP([4, 8, 3]), (9, 4), "float32", (9, 1)),
    ],
)
def test_check_accepts(model, x_shape, dtype, y_shape):
    model.check(x_shape, np.dtype(dtype), y_shape)


@pytest.mark.parametrize(
    ("model", "x_shape", "dtype", "y_shape", "message"),
    [
        (Linear(4), (9, 5), "f4", (9,), r"x: found shape \(9, 5\), expected 4 features"),
        (Linear(4), (9,), "f4", (9,), r"x: found shape \(9,\), expected 4 features"),
        (Linear(1), (), "f4", (), r"x: found shape \(\), expected 1 features"),
        (Linear(4), (9, 4), "O", (9,), "x: found dtype object, expected real numbers"),
        (Linear(4), (9, 4), "c8", (9,), "x: found dtype complex64"),
        (Linear(4, 2), (9, 4), "f4", (9,), r"y: found shape \(9,\), expected 2 target"),
        (Linear(4), (9, 4), "f4", (9, 2), r"y: found shape \(9, 2\), expected 1 target"),
        (Logistic(4, 3), (9, 4), "f4", (9, 3), r"y: found shape \(9, 3\), expected one class"),
        (Linear(4), (9, 4), "f4", (8,), "y: found 8 rows, expected 9"),
    ],
)
def test_check_refuses(model, x_shape, dtype, y_shape, message):
    with pytest.raises(DataError, match=message):
        model.check(x_shape, np.dtype(dtype), y_shape)


X, Y = np.ones((3, 4), "float32"), np.zeros(3, "int64")


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (Linear(4), {"x": X, "y": Y}, r"batch: found dict, expected \(x, y\)"),
        (Linear(4), (X,), "batch: found tuple"),
        (Linear(4), (X[:, :3], Y), "x: found 3 features, expected 4"),
        (Linear(4), (X[:0], Y[:0]), r"x: found shape \(0, 4\), expected at least one row"),
        (Linear(4), (X, Y[:2]), r"y: found shape \(2,\), expected 3 rows"),
        (Linear(4), (X, np.zeros((3, 2))), r"y: found shape \(3, 2\), expected \(3,\) or \(3, 1\)"),
        (Linear(4, 2), (X, Y), r"y: found shape \(3,\), expected \(3, 2\)"),
        (Linear(4), (X, Y, np.ones(2)), r"w: found shape \(2,\), expected \(3,\) or \(3, 1\)"),
        (Linear(4), (X, Y, np.ones((1, 3))), r"w: found shape \(1, 3\)"),
        (Logistic(4), (X, np.array([0, 1, 2])), "class indices from 0 to 2, expected 0 to 1"),
        (Logistic(4, 3), (X, np.array([0, -1, 2])), "class indices from -1 to 2, expected 0 to 2"),
        (Logistic(4, 3), (X, np.array([0, 1, 3])), "class indices from 0 to 3, expected 0 to 2"),
        (Logistic(4, 3), (X, np.ones(3)), "y: found float64, expected class indices"),
        (MLP([4, 3]), (X, np.zeros((3, 3), int)), r"y: found shape \(3, 3\), expected \(3,\)"),
    ],
)
def test_batches_that_do_not_fit_are_refused(model, batch, message):
    params = model.init(np.random.default_rng(0))
    for call in (model.loss_and_grads, model.loss):
        with pytest.raises(DataError, match=message):
            call(params, batch)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Linear(0), "n_features: found 0, expected a whole number from 1 up"),
        (lambda: Linear(3, n_outputs=1.5), "n_outputs: found 1.5"),
        (lambda: Linear(3, loss="huberr"), "loss: found 'huberr'.*did you mean 'huber'"),
        (lambda: Linear(3, loss="cross_entropy"), "loss: found 'cross_entropy', expected one of"),
        (lambda: Linear(3, l2=-1), "l2: found -1, expected a finite number from 0 up"),
        (lambda: Linear(3, dtype="float16"), "dtype: found 'float16', expected one of 'float32'"),
        (lambda: Linear(3, dtype="number"), "dtype: found 'number'"),
        (lambda: Logistic(3, 1), "n_classes: found 1, expected a whole number from 2 up"),
        (lambda: MLP([3]), r"layers: found \[3\], expected at least the features and the outputs"),
        (lambda: MLP([3, 0, 2]), r"layers\[1\]: found 0"),
        (lambda: MLP(3), "layers: found 3, expected a list"),
        (lambda: MLP("32"), "layers: found '32', expected a list"),
        (lambda: MLP([3, 2], activation="gelu"), "activation: found 'gelu'"),
        (lambda: MLP([3, 2], loss="logistic"), "layers: found 2 outputs, expected 1"),
        (lambda: MLP([3, 1]), "layers: found 1 output, expected one for each class"),
        (lambda: models.from_name("mpl"), "model: found 'mpl'.*did you mean 'mlp'"),
        (lambda: models.from_name("mlp"), "mlp: found no 'layers'"),
        (
            lambda: models.from_name("mlp", layers=[2, 2], layer=3),
            "mlp: found an argument 'layer', expected only 'layers'.*did you mean 'layers'",
        ),
    ],
)
def test_arguments_are_checked(make, message):
    with pytest.raises(SpecError, match=message):
        make()


def test_plain_kinds_of_arguments():
    assert MLP((np.int64(3), 2), dtype=np.float64) == MLP([3, 2], dtype="float64")
    assert json.loads(json.dumps(MLP(np.array([3, 2]), l2=np.float32(0.5)).config())) == {
        "layers": [3, 2],
        "activation": "relu",
        "loss": "cross_entropy",
        "l2": 0.5,
        "dtype": "float32",
    }
