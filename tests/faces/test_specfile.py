"""Spec files: what they give, and the words in which they are refused."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest

import dtrain
from dtrain import models, optim
from dtrain.devices import device
from dtrain.errors import DataError, SpecError
from dtrain.partition import MaxSize, MinSize
from dtrain.specfile import load_job

_names = (f"spec_module_{number}" for number in itertools.count())


class FakeJob(SimpleNamespace):
    """Keeps what it is given: these tests are about what the file says."""

    def __init__(self, model: Any, X: Any, y: Any, **rest: Any) -> None:
        super().__init__(model=model, X=X, y=y, given=set(rest), **rest)
        if rest.get("batch_size") == 999:
            raise SpecError("batch_size: found 999, expected fewer than there are rows")
        if rest.get("validation_split") == 0.999:
            raise DataError("validation_split: found 0.999, which leaves no rows")


@pytest.fixture(autouse=True)
def _api(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtrain, "Job", FakeJob, raising=False)
    monkeypatch.setattr(dtrain, "Sync", lambda: "sync", raising=False)
    monkeypatch.setattr(dtrain, "Async", lambda: "async", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def module(tmp_path: Path) -> Any:
    """Writes a module of the user's beside the spec; gives its name, never used before."""
    made = []

    def write(text: str) -> str:
        name = next(_names)
        (tmp_path / f"{name}.py").write_text(text)
        made.append(name)
        return name

    yield write
    for name in made:
        loaded = sys.modules.pop(name, None)
        if loaded is not None and name in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.unregister_pickle_by_value(loaded)


MODEL = '[model]\nkind = "linear"\nn_features = 3\n'
DATA = '[data]\npath = "d.npz"\n'
NPZ = MODEL + DATA
LR = NPZ + '[train]\noptimizer = {{kind = "adam", lr = {{{}}}}}'


CHAIN = NPZ + '[train]\noptimizer = {{kind = "chain", transforms = {}, optimizer = {}}}'


@pytest.fixture
def spec(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "job.toml"
        path.write_text(text)
        return path

    np.savez(tmp_path / "d.npz", X=np.ones((4, 3)), y=np.arange(4))
    return write


def refused(path: Path, kind: type[Exception] = SpecError) -> str:
    """The message with which a spec is refused; it starts with the file's name."""
    with pytest.raises(kind) as info:
        load_job(path)
    assert type(info.value) is kind
    assert str(info.value).startswith(f"{path}: ")
    return str(info.value).replace(f"{path}: ", "")


# --- What a file gives.


def test_every_key_reaches_the_job(spec, tmp_path):
    path = spec(
        """
        name = "flights"
        output = "out/model"
        [model]
        kind = "mlp"
        layers = [3, 1]
        loss = "squared"
        [data]
        path = "d.npz"
        validation = 0.25
        [train]
        epochs = 5
        steps = 7
        batch_size = 2
        replicas = 2
        shards = 3
        mode = "async"
        optimizer = { kind = "adam", lr = 1e-3 }
        shuffle = false
        seed = 9
        metrics = ["accuracy"]
        """
    )
    job = load_job(path)
    assert isinstance(job.model, models.MLP)
    assert job.model.config() == models.MLP([3, 1], loss="squared").config()
    assert job.X.shape == (4, 3)
    assert job.y.tolist() == [0, 1, 2, 3]
    assert (job.name, job.output) == ("flights", str(tmp_path / "out/model"))
    assert (job.epochs, job.steps, job.batch_size) == (5, 7, 2)
    assert (job.replicas, job.shards, job.mode) == (2, 3, "async")
    assert job.optimizer == optim.adam(lr=1e-3)
    assert (job.shuffle, job.seed, job.metrics) == (False, 9, ("accuracy",))
    assert job.validation_split == 0.25


def test_partitioner_and_placement(spec):
    text = '[train]\npartitioner = { kind = "max_size", bytes = "4MB" }\nplacement = "round-robin"'
    job = load_job(spec(NPZ + text))
    assert job.partitioner == MaxSize(4_000_000)
    assert job.placement == "round-robin"
    text = "[train.partitioner]\nkind = 'min_size'\nbytes = 4096\nmax_shards = 3"
    assert load_job(spec(NPZ + text)).partitioner == MinSize(4096, max_shards=3)


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        (
            'lr = { kind = "warmup_cosine", peak = 1e-3, warmup_steps = 100, total_steps = 1000 }',
            optim.warmup_cosine(peak=1e-3, warmup_steps=100, total_steps=1000),
        ),
        (
            'lr.kind = "exponential"\nlr.lr = 1\nlr.decay = 0.5\nlr.staircase = true',
            optim.exponential(1, 0.5, staircase=True),
        ),
        (
            'lr = { kind = "piecewise", boundaries = [10, 20], values = [1, 0.5, 0] }',
            optim.piecewise([10, 20], [1, 0.5, 0]),
        ),
        (
            '[train.optimizer.lr]\nkind = "linear"\nstart = 0\nstop = 0.1\nsteps = 5',
            optim.linear(0, 0.1, 5),
        ),
    ],
)
def test_a_learning_rate_may_be_a_schedule(spec, text, schedule):
    job = load_job(spec(f'{NPZ}[train.optimizer]\nkind = "rmsprop"\n{text}'))
    assert job.optimizer == optim.rmsprop(lr=schedule)


