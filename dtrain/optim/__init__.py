"""Optimizers: pairs of pure functions that work on any slice of the flat parameters.

All arithmetic is elementwise and written with ``out=``, so a shard can run it in chunks, into the
same arrays (asynchronous) or into others (a second buffer), and always gets the same bits.  Only
norms are not: an optimizer that needs them runs in stages, and between two of these the norms of
all blocks are put together.  Definitions, argument names and defaults are those of
``torch.optim`` where it has the optimizer.

To add an optimizer: a module here with a constructor under :func:`~dtrain.optim._rule.rule`, and
its name below; and in ``_rule._RULES`` an argument that is neither True or False nor just a number
from 0 up.
"""

from __future__ import annotations

from dtrain.optim._adagrad import adagrad
from dtrain.optim._adam import adam, adamw, lamb
from dtrain.optim._base import Optimizer
from dtrain.optim._base import apply as apply
from dtrain.optim._base import from_name as from_name
from dtrain.optim._base import make_scratch as make_scratch
from dtrain.optim._blocks import CHUNK as CHUNK
from dtrain.optim._chain import chain
from dtrain.optim._ftrl import ftrl
from dtrain.optim._rmsprop import rmsprop
from dtrain.optim._sgd import sgd
from dtrain.optim._transforms import Transform, clip, clip_by_global_norm
from dtrain.schedules import Schedule, exponential, linear, piecewise, warmup_cosine

__all__ = [
    "Optimizer",
    "Schedule",
    "Transform",
    "adagrad",
    "adam",
    "adamw",
    "chain",
    "clip",
    "clip_by_global_norm",
    "exponential",
    "ftrl",
    "lamb",
    "linear",
    "piecewise",
    "rmsprop",
    "sgd",
    "warmup_cosine",
]
