"""Deaths among steps that do not wait for everybody: each row is committed once an epoch."""

from __future__ import annotations

import pytest

import dtrain
from tests.runtime.witness import Witness, check_witness, numbered

from .harness import Fault, arm, finished, run, struck, submit, watch
from .test_stops import woken

pytestmark = pytest.mark.cluster

ROWS, EPOCHS, BATCH = 203, 3, 5
#: 51, 51, 51 and 50 rows in parts: 11 + 11 + 11 + 10 batches
STEPS = 43 * EPOCHS


def job(**changes):
    """A job whose parameters tell which rows made which step."""
    slow = changes.pop("slow", {2: 0.03})
    steps = changes.pop("room", STEPS)
    x, y = numbered(ROWS)
    return dict(
        model=Witness(ROWS, steps, pace=changes.pop("pace", 0.004), slow=slow), x=x, y=y,
        optimizer=dtrain.optim.sgd(1.0), mode=dtrain.Sync(backups=1), batch_size=BATCH,
        epochs=EPOCHS, validation_split=None, metrics=[],
    ) | changes  # fmt: skip


def fit(client, **changes):
    """To its end, which may be in the middle of an epoch."""
    arguments = job(**changes)
    model, x, y = (arguments.pop(name) for name in ("model", "x", "y"))
    same = dict(replicas=4, shards=2, seed=3, client=client, progress=False)
    return dtrain.fit(model, x, y, **same, **arguments)


def whole(story, epochs=EPOCHS):
    """Each row is committed exactly once an epoch, in the account and in the parameters."""
    assert story.result is not None, f"{story}"
    ledger, result = story.result.ledger, story.result
    check_witness(result.params, result.version, epochs)
    assert ledger.samples == [ROWS] * epochs
    assert ledger.applied == 43 * epochs
    assert result.version == result.history[-1]["step"]


PASSES = [
    (role, point)
    for role in ("chief", "host", "plain")
    for point in ("computing", "writing", "waiting", "applying", "flipping")
]
OFTEN = [("chief", "flipping"), ("host", "waiting"), ("plain", "applying")]


def matrix(pairs, often):
    return [
        pytest.param(*pair, id="-".join(pair), marks=[] if pair in often else [pytest.mark.slow])
        for pair in pairs
    ]


#: Who applies and who flips is left to chance: some do it seldom.
def nth(point):
    return {"applying": 3, "flipping": 2}.get(point, 9)


#: With a slow chief, which has two of the replicas, the others make all steps.
SLOW_CHIEF = {"slow": {0: 0.03}, "mode": dtrain.Sync(backups=2)}


@pytest.mark.parametrize(("role", "point"), matrix(PASSES, OFTEN))
def test_one_is_killed(three, tmp_path, role, point):
    """Nothing that was committed is lost, and nothing is committed twice."""
    arm(three, tmp_path, Fault(point, role, nth=nth(point)))
    story = run(three, **job(**SLOW_CHIEF if role == "plain" else {}))
    assert len(struck(tmp_path)) == 1, f"never there\n{story}"
    whole(story)
    assert story.status["losses"] == len(story.losses) == 1
    assert story.said("from memory")
    assert not story.said("from (start|checkpoint)")


@pytest.mark.parametrize(
    ("point", "others"),
    [
        ("flipping", 2),
        *(
            pytest.param(point, others, marks=pytest.mark.slow)
            for point in ("computing", "writing", "waiting", "applying", "flipping")
            for others in (1, 2)
            if (point, others) != ("flipping", 2)
        ),
    ],
)
def test_several_are_killed_at_once(three, tmp_path, point, others):
    """Also all of them, with the verdict recorded and the quorum not told of it."""
    arm(three, tmp_path, Fault(point, "chief", with_it=others, nth=nth(point)))
    story = run(three, **job())
    assert len(struck(tmp_path)) == 1, f"never there\n{story}"
    whole(story)
    assert story.status["losses"] == others + 1
    assert not story.said("from (start|checkpoint)")