@pytest.mark.parametrize(
    "text",
    [
        """
        [train]
        optimizer = { kind = "chain", transforms = [
            { kind = "clip_by_global_norm", max_norm = 1.0 },
            { kind = "clip", clip_value = 0.5 },
        ], optimizer = { kind = "adam", lr = { kind = "linear", start = 1, stop = 0, steps = 9 } } }
        """,
        """
        [train.optimizer]
        kind = "chain"
        [[train.optimizer.transforms]]
        kind = "clip_by_global_norm"
        max_norm = 1
        [train.optimizer.optimizer]
        kind = "chain"
        transforms = [{ kind = "clip", clip_value = 0.5 }]
        [train.optimizer.optimizer.optimizer]
        kind = "adam"
        lr = { kind = "linear", start = 1, stop = 0, steps = 9 }
        """,
    ],
)
def test_an_optimizer_may_be_a_chain(spec, text):
    assert load_job(spec(NPZ + text)).optimizer == optim.chain(
        optim.clip_by_global_norm(1), optim.clip(0.5), optim.adam(optim.linear(1, 0, 9))
    )


def test_what_is_not_given_is_left_to_the_job(spec):
    job = load_job(spec(NPZ))
    assert job.given - {"recovery"} == {"mode", "name"}
    assert (job.mode, job.name) == ("sync", None)
    assert getattr(job, "recovery", dtrain.Recovery()) == dtrain.Recovery()


def test_what_ends_a_job_is_a_list_of_tables(spec):
    text = '[[callbacks]]\nkind = "early_stopping"\nmonitor = "loss"\npatience = 4\n'
    assert load_job(spec(NPZ + text)).callbacks == [dtrain.EarlyStopping("loss", patience=4)]
    for wrong, word in (
        ("stopping", "callbacks.0.kind: found 'stopping', expected \"early_stopping\""),
        ('early_stopping"\npatience = "2', "callbacks.0.patience: found '2', expected a whole"),
        ('early_stopping"\npatient = "2', "callbacks.0.patient: found an unknown key (did you me"),
    ):
        assert word in refused(spec(NPZ + f'[[callbacks]]\nkind = "{wrong}"\n'))


