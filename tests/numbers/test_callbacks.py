"""When it is enough, as a pure function of the history."""

from __future__ import annotations

import math

import pytest

from dtrain import EarlyStopping, SpecError
from dtrain.callbacks import best, enough


def history(*values):
    return [{"epoch": i + 1, "val_loss": value} for i, value in enumerate(values)]


def ends(policy, *values):
    """After how many epochs a job with these values ends."""
    for count in range(1, len(values) + 1):
        if policy.enough(history(*values[:count])):
            return count
    return None


@pytest.mark.parametrize(
    ("arguments", "values", "after", "which"),
    [
        (dict(), (3, 2, 1, 2, 3), 5, 2),
        (dict(), (3, 2, 2, 2), 4, 1),  # as good is not better
        (dict(), (3, 2, 2.5, 1, 1.5, 0.5), None, 5),
        (dict(patience=0), (3, 2, 2.5), 3, 1),
        (dict(patience=1), (3, 2, 2.5), 3, 1),
        (dict(patience=3), (3, 2, 2.5, 2.6), None, 1),
        (dict(min_delta=0.5), (3, 2.6, 2.55), 3, 0),
        (dict(min_delta=0.5), (3, 2.4, 2.0, 1.95), 4, 1),
        (dict(mode="max"), (1, 2, 1.5, 1.2), 4, 1),
        (dict(), (math.nan, math.nan), 2, None),
        (dict(), (2, math.nan, 1, math.nan), None, 2),
        (dict(), (math.inf, 3), None, 1),
    ],
)
def test_when_it_is_enough(arguments, values, after, which):
    policy = EarlyStopping(**{"mode": "min", **arguments})
    assert ends(policy, *values) == after
    assert policy.best(history(*values)) == which


def test_the_words_say_which_value_and_since_when():
    policy = EarlyStopping(mode="min")
    assert policy.enough(history(2, 3, 3)) == "val_loss was best in epoch 1"
    assert policy.enough(history(math.nan, math.nan)) == "val_loss has not been a number"
    assert policy.enough([]) is None


def test_the_first_of_several_ends_it_and_the_first_that_restores_says_what():
    slow = EarlyStopping(patience=9, mode="min")
    quick = EarlyStopping(patience=1, mode="max", restore_best=False)
    assert enough((slow, quick), history(3, 2)) == "val_loss was best in epoch 1"
    assert best((quick, slow), history(3, 2, 4)) == 1
    assert best((quick,), history(3, 2, 4)) is None


@pytest.mark.parametrize(
    ("monitor", "mode"),
    [
        ("loss", "min"), ("val_loss", "min"), ("val_accuracy", "max"), ("val_log_loss", "min"),
        ("val_top_3_accuracy", "max"), ("val_r2", "max"), ("val_mae", "min"),
    ],
)  # fmt: skip
def test_what_is_better_the_metric_knows(monitor, mode):
    assert EarlyStopping(monitor).checked([monitor]).mode == mode


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(patience=-1), "patience: found -1, expected a whole number from 0 up"),
        (dict(min_delta=-1), "min_delta: found -1, expected a finite number from 0 up"),
        (dict(restore_best=1), "restore_best: found 1, expected True or False"),
        (dict(mode="best"), "mode: found 'best', expected one of 'auto', 'min', 'max'"),
        (dict(monitor=3), "monitor: found 3, expected a name"),
    ],
)
def test_arguments_that_cannot_be(arguments, words):
    with pytest.raises(SpecError, match=words):
        EarlyStopping(**arguments)


def test_values_that_epochs_do_not_have():
    with pytest.raises(SpecError, match=r"monitor: found 'val_loss', expected one of 'loss'"):
        EarlyStopping().checked(["loss"])
    with pytest.raises(SpecError, match=r"mode: found 'auto' for 'val_own', a function of one's"):
        EarlyStopping("val_own").checked(["val_own"])
    assert EarlyStopping("val_own", mode="max").checked(["val_own"]).mode == "max"
