"""Where replicas compute: the words, the scopes, and models on a device that is not the host."""

from __future__ import annotations

import asyncio
import sys
import threading
from contextvars import ContextVar

import numpy as np
import pytest

import dtrain
from dtrain import arrays, devices
from dtrain.errors import SpecError
from dtrain.layout import Layout
from dtrain.models import MLP, Linear, Logistic
from tests.gpu import KINDS, cupy_of, stand_in


@pytest.fixture(params=KINDS)
def cupy(request):
    with cupy_of(request.param) as module:
        yield module


# -- words -------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["cpu", "auto", "cuda", "cuda:0", "cuda:17"])
def test_words(word):
    assert devices.check_device(word) == word
    assert repr(dtrain.device(word)) == f"device({word!r})"


@pytest.mark.parametrize(
    "word", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:01", "CPU", "cpu\n", "", None, 0]
)
def test_other_words_are_refused(word):
    for refuses in (devices.check_device, dtrain.device, arrays.namespace):
        with pytest.raises(SpecError, match="expected 'cpu', 'cuda', 'cuda:<number>' or 'auto'"):
            refuses(word)


@pytest.mark.parametrize(
    ("wanted", "found", "expected"),
    [
        ("cpu", ("cpu", "cuda:0"), "cpu"),
        ("auto", ("cpu",), "cpu"),
        ("auto", ("cpu", "cuda:0", "cuda:1"), "cuda:0"),
        ("cuda", ("cpu",), None),
        ("cuda", ("cpu", "cuda:0", "cuda:1"), "cuda:0"),
        ("cuda:1", ("cpu", "cuda:0"), None),
        ("cuda:1", ("cpu", "cuda:0", "cuda:1"), "cuda:1"),
    ],
)
def test_what_a_worker_computes_on(wanted, found, expected):
    assert devices.resolved(wanted, found) == expected


def test_the_error_names_what_each_worker_lacks():
    workers = [("worker a", ("cpu",), "no CuPy"), ("worker b", ("cpu", "cuda:0"), "")]
    assert str(devices.lacking("cuda:3", workers)) == (
        "device: found 'cuda:3', expected a worker that has it, but worker a has cpu (no CuPy); "
        "worker b has cpu and cuda:0"
    )
    many = str(devices.lacking("cuda", [(f"w{i}", ("cpu",), "") for i in range(100)]))
    assert many.endswith("w7 has cpu; and 92 more")


def test_what_is_found(monkeypatch):
    with stand_in("0,1"):
        assert arrays.devices() == (("cpu", "cuda:0", "cuda:1"), "")
    with stand_in(""):
        assert arrays.devices() == (("cpu",), "CuPy finds none")
    with stand_in() as module:
        monkeypatch.setattr(module.cuda, "is_available", lambda: 1 / 0)
        found, why = arrays.devices()
        assert found == ("cpu",)
        assert why.startswith("CuPy finds none: ZeroDivisionError")
    monkeypatch.setitem(sys.modules, "cupy", None)  # its import fails
    found, why = arrays.devices()
    assert found == ("cpu",)
    assert why.startswith("CuPy cannot be imported")


@pytest.mark.gpu
def test_a_real_gpu_is_found():
    with cupy_of("cupy"):
        assert arrays.devices()[0][:2] == ("cpu", "cuda:0")


# -- scopes ------------------------------------------------------------------------------------


@pytest.fixture
def no_scope(monkeypatch):
    """As a program begins: the tests as a whole are in a scope of their own."""
    monkeypatch.setattr(devices, "_scopes", ContextVar("scopes", default=()))


def made(**arguments):
    return dtrain.Job(Linear(2), np.ones((4, 2)), np.ones(4), **arguments).device


@pytest.mark.usefixtures("no_scope")
def test_the_innermost_scope_counts_and_explicit_wins():
    assert made() == "auto"
    with dtrain.device("cuda"):
        assert made() == "cuda"
        with dtrain.device("cpu"):
            assert made() == "cpu"
            assert made(device="cuda:1") == "cuda:1"
        assert made() == "cuda"
        with dtrain.device("auto"):
            assert made() == "auto"
    assert made() == "auto"


def test_a_job_keeps_the_device_it_was_made_with():
    with dtrain.device("cuda:2"):
        job = dtrain.Job(Linear(2), np.ones((4, 2)), np.ones(4))
    assert job.spec(detach=True).device == "cuda:2"
    assert dtrain.spec.JobSpec.from_dict(job.spec(detach=True).to_dict()).device == "cuda:2"


@pytest.mark.usefixtures("no_scope")
def test_a_scope_ends_with_an_exception():
    with pytest.raises(KeyError), dtrain.device("cpu"), dtrain.device("cuda"):
        raise KeyError
    assert made() == "auto"


@pytest.mark.usefixtures("no_scope")
def test_one_object_can_be_entered_again():
    scope = dtrain.device("cpu")
    with scope, dtrain.device("cuda"), scope:
        assert made() == "cpu"
    with scope:
        assert made() == "cpu"
    assert made() == "auto"