def test_recovery_and_checkpoint_are_tables(spec, tmp_path):
    job = load_job(
        spec(
            NPZ
            + '[checkpoint]\ndir = "saved"\nevery = 100\nkeep = 2\nresume = true\n'
            + '[recovery]\nmax_losses = 0\nmin_workers = 2\ndeadline = "30s"\n'
        )
    )
    assert job.recovery == dtrain.Recovery(max_losses=0, min_workers=2, deadline="30s")
    # Relative to the file.
    assert job.checkpoint == dtrain.Checkpoint(str(tmp_path / "saved"), every=100, keep=2)
    assert job.resume is True


def test_a_part_of_a_table_leaves_the_rest_to_the_job(spec):
    job = load_job(
        spec(NPZ + '[checkpoint]\ndir = "s3://bucket/saved"\n[recovery]\nmin_workers = 3\n')
    )
    assert job.recovery == dtrain.Recovery(min_workers=3)
    assert job.checkpoint == dtrain.Checkpoint("s3://bucket/saved")
    assert not job.resume


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("[recovery]\nmax_losses = -1", "recovery.max_losses"),
        ("[recovery]\nmin_workers = 0", "recovery.min_workers"),
        ('[recovery]\ndeadline = "soon"', "deadline"),
        ("[recovery]\nmax_loss = 1", "max_losses"),
        ("[checkpoint]\nevery = 10", "checkpoint.dir"),
        ('[checkpoint]\ndir = "saved"\nevery = 0', "checkpoint.every"),
        ('[checkpoint]\ndir = "saved"\nkeep = 0', "checkpoint.keep"),
        ('[checkpoint]\ndir = "saved"\nresume = "yes"', "checkpoint.resume"),
    ],
)
def test_tables_that_cannot_be_are_refused_by_key(spec, table, words):
    path = spec(NPZ + table + "\n")
    with pytest.raises(SpecError) as caught:
        load_job(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_arguments_replace_name_and_output(spec, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    job = load_job(spec('name = "a"\noutput = "b"\n' + NPZ), name="c", output="d")
    assert (job.name, job.output) == ("c", str(tmp_path / "elsewhere" / "d"))


def test_npz_columns_by_name(spec, tmp_path):
    np.savez(
        tmp_path / "d.npz", age=np.arange(3), pair=np.ones((3, 2)), label=np.array(["a", "b", "a"])
    )
    job = load_job(spec(NPZ + 'features = ["pair", "age"]\ntarget = "label"'))
    assert job.X.tolist() == [[1, 1, 0], [1, 1, 1], [1, 1, 2]]
    assert job.y.tolist() == ["a", "b", "a"]


def test_npz_small_x_is_found(spec, tmp_path):
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 2, 2)), y=np.zeros(2))
    assert load_job(spec(NPZ)).X.shape == (2, 2, 2)


@pytest.mark.parametrize(
    ("keys", "X", "y"),
    [
        ("", [[0, 1], [3, 4]], [2, 5]),
        ("target = 0", [[1, 2], [4, 5]], [0, 3]),
        ("target = -2\nfeatures = [2]", [[2], [5]], [1, 4]),
        ("features = [1, 0]", [[1, 0], [4, 3]], [2, 5]),
    ],
)
def test_npy_columns_by_index(spec, tmp_path, keys, X, y):
    np.save(tmp_path / "d.npy", np.arange(6).reshape(2, 3))
    job = load_job(spec(f'{MODEL}[data]\npath = "d.npy"\n{keys}'))
    assert job.X.tolist() == X
    assert job.y.tolist() == y


def test_validation_from_a_file(spec, tmp_path):
    np.savez(tmp_path / "v.npz", X=np.ones((2, 3)), y=np.arange(2))
    job = load_job(spec(NPZ + 'validation = "v.npz"'))
    assert [part.shape for part in job.validation_data] == [(2, 3), (2,)]
    assert "validation_split" not in job.given


