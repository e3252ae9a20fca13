"""Steps of an optimizer, as the runtime takes them: one shard after the other, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from dtrain.arrays import xp_of
from dtrain.optim import Optimizer, make_scratch


def step(
    optimizer: Optimizer,
    t: int,
    grad,
    params,
    slots: Mapping,
    out_params,
    out_slots: Mapping,
    *,
    starts: Sequence[int] = (0,),
    variables: Sequence[int] | None = None,
    cuts: Sequence[int] = (),
    scratch: Sequence | None = None,
) -> list[np.ndarray]:
    """All stages of a step over flat arrays; ``grad`` is overwritten.

    ``starts`` are those of the blocks, ``variables`` what they belong to (one each if not given),
    and ``cuts`` the indices of the blocks with which another slice begins.  Returns the factors
    between the stages.
    """
    starts = np.asarray(starts)
    variables = np.arange(len(starts)) if variables is None else np.asarray(variables)
    ends = [*starts.tolist(), grad.size]
    slices = list(pairwise([0, *cuts, len(starts)]))
    if scratch is None:
        scratch = make_scratch(optimizer, grad.dtype.name, grad.size, xp_of(grad))
    factors, all_factors = None, []
    for index in range(optimizer.stages):
        sums = []
        for first, last in slices:
            part = slice(ends[first], ends[last])
            for array in scratch:
                array.fill(np.nan)  # what one slice left there is nothing to the next
            sums.append(
                optimizer.stage(
                    index,
                    t,
                    grad[part],
                    params[part],
                    {name: slot[part] for name, slot in slots.items()},
                    out_params[part],
                    {name: slot[part] for name, slot in out_slots.items()},
                    scratch,
                    starts[first:last] - ends[first],
                    None if factors is None else factors[first:last],
                )
            )
        if index < optimizer.stages - 1:
            together = np.concatenate(sums, axis=1)
            assert together.dtype == np.float64
            assert together.shape == (optimizer.sums, len(starts))
            factors = optimizer.resolve(index, together, variables)
            assert factors.dtype == np.float64
            assert factors.shape == (len(starts),)
            all_factors.append(factors)
        else:
            assert sums == [None] * len(slices)
    return all_factors


def run(optimizer, params, grads, *, in_place=False, **blocks):
    """All steps over ``grads``; double-buffered unless in place.  Returns params and slots."""
    xp = xp_of(params)
    buffers = [params.copy(), params.copy() if in_place else xp.full_like(params, np.nan)]
    slots = [optimizer.init(params)]
    slots.append({name: xp.full_like(value, np.nan) for name, value in slots[0].items()})
    if in_place:
        buffers[1], slots[1] = buffers[0], slots[0]
    for t, grad in enumerate(grads, 1):
        old, new = (t + 1) % 2, t % 2
        step(
            optimizer, t, grad.copy(), buffers[old], slots[old], buffers[new], slots[new], **blocks
        )
    last = len(grads) % 2
    return buffers[last], slots[last]