@pytest.mark.usefixtures("no_scope")
def test_a_scope_is_of_its_thread():
    found, scope = [], dtrain.device("cpu")
    opened, asked = threading.Event(), threading.Event()

    def other():
        opened.wait(10)
        found.append(made())
        with scope:
            asked.set()
            found.append(made())

    thread = threading.Thread(target=other)
    thread.start()
    with scope, dtrain.device("cuda"):
        opened.set()
        assert asked.wait(10)
        found.append(made())
    thread.join(10)
    assert sorted(found) == ["auto", "cpu", "cuda"]


@pytest.mark.usefixtures("no_scope")
def test_a_scope_is_of_its_asyncio_task():
    async def inside(name):
        with dtrain.device(name):
            await asyncio.sleep(0)
            return made()

    async def main():
        return await asyncio.gather(*(inside(f"cuda:{i}") for i in range(3))), made()

    assert asyncio.run(main()) == (["cuda:0", "cuda:1", "cuda:2"], "auto")


@pytest.mark.parametrize("word", ["gpu", "cuda:x"])
def test_a_job_refuses_other_words(word):
    with pytest.raises(SpecError, match=f"device: found {word!r}, expected 'cpu', 'cuda'"):
        made(device=word)


# -- the stand-in refuses what CuPy refuses ----------------------------------------------------


@pytest.mark.parametrize(
    "mixes",
    [
        lambda there, here: there + here,
        lambda there, here: here + there,
        lambda there, here: np.add(there, here),
        lambda there, here: np.add(here, here, out=there),
        lambda there, here: np.matmul(there, here),
        lambda there, here: np.concatenate([there, here]),
        lambda there, here: there.__setitem__(slice(None), here),
        lambda there, here: here.__setitem__(slice(None), there),
        lambda there, here: there.__iadd__(here),
        lambda there, here: here.__iadd__(there),
        lambda there, here: np.asarray(there),
        lambda there, here: np.copyto(here, there),
        lambda there, here: there.dot(here),
    ],
)
def test_arrays_of_host_and_device_do_not_mix(cupy, mixes):
    with pytest.raises((TypeError, ValueError, AttributeError)):
        mixes(cupy.asarray(np.ones(3)), np.ones(3))


def test_arrays_of_two_devices_do_not_mix():
    with stand_in() as module:
        first = module.zeros(2)
        with arrays.on("cuda:1"):
            assert (module.ones(2) + 1).sum() == 4
            with pytest.raises(ValueError, match="of device 0 is used on 1"):
                first + 1
        assert (first + 1).sum() == 2


# -- copies and models -------------------------------------------------------------------------


def test_transfer(cupy):
    here = np.arange(7, dtype=np.uint8)
    there = cupy.zeros(7, dtype=np.uint8)
    arrays.transfer(there, here)
    back = np.zeros(7, np.uint8)
    arrays.transfer(back, there)
    assert back.tolist() == list(range(7))
    assert arrays.xp_of(there) is cupy


def test_views_know_their_buffer():
    layout = Layout.of({"a": np.ones((3, 5), np.float32), "b": np.ones(2, np.float64)})
    views = layout.views(arrays.aligned_bytes(layout.nbytes + 100))
    assert views.flat.shape == (layout.nbytes,)
    for view in views.values():
        view.fill(1)
    assert views.flat.any()


MODELS = [
    Linear(6, 3, l2=0.1),
    Linear(6, loss="huber"),
    Linear(6, loss="poisson", l2=0.01),
    Logistic(6, 2),
    Logistic(6, 4, l2=0.1),
    MLP([6, 5, 4]),
    MLP([6, 5, 4, 1], activation="tanh", loss="logistic"),
    MLP([6, 7, 2], loss="squared", l2=0.1, dtype="float64"),
]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("model", MODELS, ids=repr)
def test_a_model_computes_on_the_device_alone(cupy, model, weighted):
    rng = np.random.default_rng(5)
    x = rng.standard_normal((50, 2, 3))
    classes = model.n_classes
    y = rng.integers(classes, size=50) if classes else rng.random((50, model.widths[-1]))
    batch = (x, y, rng.random(50)) if weighted else (x, y)
    params = model.init(rng)
    layout = Layout.of(params)
    expected = {name: np.zeros_like(value) for name, value in params.items()}
    loss, _ = model.loss_and_grads(params, batch, out=expected)

    views = layout.views(arrays.aligned_bytes(layout.nbytes, cupy))
    layout.write(views.flat, params)
    out = layout.views(arrays.aligned_bytes(layout.nbytes, cupy))
    there = tuple(map(cupy.asarray, batch))
    close = dict(rtol=2e-4, atol=1e-5)
    found, grads = model.loss_and_grads(views, there, out=out)
    assert grads is out
    np.testing.assert_allclose(found, loss, **close)
    for name, value in layout.read(out.flat).items():
        np.testing.assert_allclose(value, expected[name], **close)
    assert isinstance(model.loss(views, there), float)
    np.testing.assert_allclose(model.loss(views, there), loss, **close)
    scores = model.predict(views, there[0])
    assert arrays.xp_of(scores) is cupy
    np.testing.assert_allclose(arrays.to_numpy(scores), model.predict(params, x), **close)