def test_factories_beside_the_spec(spec, module):
    name = module(
        "import numpy as np\n"
        "class Model:\n"
        "    def __init__(self, width): self.width = width\n"
        "    def init(self, rng): pass\n"
        "    def loss_and_grads(self, params, batch, *, out=None, rng=None): pass\n"
        "    def predict(self, params, x): return self.width\n"
        "def load(rows): return np.ones((rows, 2)), np.ones(rows)\n"
    )
    job = load_job(
        spec(
            f'[model]\nkind = "{name}:Model"\nwidth = 8\n'
            f'[data]\nfactory = "{name}:load"\n[data.args]\nrows = 5'
        )
    )
    assert job.model.width == 8
    assert job.X.shape == (5, 2)
    # A worker elsewhere has no such module: the model comes with its class.
    frozen = cloudpickle.dumps(job.model)
    loaded = sys.modules.pop(name)
    try:
        sys.path[:] = [place for place in sys.path if place != str(Path(loaded.__file__).parent)]
        assert cloudpickle.loads(frozen).predict(None, None) == 8
    finally:
        sys.modules[name] = loaded


# --- What is refused, and how.


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nmae = 1\n" + NPZ, ["nmae: found an unknown key", "did you mean 'name'", "output"]),
        (NPZ + "[train]\nepoch = 1", ["train.epoch: found an unknown key", "'epochs'"]),
        (NPZ + "[train]\nepochs = 0", ["train.epochs: found 0, expected a whole number from 1"]),
        (NPZ + "[train]\nepochs = true", ["train.epochs: found true, expected"]),
        (NPZ + "[train]\nepochs = '3'", ["train.epochs: found '3', expected"]),
        (NPZ + "[train]\nmode = 'sink'", ["train.mode: found 'sink', expected \"sync\" or"]),
        (NPZ + "[train]\nseed = -1", ["train.seed: found -1"]),
        (NPZ + "[train]\nshuffle = 1", ["train.shuffle: found 1, expected true or false"]),
        (NPZ + "[train]\nmetrics = 'mse'", ["train.metrics: found 'mse', expected a list"]),
        (NPZ + "[train]\nmetrics = [3]", ["train.metrics: found [3], expected a list"]),
        (NPZ + "[train]\npartitioner = 3", ["train.partitioner: found 3, expected a table"]),
        (
            NPZ + "[train.partitioner]\nkind = 'max'",
            ["train.partitioner.kind: found 'max', expected 'fixed_shards', 'min_size' or 'max_"],
        ),
        (
            NPZ + "[train.partitioner]\nkind = 'max_size'\nbytes = 'much'",
            ["train.partitioner.bytes: found 'much', expected a size above zero"],
        ),
        (NPZ + "[train]\nplacement = 'best'", ["train.placement: found 'best', expected \"gree"]),
        (NPZ + "[train]\ndevice = 1", ["train.device: found 1, expected 'cpu', 'cuda', "]),
        (NPZ + "[train]\noptimizer = 'adam'", ["train.optimizer: found 'adam', expected a table"]),
        (NPZ + "[train]\noptimizer = {lr = 1}", ["train.optimizer.kind: found nothing"]),
        (NPZ + "validation = 1", ["data.validation: found 1, expected a fraction"]),
        (NPZ + "validation = nan", ["data.validation: found nan, expected a fraction"]),
        (NPZ + "features = [1, 'a']", ["data.features: found [1, 'a'], expected"]),
        (NPZ + "features = []", ["data.features: found [], expected"]),
        ("model = 3\n[data]\npath = 'd.npz'", ["model: found 3, expected a table [model]"]),
        ("name = 'a'", ["model: found nothing", "data: found nothing"]),
    ],
)
def test_a_wrong_key_is_named(spec, text, words):
    message = refused(spec(text))
    for word in words:
        assert word in message


def test_all_wrong_keys_are_told_at_once(spec):
    message = refused(spec(NPZ + "[train]\nepochs = 0\nseed = -1"))
    assert len(message.splitlines()) == 2


