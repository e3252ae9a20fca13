"""Checkpoints: the same bits whatever the cut; whole or not at all, wherever a writer dies."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
import stat
import subprocess
import uuid
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dtrain import optim
from dtrain.errors import CheckpointError, FencedError, StorageError
from dtrain.layout import Layout
from dtrain.partition import ShardPlan, partition
from dtrain.runtime import checkpoint, files, manifest
from dtrain.runtime.checkpoint import Snapshot, check_writable, entries, latest, load, save

SMALL = {
    "w": np.zeros((5, 3), "float32"),
    "../../b/é:\0": np.zeros(7, "float64"),
    "scale": np.zeros((), "float32"),
}
#: Of several blocks, so that a variable lies in two shards.
LARGE = {
    "w": np.zeros((1000, 100), "float32"),
    "b": np.zeros(70_000, "float64"),
    "scale": np.zeros((), "float32"),
    "cube": np.zeros((3, 4, 5), "float64"),
}
STATE = {"cursor": [3, 1], "seed": 7, "history": [math.nan, math.inf, -math.inf, -0.0, 1 / 3]}
ABOUT = {"job": "job-1", "spec": {"epochs": 3}, "model": None}


def buffer(layout: Layout, seed: int) -> np.ndarray:
    """Random bits in all variables, NaN of every kind among them; zero padding."""
    rng = np.random.default_rng(seed)
    flat = np.zeros(layout.nbytes, np.uint8)
    for v in layout.variables:
        flat[v.offset : v.offset + v.nbytes] = rng.integers(0, 256, v.nbytes)
    return flat


def snapshot(step: int, model=SMALL, shards: int = 3, slots=("exp_avg",), **other) -> Snapshot:
    layout = Layout.of(model)
    if not isinstance(slots, dict):
        slots = {slot: buffer(layout, 1000 * i + step) for i, slot in enumerate(slots, start=1)}
    values = dict(
        step=step,
        layout=layout,
        params=buffer(layout, step),
        slots=slots,
        shards=partition(layout, shards),
        state=STATE,
        about=ABOUT,
    )
    return Snapshot(**{**values, **other})


def assert_same(found: Snapshot, wanted: Snapshot) -> None:
    assert found.step == wanted.step
    assert found.layout == wanted.layout
    assert found.params.tobytes() == wanted.params.tobytes()
    assert list(found.slots) == list(wanted.slots)
    for slot in wanted.slots:
        assert found.slots[slot].tobytes() == wanted.slots[slot].tobytes()
    assert found.shards == wanted.shards
    assert repr(found.state) == repr(wanted.state)  # NaN is not equal to itself
    assert found.about == wanted.about


def names(where: Path) -> list[str]:
    return sorted(os.listdir(where))


def tree(where: Path) -> dict[str, bytes]:
    return {str(p.relative_to(where)): p.read_bytes() for p in where.rglob("*") if p.is_file()}


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << (at % 8)
    path.write_bytes(raw)


def reseal(folder: Path, change) -> None:
    """Change a manifest, and have its checksum right."""
    path = folder / "manifest.json"
    values = json.loads(path.read_bytes())
    del values["sha256"]
    change(values)
    path.write_bytes(manifest.seal(json.dumps(values, separators=(",", ":")).encode()))


@pytest.fixture(autouse=True)
def heard(caplog):
    """Warnings are, also after a test of a command that is quiet."""
    caplog.set_level(logging.WARNING, logger="dtrain.checkpoint")


@pytest.fixture
def where(tmp_path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def url():
    import fsspec

    root = f"memory://checkpoints-{uuid.uuid4().hex}"
    yield root
    fs = fsspec.filesystem("memory")
    if fs.exists(root):
        fs.rm(root, recursive=True)


def remote_files(url: str) -> list[str]:
    import fsspec

    fs = fsspec.filesystem("memory")
    root = fs._strip_protocol(url)
    return sorted(path.removeprefix(root + "/") for path in fs.find(root))


class Steps:
    """A hook at the seam: notes every operation, and acts at the one numbered ``at``."""

    def __init__(self, at: int | None = None, act=None) -> None:
        self.seen: list[tuple[str, Path]] = []
        self.at, self.act = at, act

    def __call__(self, operation: str, path: object) -> None:
        self.seen.append((operation, Path(str(path))))
        if self.act is not None and self.at == len(self.seen) - 1:
            self.act()

    @property
    def operations(self) -> list[str]:
        return [operation for operation, _ in self.seen]


def fail() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def attempt(where: str, saved: Snapshot):
    """Save; what it returned, and the words of its StorageError."""
    try:
        return save(where, saved, keep=2), ""
    except StorageError as error:
        return None, str(error)


# -- round trips -------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3, 5])
@pytest.mark.parametrize("model", [SMALL, LARGE], ids=["small", "large"])
def test_the_same_bits_come_back_whatever_the_cut(where, model, shards):
    saved = snapshot(12, model, shards, slots=("exp_avg", "exp_avg_sq"))
    entry = save(str(where), saved, keep=1)
    assert (entry.name, entry.step, entry.job, entry.problem) == (
        "step-00000012",
        12,
        "job-1",
        None,
    )
    sizes = [path.stat().st_size for path in (where / entry.name).iterdir()]
    assert entry.nbytes == sum(sizes)
    parts = len(saved.shards.shards)
    assert len(sizes) == parts + 1
    assert latest(str(where)) == entry
    assert entries(str(where), verify=True) == entries(str(where), verify=False) == [entry]
    assert_same(load(entry), saved)
    if model is LARGE and shards > 1:  # a variable is really cut
        manifest = json.loads((where / entry.name / "manifest.json").read_bytes())
        rows = [t["rows"] for p in manifest["parts"] for t in p["tensors"] if t["variable"] == "b"]
        assert len({tuple(r) for r in rows}) > 1


def test_the_parts_are_plain_safetensors(where):
    from safetensors.numpy import load_file

    save(str(where), snapshot(1, shards=1), keep=1)
    tensors = load_file(where / "step-00000001" / "part-00000.safetensors")
    views = snapshot(1).layout.views(snapshot(1).params)
    assert set(tensors) == {
        f"{kind}:{name}" for kind in ("param", "slot:exp_avg") for name in SMALL
    }
    assert tensors["param:w"].tobytes() == views["w"].tobytes()
    assert tensors["param:scale"].shape == (1,)


def steps_of(optimizer, layout, params, slots, first: int, count: int) -> None:
    """Train in place, over whole segments: the padding takes part as it does in a shard."""
    for t in range(first, first + count):
        gradient = np.zeros(layout.nbytes, np.uint8)
        rng = np.random.default_rng(t)
        for view in layout.views(gradient).values():
            view[...] = rng.standard_normal(view.shape)
        for s in layout.segments:
            part = slice(s.start, s.stop)
            own = {name: slots[name][part].view(s.dtype) for name in slots}
            p, g = params[part].view(s.dtype), gradient[part].view(s.dtype)
            optim.apply(optimizer, t, g, p, own, p, own, optim.make_scratch(optimizer, s.dtype))


@pytest.mark.parametrize(
    "optimizer",
    [
        optim.sgd(0.1),
        optim.sgd(0.1, momentum=0.9),
        optim.adam(0.1),
        optim.adagrad(0.1, initial_accumulator_value=0.5),
    ],
    ids=lambda o: o.kind + "-".join(o.slots),
)
def test_training_goes_on_with_the_same_bits(where, optimizer):
    layout = Layout.of(SMALL)
    params = np.zeros(layout.nbytes, np.uint8)
    slots = {}
    for name, value in optimizer.initial.items():
        slots[name] = np.zeros(layout.nbytes, np.uint8)
        for s in layout.segments:
            slots[name][s.start : s.stop].view(s.dtype).fill(value)
    steps_of(optimizer, layout, params, slots, 1, 3)
    entry = save(str(where), snapshot(3, params=params, slots=slots), keep=1)
    found = load(entry, fill=optimizer.initial)
    assert found.params.tobytes() == params.tobytes()
    assert {k: v.tobytes() for k, v in found.slots.items()} == {
        k: v.tobytes() for k, v in slots.items()
    }
    steps_of(optimizer, layout, params, slots, 4, 3)
    steps_of(optimizer, layout, found.params, dict(found.slots), 4, 3)
    assert found.params.tobytes() == params.tobytes()
    for name in slots:
        assert found.slots[name].tobytes() == slots[name].tobytes()


def test_slots_of_another_optimizer_do_not_fit(where):
    entry = save(str(where), snapshot(1), keep=1)
    with pytest.raises(CheckpointError, match=r"found the slots \['exp_avg'\], expected \['sum'\]"):
        load(entry, fill={"sum": 0.0})


def test_a_snapshot_that_does_not_fit_together_is_refused(where):
    good = snapshot(1)
    shards = good.shards.shards
    for bad, words in [
        (dict(params=good.params[:-64]), "params: found uint8"),
        (dict(slots={"a": good.params.view("float32")}), "a: found float32"),
        (dict(slots={"a:b": good.params}), "colon"),
        (dict(shards=ShardPlan(shards[:2])), "shards: .* found 0 rows, expected 7"),
        (dict(shards=ShardPlan((*shards, shards[0]))), "shards: .* found row 0, expected 5"),
        (dict(step=-1), "step: found -1"),
    ]:
        with pytest.raises(ValueError, match=words):
            save(str(where), replace(good, **bad), keep=1)
    with pytest.raises(ValueError, match="keep"):
        save(str(where), good, keep=0)
    with pytest.raises(TypeError):
        save(str(where), snapshot(1, state={"rng": object()}), keep=1)
    assert not where.exists() or names(where) == []


def test_nothing_there(where, url):
    for place in (str(where), url, url + "/deeper"):
        assert latest(place) is None
        assert entries(place, verify=True) == []
    assert not where.exists()


def test_files_are_for_their_owner_alone(where):
    before = os.umask(0)
    try:
        check_writable(str(where))
        save(str(where), snapshot(1), keep=1)
        save(f"file://{where}/too", snapshot(1), keep=1)
    finally:
        os.umask(before)
    for path in [where, *where.rglob("*")]:
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path
    assert len(list(where.rglob("*.safetensors"))) == 6


# -- whole or not at all -----------------------------------------------------------------------


def test_all_is_on_the_disk_before_the_rename_and_the_rename_before_the_end(where, monkeypatch):
    monkeypatch.setattr(files, "_step", steps := Steps())
    save(str(where), snapshot(1), keep=1, fence=lambda: steps("fence", ""))
    draft = steps.seen[2][1]
    assert draft.parent == where
    assert draft.name.startswith(".step-00000001.")
    assert draft.name.endswith(".tmp")
    written = [draft / f"part-0000{i}.safetensors" for i in range(3)] + [draft / "manifest.json"]
    assert steps.seen == [
        ("mkdir", where),
        ("sync", where.parent),
        ("mkdir", draft),
        *((operation, path) for path in written for operation in ("write", "sync")),
        ("sync", draft),
        ("fence", Path(".")),
        ("rename", draft),
        ("sync", where),
    ]


def lose_power(steps: Steps) -> None:
    """End the process; half of what was written and not synced is lost."""
    for i, (operation, path) in enumerate(steps.seen):
        synced = ("sync", path) in steps.seen[i:-1]  # the last one is not done
        if operation == "write" and path.exists() and not synced:
            os.truncate(path, path.stat().st_size // 2)
    os._exit(42)


def save_and_die(where: Path, saved: Snapshot, at: int) -> bool:
    """Save in another process, which dies at operation ``at``; whether it came so far."""
    child = os.fork()
    if child == 0:
        try:
            steps = Steps(at)
            steps.act = lambda: lose_power(steps)
            files._step = steps
            save(str(where), saved, keep=2)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42


def first_save(where: Path) -> None:
    pass


def later_save(where: Path) -> None:
    for step in (1, 2):
        save(str(where), snapshot(step), keep=2)


def save_over_a_damaged_one(where: Path) -> None:
    later_save(where)
    save(str(where), snapshot(3), keep=3)
    flip(where / "step-00000003" / "part-00000.safetensors", 100)


@pytest.mark.parametrize("prepare", [first_save, later_save, save_over_a_damaged_one])
def test_a_writer_may_die_anywhere(tmp_path, prepare, caplog):
    at, deaths, kept = 0, True, set()
    while deaths:
        where = tmp_path / str(at)
        prepare(where)
        caplog.clear()
        deaths = save_and_die(where, snapshot(3), at)
        found = latest(str(where))
        if prepare is not save_over_a_damaged_one:
            assert not caplog.records, at  # nothing was damaged
        kept.add(found and found.step)
        if found is not None:
            assert found.problem is None
            assert_same(load(found), snapshot(found.step))
        for path in where.glob(".*"):
            os.utime(path, (0, 0))  # long ago
        save(str(where), snapshot(4), keep=2)
        left = [name for name in names(where) if ".corrupt" not in name] if where.exists() else []
        before = {first_save: [3], later_save: [2, 3], save_over_a_damaged_one: [2, 3]}[prepare]
        good = [[f"step-0000000{s}" for s in (b, 4)] for b in before] + [["step-00000004"]]
        assert left in (good if prepare is first_save else good[:-1]), at
        at += 1
    assert at > 12
    assert kept == {3, None if prepare is first_save else 2}


@pytest.mark.parametrize("prepare", [first_save, later_save, save_over_a_damaged_one])
def test_an_operation_may_fail_anywhere(tmp_path, monkeypatch, prepare, caplog):
    at, steps = 0, None
    while steps is None or len(steps.seen) > at - 1:
        where = tmp_path / str(at)
        prepare(where)
        old = tree(where) if prepare is later_save else {}
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(files, "_step", steps := Steps(at, fail))
            entry, error = attempt(str(where), snapshot(3))
        committed = ("rename", "sync") in zip(steps.operations, steps.operations[1:], strict=False)
        hidden = list(where.glob(".*"))
        if entry is None:
            assert str(where) in error
            assert "No space left" in error
            assert hidden == [], at
            assert old.items() <= tree(where).items()
        else:  # done; what failed is to clean up, or nothing
            assert committed
            assert latest(str(where)) == entry
            if len(steps.seen) > at:
                assert "No space left" in caplog.text
        found = latest(str(where))
        if found is not None:
            assert_same(load(found), snapshot(found.step))
        else:
            assert prepare is first_save
        save(str(where), snapshot(4), keep=2)
        assert not list(where.glob(".*"))
        at += 1
    assert at > 12


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may mount")
def test_a_full_disk(tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        entry = save(f"{disk}/c", snapshot(1), keep=1)
        with pytest.raises(StorageError, match="No space left"):
            save(f"{disk}/c", snapshot(2, LARGE), keep=1)
        assert names(disk / "c") == ["step-00000001"]
        assert latest(f"{disk}/c") == entry
        (disk / "rest").write_bytes(bytes(shutil.disk_usage(disk).free))
        with pytest.raises(StorageError, match="No space left"):
            check_writable(f"{disk}/c")
        assert names(disk / "c") == ["step-00000001"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_superseded_writer_leaves_nothing(where, url):
    def fence():
        raise FencedError("generation 1, expected 2")

    for place in (str(where), url):
        entry = save(place, snapshot(1), keep=1)
        for step in (1, 2):
            with pytest.raises(FencedError):
                save(place, snapshot(step), keep=1, fence=fence)
        assert entries(place, verify=True) == [entry]
    assert names(where) == ["step-00000001"]
    assert {path.partition("/")[0] for path in remote_files(url)} == {"step-00000001"}


def test_a_superseded_writer_does_no_harm_to_the_one_that_took_over(where, url):
    """Both write the same step, cut in another way; the old one is fenced last of all."""
    for place in (str(where), url):

        def taken_over(place=place):
            save(place, snapshot(5, shards=1), keep=1)
            raise FencedError("generation 1, expected 2")

        with pytest.raises(FencedError):
            save(place, snapshot(5, shards=3), keep=1, fence=taken_over)
        assert_same(load(latest(place)), snapshot(5, shards=1))


def test_what_an_earlier_writer_left_goes_when_it_is_old_or_our_own(where):
    save(str(where), snapshot(1), keep=1)
    own = where / files._hidden("step-00000007")
    other = where / ".step-00000008.1-0123abcd.89abcdef.tmp"
    for path in (own, other):
        path.mkdir()
        (path / "part-00000.safetensors").write_bytes(b"half")
    save(str(where), snapshot(2), keep=1)
    assert names(where) == [other.name, "step-00000002"]  # another one's, and just begun
    os.utime(other, (0, 0))
    save(str(where), snapshot(3), keep=1)
    assert names(where) == ["step-00000003"]


def test_a_draft_that_is_being_written_is_not_swept(where):
    def meanwhile():
        save(str(where), snapshot(2), keep=3)

    save(str(where), snapshot(1), keep=3, fence=meanwhile)
    assert names(where) == ["step-00000001", "step-00000002"]


# -- damage ------------------------------------------------------------------------------------


def damages(size: int):
    for at in sorted({0, 7, 8, size // 3, size // 2, size - 70, size - 1}):
        yield f"flip {at}", lambda path, at=at: flip(path, at)
    for length in (0, 1, size // 2, size - 1):
        yield f"cut to {length}", lambda path, length=length: os.truncate(path, length)
    yield "one more", lambda path: path.write_bytes(path.read_bytes() + b" ")
    yield "gone", lambda path: path.unlink()
    yield "a directory", lambda path: (path.unlink(), path.mkdir())


FILES = ["manifest.json", *(f"part-0000{i}.safetensors" for i in range(3))]


@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_and_set_aside(tmp_path, name, caplog):
    template = tmp_path / "template"
    for step in (1, 2):
        save(str(template), snapshot(step), keep=2)
    size = (template / "step-00000002" / name).stat().st_size
    for what, damage in damages(size):
        where = tmp_path / what
        shutil.copytree(template, where)
        old, new = reversed(entries(str(where), verify=True))
        damage(where / "step-00000002" / name)
        before = {p: p.stat().st_mtime_ns for p in where.rglob("*")}
        listed = entries(str(where), verify=True)
        assert [e.step for e in listed] == [2, 1]
        assert name in listed[0].problem, what
        assert listed[1] == old
        assert before == {p: p.stat().st_mtime_ns for p in where.rglob("*")}
        with pytest.raises(CheckpointError, match=name):
            load(new)
        caplog.clear()
        assert latest(str(where)) == old, what
        assert [r.name for r in caplog.records] == ["dtrain.checkpoint"]
        assert name in caplog.text
        assert names(where) == ["step-00000001", "step-00000002.corrupt"]
        aside, rest = entries(str(where), verify=True)
        assert aside.name == "step-00000002.corrupt"
        assert aside.step == 2
        assert aside.problem.startswith("set aside; ")
        assert name in aside.problem
        assert rest == old


def test_every_bit_of_a_manifest_counts(where):
    save(str(where), snapshot(1), keep=1)
    raw = (where / "step-00000001" / "manifest.json").read_bytes()
    assert manifest.unsealed(raw)["step"] == 1
    for at in range(len(raw)):
        bad = bytearray(raw)
        bad[at] ^= 0x20  # also the case of a letter
        with pytest.raises(ValueError, match="damaged"):
            manifest.unsealed(bytes(bad))
        with pytest.raises(ValueError, match="damaged"):
            manifest.unsealed(raw[:at])


def test_a_quick_look_sees_sizes_and_no_bits(where):
    save(str(where), snapshot(1), keep=1)
    part = where / "step-00000001" / "part-00001.safetensors"
    flip(part, 50)
    assert entries(str(where), verify=False)[0].problem is None
    os.truncate(part, 50)
    assert "found 50 bytes" in entries(str(where), verify=False)[0].problem


def tensor(manifest):
    return manifest["parts"][0]["tensors"][0]


SEALED = {
    "rows twice": (lambda m: m["parts"][0]["tensors"].append(tensor(m)), "found row 0, expected 5"),
    "rows missing": (lambda m: m["parts"][0]["tensors"].pop(), "found 0 rows, expected"),
    "rows too many": (lambda m: tensor(m).update(rows=[0, 6]), "found 6 rows, expected 5"),
    "no rows": (lambda m: tensor(m).update(rows=[0, 0]), "found row 0, expected 0"),
    "a variable": (lambda m: tensor(m).update(variable="x"), "'param:x', which is not in"),
    "a slot": (lambda m: tensor(m).update(slot="x"), "'slot:x:w', which is not in"),
    "a path": (
        lambda m: m["parts"][0].update(file="../step-00000002/part-00000.safetensors"),
        "expected a part",
    ),
    "a step": (lambda m: m.update(step=3), "found step 3, expected that of"),
    "a field less": (lambda m: m.pop("layout"), "'layout'"),
}


@pytest.mark.parametrize(("change", "words"), SEALED.values(), ids=list(SEALED))
def test_a_sound_seal_is_not_enough(where, change, words):
    old = save(str(where), snapshot(1), keep=2)
    new = save(str(where), snapshot(2), keep=2)
    reseal(where / new.name, change)
    with pytest.raises(CheckpointError, match=words):
        load(new)
    assert latest(str(where)) == old
    assert names(where) == ["step-00000001", "step-00000002.corrupt"]


def test_a_part_that_is_not_what_the_manifest_says(where):
    """The hash is right, the tensors are others: only load reads them."""
    from safetensors.numpy import save as encode

    entry = save(str(where), snapshot(1, shards=1), keep=1)
    payload = encode({"param:w": np.zeros((5, 3), "float64")})
    (where / entry.name / "part-00000.safetensors").write_bytes(payload)

    def change(manifest):
        manifest["parts"][0]["bytes"] = len(payload)
        manifest["parts"][0]["sha256"] = checkpoint.hashlib.sha256(payload).hexdigest()

    reseal(where / entry.name, change)
    with pytest.raises(CheckpointError, match="not as the manifest says"):
        load(entry)


def test_what_cannot_be_read_for_now_is_not_set_aside(where, monkeypatch):
    save(str(where), snapshot(1), keep=1)

    def refuse(self, name, file):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(files.Local, "read", refuse)
        with pytest.raises(CheckpointError, match="Permission denied"):
            latest(str(where))
        assert "Permission denied" in entries(str(where), verify=False)[0].problem
    assert names(where) == ["step-00000001"]
    assert latest(str(where)) is not None


def refuse(*args, **kwargs):
    raise OSError(errno.EROFS, "Read-only file system")


def test_what_cannot_be_set_aside_is_passed_over(where, monkeypatch, caplog):
    for step in (1, 2):
        save(str(where), snapshot(step), keep=2)
    flip(where / "step-00000002" / "manifest.json", 9)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        assert latest(str(where)).step == 1
        assert "Read-only" in caplog.text
        with pytest.raises(StorageError, match="Read-only"):
            save(str(where), snapshot(2), keep=2)
    assert names(where) == ["step-00000001", "step-00000002"]


def test_what_another_has_removed_meanwhile_need_not_be_set_aside(where, caplog):
    save(str(where), snapshot(1), keep=2)
    flip(where / "step-00000001" / "manifest.json", 9)
    entry = save(
        str(where), snapshot(1), keep=2, fence=lambda: shutil.rmtree(where / "step-00000001")
    )
    assert names(where) == ["step-00000001"]
    assert latest(str(where)) == entry


def test_a_superseded_writer_sets_nothing_aside(where):
    def fence():
        raise FencedError("generation 1, expected 2")

    save(str(where), snapshot(1), keep=2)
    flip(where / "step-00000001" / "manifest.json", 9)
    before = tree(where)
    with pytest.raises(FencedError):
        save(str(where), snapshot(1), keep=2, fence=fence)
    assert tree(where) == before


def test_a_checkpoint_of_another_format_is_not_set_aside(where):
    save(str(where), snapshot(1), keep=2)
    save(str(where), snapshot(2), keep=2)
    reseal(where / "step-00000002", lambda manifest: manifest.update(format=2))
    with pytest.raises(CheckpointError, match=r"found format 2 of dtrain .*, expected 1"):
        latest(str(where))
    assert names(where) == ["step-00000001", "step-00000002"]


# -- which are kept ----------------------------------------------------------------------------


def test_the_newest_are_kept(where, url):
    for place in (str(where), url):
        for step in (1, 2, 3, 10, 100_000_000):
            save(place, snapshot(step), keep=3)
        found = [e.step for e in entries(place, verify=True)]
        assert found == [100_000_000, 10, 3]
        entry = save(place, snapshot(4), keep=1)  # older than the one that is kept
        assert [e.step for e in entries(place, verify=True)] == [100_000_000, 4]
        assert entry.problem is None
    assert names(where) == ["step-00000004", "step-100000000"]


def test_newest_first_and_of_one_step_the_one_that_counts(where):
    save(str(where), snapshot(2), keep=1)
    aside = ["step-00000002.corrupt", *(f"step-00000002.corrupt-{i}" for i in range(1, 12))]
    for name in [*aside, "step-00000003.corrupt"]:
        (where / name).mkdir()
    found = [e.name for e in entries(str(where), verify=True)]
    assert found == ["step-00000003.corrupt", "step-00000002", *aside[::-1]]


def test_what_cannot_be_removed_is_never_half_there(where, monkeypatch, caplog):
    for step in (1, 2):
        save(str(where), snapshot(step), keep=2)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        assert save(str(where), snapshot(3), keep=2).step == 3
        assert "Read-only" in caplog.text
        assert [name for name in names(where) if name[0] != "."] == [
            "step-00000002",
            "step-00000003",
        ]
        patch.setattr(files, "_step", Steps(4, fail))
        with pytest.raises(StorageError, match="No space left"):  # the first error, no other
            save(str(where), snapshot(4), keep=2)
    assert len(list(where.glob(".*"))) == 2
    save(str(where), snapshot(5), keep=2)
    assert names(where) == ["step-00000003", "step-00000005"]


def test_one_that_is_half_there_does_not_count(where):
    for step in (1, 2, 3):
        save(str(where), snapshot(step), keep=3)
    (where / "step-00000002" / "manifest.json").unlink()
    save(str(where), snapshot(4), keep=3)
    assert names(where) == [
        "step-00000001",
        "step-00000002.corrupt",
        "step-00000003",
        "step-00000004",
    ]


def test_no_more_are_kept_of_those_set_aside(where):
    for step in (1, 2, 2, 3):
        save(str(where), snapshot(step), keep=9)
        flip(where / f"step-{step:08d}" / "part-00000.safetensors", 60)
        assert latest(str(where)) is None
    assert names(where) == [
        "step-00000001.corrupt",
        "step-00000002.corrupt",
        "step-00000002.corrupt-1",
        "step-00000003.corrupt",
    ]
    assert [e.name for e in entries(str(where), verify=False)] == names(where)[::-1]
    save(str(where), snapshot(4), keep=2)
    assert names(where) == ["step-00000002.corrupt-1", "step-00000003.corrupt", "step-00000004"]


def test_a_step_is_written_once(where, url, monkeypatch, caplog):
    for place in (str(where), url):
        first = save(place, snapshot(1), keep=1)
        with monkeypatch.context() as patch:
            patch.setattr(files, "_step", steps := Steps())
            again = snapshot(1, params=snapshot(9).params)
            assert save(place, again, keep=1) == first
            assert steps.seen == []
        assert_same(load(first), snapshot(1))
        assert not caplog.records
        save(place, snapshot(1, about={"job": "job-2"}), keep=1)
        assert "job-1" in caplog.text
        caplog.clear()


def test_a_damaged_step_is_written_anew(where, caplog):
    save(str(where), snapshot(1), keep=1)
    flip(where / "step-00000001" / "part-00002.safetensors", 60)
    entry = save(str(where), snapshot(1, shards=2), keep=1)
    assert "part-00002" in caplog.text
    assert names(where) == ["step-00000001", "step-00000001.corrupt"]
    assert_same(load(latest(str(where))), snapshot(1, shards=2))
    assert latest(str(where)) == entry


def test_foreign_files_are_left_alone(where):
    where.mkdir()
    (where / "notes.txt").write_text("mine")
    (where / "step-00000099").write_text("a file")
    folders = ["step-7", "step-00000001.bak", ".step-mine.tmp", "run", "step-0000000१"]
    for folder in folders:
        (where / folder).mkdir()
        (where / folder / "manifest.json").write_text("{}")
        os.utime(where / folder, (0, 0))
    before = tree(where)
    for step in (1, 2):
        save(str(where), snapshot(step), keep=1)
    assert latest(str(where)).step == 2
    assert [e.step for e in entries(str(where), verify=True)] == [2]
    after = tree(where)
    assert before.items() <= after.items()
    assert {path.partition("/")[0] for path in after} - {p.partition("/")[0] for p in before} == {
        "step-00000002"
    }


# -- places ------------------------------------------------------------------------------------


def test_a_place_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for place, words in [
        (f"{tmp_path}/file", "file"),
        (f"{tmp_path}/file/deeper", "file"),
        ("relative", "relative path"),
        ("~/home", "relative path"),
        ("nosuch://x", "nosuch"),
    ]:
        for act in (check_writable, lambda place: save(place, snapshot(1), keep=1)):
            with pytest.raises(StorageError, match=words):
                act(place)
    with pytest.raises(CheckpointError, match="file"):
        latest(f"{tmp_path}/file")
    assert names(tmp_path) == ["file"]


def test_a_place_that_can_be_written(where, url):
    check_writable(str(where))
    assert names(where) == []
    check_writable(url)
    assert remote_files(url) == []
    save(url, snapshot(0), keep=1)
    check_writable(url)
    assert latest(url).step == 0


def test_a_file_url_is_a_local_path(where):
    save(f"file://{where}", snapshot(1), keep=1)
    assert_same(load(latest(f"file://{where}")), snapshot(1))
    assert names(where / "step-00000001") == [
        "manifest.json",
        *(f"part-0000{i}.safetensors" for i in range(3)),
    ]


def test_a_url_round_trip(url):
    entry = save(url, snapshot(12, LARGE), keep=1)
    assert latest(url) == entry
    assert entries(url, verify=True) == entries(url, verify=False) == [entry]
    assert_same(load(entry), snapshot(12, LARGE))
    assert len(remote_files(url)) == 4


class Killed(BaseException):
    pass


class Dead(Steps):
    """From operation ``at`` on none is done, clean-up neither: as in a killed process."""

    def __call__(self, operation: str, path: object) -> None:
        super().__call__(operation, path)
        if len(self.seen) > self.at:
            raise Killed


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_writer_to_a_url_may_die_anywhere(url, monkeypatch, is_damaged):
    at, kept, is_done = 0, set(), False
    while not is_done:
        place = f"{url}/{at}"
        for step in (1, 2, 3)[: 3 if is_damaged else 2]:
            save(place, snapshot(step), keep=3)
        if is_damaged:
            damage_remote(place, 3)
        with monkeypatch.context() as patch:
            patch.setattr(files, "_step", Dead(at))
            try:
                save(place, snapshot(3, shards=2), keep=2)
                is_done = True
            except Killed:
                pass
        found = latest(place)
        kept.add(found.step)
        cut = 2 if found.step == 3 else 3
        assert_same(load(found), snapshot(found.step, shards=cut))
        save(place, snapshot(4), keep=2)
        left = entries(place, verify=True)
        whole = [e.step for e in left if e.problem is None]
        assert whole in ([4, 3], [4, 2]), at
        assert {p.partition("/")[0] for p in remote_files(place)} == {
            e.name.removesuffix(".corrupt") for e in left
        }
        at += 1
    assert at > 8
    assert kept == {2, 3}


def damage_remote(url: str, step: int) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    path = next(p for p in fs.find(f"{url}/step-{step:08d}") if "part-00001" in p)
    raw = bytearray(fs.cat_file(path))
    raw[60] ^= 1
    fs.pipe_file(path, bytes(raw))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), RuntimeError("full")])
def test_an_operation_on_a_url_may_fail_anywhere(url, monkeypatch, error, caplog):
    def act():
        raise error

    at, steps, failures = 0, None, 0
    while steps is None or len(steps.seen) > at - 1:
        place = f"{url}/{at}"
        for step in (1, 2):
            save(place, snapshot(step), keep=3)
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(files, "_step", steps := Steps(at, act))
            entry, found = attempt(place, snapshot(3))
        if entry is not None:
            assert len(steps.seen) <= at or "full" in caplog.text
            assert latest(place) == entry
        else:
            assert "full" in found
            assert place in found
            assert latest(place).step == 2
            failures += 1
            # A manifest that failed may have come there all the same, so its parts are left.
            if "manifest" not in steps.seen[at][1].name:
                assert not [p for p in remote_files(place) if "00000003" in p]
        assert_same(load(latest(place)), snapshot(latest(place).step))
        at += 1
    assert failures == 5  # the folder, three parts, the manifest


def test_damage_at_a_url_is_set_aside(url, caplog):
    for step in (1, 2):
        save(url, snapshot(step), keep=2)
    damage_remote(url, 2)
    assert "part-00001" in entries(url, verify=True)[0].problem
    assert [e.name for e in entries(url, verify=True)] == ["step-00000002", "step-00000001"]
    assert latest(url).step == 1
    assert "part-00001" in caplog.text
    assert {p.rpartition("/")[2] for p in remote_files(url) if "manifest" in p and "02/" in p} == {
        "manifest.json.corrupt"
    }
    aside = entries(url, verify=True)[0]
    assert (aside.name, aside.step, aside.job) == ("step-00000002.corrupt", 2, "job-1")
    assert aside.problem.startswith("set aside; ")
    assert latest(url).step == 1
    save(url, snapshot(2), keep=2)  # anew: what was set aside goes
    assert_same(load(latest(url)), snapshot(2))
    assert [e.problem for e in entries(url, verify=True)] == [None, None]
    assert len([p for p in remote_files(url) if "02/" in p]) == 4


def test_few_are_kept_of_those_set_aside_at_a_url(url):
    for step in (1, 2, 3):
        save(url, snapshot(step), keep=5)
        damage_remote(url, step)
        assert latest(url) is None
    save(url, snapshot(4), keep=1)
    assert [e.name for e in entries(url, verify=True)] == ["step-00000004", "step-00000003.corrupt"]
    assert {p.partition("/")[0] for p in remote_files(url)} == {"step-00000003", "step-00000004"}


def test_a_url_is_no_pattern(url):
    for place in (f"{url}/a", f"{url}/[ab]*"):
        for step in (1, 2):
            save(place, snapshot(step), keep=1)
    assert [e.step for e in entries(f"{url}/a", verify=True)] == [2]
    assert [e.step for e in entries(f"{url}/[ab]*", verify=True)] == [2]
    check_writable(f"{url}/[ab]*")
    assert latest(f"{url}/a").step == 2


def test_foreign_files_at_a_url_are_left_alone(url):
    import fsspec

    fs = fsspec.filesystem("memory")
    foreign = ["notes.txt", "run/manifest.json", "step-00000001.bak/x", "step-7/x"]
    for path in foreign:
        fs.pipe_file(f"{url}/{path}", b"mine")
    for step in (1, 2):
        save(url, snapshot(step), keep=1)
    assert set(foreign) <= set(remote_files(url))
    assert latest(url).step == 2


def test_the_log_is_named(where, caplog):
    save(str(where), snapshot(1), keep=1)
    flip(where / "step-00000001" / "manifest.json", 5)
    with caplog.at_level(logging.WARNING, logger="dtrain.checkpoint"):
        latest(str(where))
    assert caplog.records[0].levelno == logging.WARNING