@pytest.mark.parametrize("backups", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_killed_again_and_again(three, tmp_path, backups):
    """Of four replicas two or one make a step; three workers die one after the other."""
    faults = [
        Fault("computing", "plain", nth=5),
        Fault("waiting", "host", nth=9),
        Fault("flipping", "chief", nth=12),
    ]
    arm(three, tmp_path, *faults)
    story = run(three, **job(mode=dtrain.Sync(backups=backups), shards=3))
    assert struck(tmp_path), f"never there\n{story}"
    whole(story)
    assert not story.said("from (start|checkpoint)")


@pytest.mark.parametrize(
    ("role", "point"),
    matrix(
        [(r, p) for r, p in PASSES if p in ("computing", "writing", "applying")
         and (r, p) != ("plain", "applying")],
        [("host", "applying")],
    ),
)  # fmt: skip
def test_killed_where_memory_is_not_shared(apart, tmp_path, role, point):
    """From the last checkpoint, where a shard is gone; the account is that of what is kept."""
    (tmp_path / "faults").mkdir()
    arm(apart, tmp_path / "faults", Fault(point, role, nth=12))
    kept = dtrain.Checkpoint(tmp_path / "saved", every=4)
    story = run(apart, **job(checkpoint=kept, pace=0.01))
    assert len(struck(tmp_path / "faults")) == 1, f"never there\n{story}"
    whole(story)
    source = "memory" if role == "plain" else "(checkpoint|start)"
    assert story.said(f"goes on from step [0-9]+, from {source}")


def test_the_slow_one_is_stopped(three, tmp_path):
    """Its neighbours go on without it; it is fenced, and what it does later changes nothing."""
    with woken(tmp_path):
        arm(three, tmp_path, Fault("computing", "plain", act="SIGSTOP", nth=5))
        story = run(three, **job(slow={}, pace=0.02))
    assert len(struck(tmp_path)) == 1
    whole(story)
    assert story.status["losses"] == 1


# -- checkpoints --------------------------------------------------------------------------------


@pytest.fixture(params=["three", "apart"])
def cluster(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_job_goes_on_from_a_checkpoint(cluster, tmp_path, shards):
    """It was cancelled in the middle of an epoch, and goes on with other shards."""
    kept = dtrain.Checkpoint(tmp_path / "saved", every=3)
    handle = submit(cluster, **job(checkpoint=kept, pace=0.01))
    seen = watch(handle, lambda: handle.status()["step"] >= 20)
    handle.cancel()
    finished(handle, seen)
    (newest, *_) = dtrain.checkpoints.find(kept.dir)
    assert newest["step"] > 0
    story = run(cluster, **job(checkpoint=kept, resume=True, shards=shards))
    whole(story)
    assert story.said(f"from step {newest['step']}, from checkpoint"), story


def test_more_steps_than_before(cluster, tmp_path):
    """``steps`` ended it in the middle of an epoch; that epoch is gone on with."""
    kept = dtrain.Checkpoint(tmp_path / "saved", every=3)
    first = fit(cluster, checkpoint=kept, steps=20)
    assert first.version == 20
    check_witness(first.params, 20)
    story = run(cluster, **job(checkpoint=kept, resume=True))
    whole(story)
    assert [e["epoch"] for e in story.result.history] == [1, 2, 3]


def test_with_backups_and_without_are_two_jobs(cluster, tmp_path):
    for was, wanted in [(1, 0), (0, 1)]:
        kept = dtrain.Checkpoint(tmp_path / f"saved{was}", every=3)
        fit(cluster, checkpoint=kept, mode=dtrain.Sync(backups=was), steps=5)
        words = f"it has backups {was}, expected {wanted}"
        with pytest.raises(dtrain.CheckpointError, match=words):
            fit(cluster, checkpoint=kept, mode=dtrain.Sync(backups=wanted), steps=9, resume=True)
    # Another number of backups is another pace, not another job.
    kept = dtrain.Checkpoint(tmp_path / "saved1", every=3)
    whole(run(cluster, **job(checkpoint=kept, mode=dtrain.Sync(backups=2), resume=True)))