@pytest.fixture
def real_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize("word", ["gpu", "cuda:x", ""])
@pytest.mark.usefixtures("real_job")
def test_a_device_that_is_none_is_named(spec, word):
    message = refused(spec(NPZ + f"[train]\ndevice = '{word}'"))
    assert f"train.device: found {word!r}, expected 'cpu', 'cuda', 'cuda:<number>' or" in message


@pytest.mark.usefixtures("real_job")
def test_device(spec):
    assert load_job(spec(NPZ + "[train]\ndevice = 'cuda:1'")).device == "cuda:1"
    with device("cpu"):
        assert load_job(spec(NPZ)).device == "cpu"
        assert load_job(spec(NPZ + "[train]\ndevice = 'cuda'")).device == "cuda"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f'[model]\nkind = "cnn"\n{DATA}', ["model.kind: found 'cnn'", "linear", "mlp"]),
        (f'[model]\nkind = "mlp"\nlayer = [1]\n{DATA}', ["model: ", "'layer'", "layers"]),
        (f'[model]\nkind = "mlp"\nlayers = 3\n{DATA}', ["model.layers: found 3"]),
        (NPZ + '[train]\noptimizer = {kind = "adm"}', ["train.optimizer.kind: ", "adm", "adam"]),
        (NPZ + '[train]\noptimizer = {kind = "adam", lr = "x"}', ["train.optimizer.lr: found 'x'"]),
        (
            NPZ + '[train]\noptimizer = {kind = "adam", betas = [0.9, 1]}',
            ["train.optimizer.betas[1]: found 1"],
        ),
        (
            LR.format('kind = "cosine"'),
            ["train.optimizer.lr.kind: found 'cosine', expected one of"],
        ),
        (LR.format("start = 1"), ["train.optimizer.lr.kind: found None", "'warmup_cosine'"]),
        (
            LR.format('kind = "linear", start = -1, stop = 0, steps = 3'),
            ["train.optimizer.lr.start: found -1, expected a finite number from 0 up"],
        ),
        (
            LR.format('kind = "linear", start = 1, stop = 0'),
            ["train.optimizer.lr: found no argument 'steps', expected at least 'start'"],
        ),
        (
            LR.format('kind = "linear", begin = 1'),
            ["train.optimizer.lr: found an argument 'begin', expected only 'start'"],
        ),
        (
            LR.format('kind = "piecewise", boundaries = [1, 2.5], values = [1, 2, 3]'),
            ["train.optimizer.lr.boundaries[1]: found 2.5, expected a whole number from 1 up"],
        ),
        (
            CHAIN.format('[{kind = "clip", clip_value = 0}]', '{kind = "adam"}'),
            ["train.optimizer.transforms[0].clip_value: found 0, expected a finite number"],
        ),
        (
            CHAIN.format('[{kind = "clip", value = 1}]', '{kind = "adam"}'),
            ["train.optimizer.transforms[0]: found an argument 'value', expected only"],
        ),
        (
            CHAIN.format('[{kind = "clop"}]', '{kind = "adam"}'),
            ["train.optimizer.transforms[0].kind: found 'clop'", "did you mean 'clip'"],
        ),
        (
            CHAIN.format("[]", '{kind = "adam"}'),
            ["train.optimizer.transforms: found [], expected a list of transforms, not empty"],
        ),
        (
            CHAIN.format('[{kind = "clip", clip_value = 1}]', '{kind = "adm"}'),
            ["train.optimizer.optimizer.kind: found 'adm'", "did you mean 'adam'"],
        ),
        (
            CHAIN.format('[{kind = "clip", clip_value = 1}]', '{kind = "adam", lr = -1}'),
            ["train.optimizer.optimizer.lr: found -1"],
        ),
        (
            CHAIN.format('[{kind = "clip", clip_value = 1}]', '"adam"'),
            ["train.optimizer.optimizer: found 'adam', expected an optimizer"],
        ),
        (
            CHAIN.format('[{kind = "clip", clip_value = 1}]', "{}").replace("chain", "chian"),
            ["train.optimizer.kind: found 'chian'", "did you mean 'chain'"],
        ),
        (
            NPZ + '[train]\noptimizer = {kind = "chain", optimizer = {kind = "adam"}}',
            ["train.optimizer: chain: found no argument 'transforms', expected transforms and"],
        ),
        (NPZ + "[train]\nbatch_size = 999", ["train.batch_size: found 999, expected fewer"]),
    ],
)
def test_what_others_refuse_gets_file_and_key(spec, text, words):
    message = refused(spec(text))
    for word in words:
        assert word in message


def test_a_data_error_of_the_job_stays_one(spec):
    message = refused(spec(NPZ + "validation = 0.999"), DataError)
    assert message.startswith("data.validation: found 0.999")


def test_syntax_error_names_the_line(spec):
    assert "line 2" in refused(spec('name = "a"\n= 3'))


def test_missing_and_odd_files(tmp_path):
    assert "no such file" in refused(tmp_path / "none.toml")
    assert ".toml" in refused(tmp_path / "spec.yaml")
    (tmp_path / "folder.toml").mkdir()
    assert "cannot be read" in refused(tmp_path / "folder.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    assert "UTF-8" in refused(tmp_path / "latin.toml")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("", ["data: found neither"]),
        ('path = "d.npz"\nfactory = "a:b"', ["data: found both"]),
        ('path = "d.npz"\nargs = {a = 1}', ["data.args: ", "only with a factory"]),
        ('factory = "a:b"\ntarget = "y"', ["data.target: ", "only with a path"]),
        ('path = "none.npz"', ["data.path: found 'none.npz'", "no file"]),
        ('path = "d.txt"', ["data.path: found 'd.txt'", "ends in .npz, .npy, .parquet, .csv"]),
        ('path = "d.npz"\ntarget = "Y"', ["data.target: found 'Y'", "did you mean 'y'", "X, y"]),
        ('path = "d.npz"\ntarget = 0', ["data.target: found 0", "X, y"]),
        ('path = "d.npz"\nfeatures = ["X", "z"]', ["data.features: found 'z'", "X, y"]),
        ('path = "d.npy"\ntarget = 3', ["data.target: found 3", "from -3 to 2"]),
        ('path = "d.npy"\ntarget = "y"', ["data.target: found 'y'", "from -3 to 2"]),
        ('path = "d.npy"\nfeatures = "X"', ["data.features: found 'X'", "column indices"]),
        ('path = "d.npy"\nfeatures = [2]', ["data.features: found column 2", "the target"]),
        ('path = "bad.npz"', ["data.path: ", "damaged"]),
        ('path = "bad.npy"', ["data.path: ", "damaged"]),
        ('path = "objects.npz"', ["data.path: ", "Python objects"]),
        ('path = "objects.npy"', ["data.path: ", "Python objects"]),
        ('path = "odd.npz"', ["data.features: ", "'X' or 'x'", "a, b"]),
    ],
)
def test_data_that_cannot_be(spec, tmp_path, keys, words):
    objects = np.array([[{}, 1], [2, 3]], dtype=object)
    np.save(tmp_path / "d.npy", np.zeros((2, 3)))
    np.save(tmp_path / "objects.npy", objects, allow_pickle=True)
    np.savez(tmp_path / "objects.npz", X=objects, y=np.zeros(2))
    np.savez(tmp_path / "odd.npz", a=np.zeros(2), b=np.zeros(2))
    for name in ("bad.npz", "bad.npy"):
        (tmp_path / name).write_bytes(b"no array")
    message = refused(spec(f"{MODEL}[data]\n{keys}"))
    for word in words:
        assert word in message
    assert "allow_pickle" not in message


@pytest.mark.parametrize(
    ("arrays", "keys", "words"),
    [
        ({"X": np.zeros((3, 2)), "y": np.zeros(4)}, "", ["(3, 2)", "(4,)"]),
        ({"X": np.zeros(()), "y": np.zeros(4)}, "", ["()", "(4,)"]),
        (
            {"a": np.zeros(3), "b": np.zeros(4), "y": np.zeros(3)},
            'features = ["a", "b"]',
            ["data.features", "(3,)", "(4,)"],
        ),
        ({"X": np.array([["a"]]), "y": np.zeros(1)}, "", ["<U1", "numbers"]),
    ],
)
def test_arrays_that_do_not_fit(spec, tmp_path, arrays, keys, words):
    path = spec(NPZ + keys)
    np.savez(tmp_path / "d.npz", **arrays)
    message = refused(path, DataError)
    assert str(tmp_path / "d.npz") in message
    for word in words:
        assert word in message


def test_a_table_needs_two_columns(spec, tmp_path):
    np.save(tmp_path / "d.npy", np.zeros(3))
    assert "(3,)" in refused(spec(f'{MODEL}[data]\npath = "d.npy"'), DataError)


def test_validation_of_another_width(spec, tmp_path):
    np.savez(tmp_path / "v.npz", X=np.ones((2, 4)), y=np.arange(2))
    message = refused(spec(NPZ + 'validation = "v.npz"'), DataError)
    assert "data.validation" in message
    assert "(2, 4)" in message
    assert "(4, 3)" in message


@pytest.mark.parametrize(
    ("code", "function", "words"),
    [
        ("", "load", ["has no function 'load'"]),
        ("def laod(): pass", "load", ["did you mean 'laod'"]),
        ("load = 3", "load", ["has no function 'load'"]),
        ("import no_such_thing_at_all", "load", ["raised ModuleNotFoundError", "line 1"]),
        ("def load(:", "load", ["raised SyntaxError", "line 1"]),
        ("\ndef load(): 1 / 0", "load", ["raised ZeroDivisionError: division by zero", "line 2"]),
        ("def load(rows): pass", "load", ["raised TypeError", "'rows'"]),
        ("def load(): return 3", "load", ["returned a int, expected (X, y)"]),
        ("def load(): return 1,", "load", ["returned a tuple of 1, expected (X, y)"]),
    ],
)
def test_factories_that_fail(spec, module, code, function, words):
    name = module(code)
    message = refused(spec(f'{MODEL}[data]\nfactory = "{name}:{function}"'))
    assert message.startswith("data.factory: ")
    for word in [name, *words]:
        assert word in message


def test_the_users_exception_is_the_cause(spec, module):
    name = module("def load(): raise KeyError('k')")
    with pytest.raises(SpecError) as info:
        load_job(spec(f'{MODEL}[data]\nfactory = "{name}:load"'))
    assert isinstance(info.value.__cause__, KeyError)


@pytest.mark.parametrize("reference", ["load", "a:", ":b", "a b:c", "a:b:c"])
def test_a_factory_is_a_module_and_a_name(spec, reference):
    message = refused(spec(f'{MODEL}[data]\nfactory = "{reference}"'))
    assert f"found {reference!r}, expected" in message


def test_a_missing_module_tells_where_it_was_sought(spec, tmp_path):
    message = refused(spec(f'{MODEL}[data]\nfactory = "no_such.module:load"'))
    assert "no module 'no_such'" in message
    assert str(tmp_path) in message


def test_a_factorys_arrays_must_fit(spec, module):
    name = module("import numpy as np\ndef load(): return np.ones((3, 2)), np.ones(2)")
    message = refused(spec(f'{MODEL}[data]\nfactory = "{name}:load"'), DataError)
    assert name in message
    assert "(3, 2)" in message


def test_a_model_must_be_one(spec, module):
    name = module("def make(): return object()")
    message = refused(spec(f'[model]\nkind = "{name}:make"\n[data]\npath = "d.npz"'))
    assert message.startswith("model.kind: ")
    assert "init, loss_and_grads, predict" in message
