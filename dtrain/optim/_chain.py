"""Transforms of the gradient, and an optimizer behind them, as one optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from dtrain.checks import arguments
from dtrain.errors import SpecError
from dtrain.optim._base import KINDS, Optimizer, Step, optimizer_from
from dtrain.optim._blocks import norm, norms, scale
from dtrain.optim._transforms import Transform, transform_from


class _Chain:
    """A :class:`~dtrain.optim._base.Kind`: a stage for each norm, then those of the optimizer."""

    def checked(self, key: str, args: Mapping[str, Any]) -> dict[str, Any]:
        transforms: list[Transform] = []
        # A loop, as what is nested in a file may be nested deeper than Python's stack.
        while True:
            found, optimizer = _parts(key, args)
            transforms += [
                transform_from(f"{key}.transforms[{i}]", item) for i, item in enumerate(found)
            ]
            key = f"{key}.optimizer"
            if not isinstance(optimizer, Mapping) or optimizer.get("kind") != "chain":
                break
            args = {name: value for name, value in optimizer.items() if name != "kind"}
        made = optimizer_from(key, optimizer)
        return {"transforms": (*transforms, *made.transforms), "optimizer": made.inner}

    def initial(self, args: Mapping[str, Any]) -> Mapping[str, float]:
        return args["optimizer"].initial

    def scratch(self, args: Mapping[str, Any]) -> int:
        return max(args["optimizer"].scratch, int(_norms(args) > 0))

    def stages(self, args: Mapping[str, Any]) -> int:
        return _norms(args) + args["optimizer"].stages

    def sums(self, args: Mapping[str, Any]) -> int:
        return max(args["optimizer"].sums, int(_norms(args) > 0))

    def stage(self, index: int, step: Step) -> np.ndarray | None:
        inner, own = step.args["optimizer"], _norms(step.args)
        grad, factors = step.grad, step.factors
        found: np.ndarray | None
        if index <= own:
            if factors is not None:
                scale(grad, step.starts, factors, grad)
            for transform in _between_norms(step.args["transforms"])[index]:
                transform.apply(grad)
        if index < own:
            found = norms(grad, step.starts, step.scratch[0])[np.newaxis]
        else:
            inner_step = step._replace(
                args=inner.args,
                scratch=step.scratch[: inner.scratch],
                factors=factors if index > own else None,
            )
            found = KINDS[inner.kind].stage(index - own, inner_step)
        if found is not None and len(found) < self.sums(step.args):
            unused = np.zeros((self.sums(step.args) - len(found), len(step.starts)))
            found = np.concatenate([found, unused])
        return found

    def resolve(
        self, index: int, args: Mapping[str, Any], sums: np.ndarray, variables: np.ndarray
    ) -> np.ndarray:
        own, inner = _norms(args), args["optimizer"]
        if index >= own:
            return inner.resolve(index - own, sums[: inner.sums], variables)
        scaling = [transform for transform in args["transforms"] if transform.needs_norm]
        return np.full(len(variables), scaling[index].factor(norm(sums[0])))


def _parts(key: str, args: Mapping[str, Any]) -> tuple[Sequence[Any], Any]:
    arguments(key, args, ("transforms", "optimizer"))
    for name in ("transforms", "optimizer"):
        if name not in args:
            raise SpecError(f"{key}: found no argument {name!r}, expected transforms and optimizer")
    transforms = args["transforms"]
    if not isinstance(transforms, tuple | list) or not transforms:
        raise SpecError(
            f"{key}.transforms: found {transforms!r}, expected a list of transforms, not empty"
        )
    return transforms, args["optimizer"]


def _norms(args: Mapping[str, Any]) -> int:
    return len(_between_norms(args["transforms"])) - 1


@lru_cache
def _between_norms(transforms: tuple[Transform, ...]) -> tuple[tuple[Transform, ...], ...]:
    """The elementwise transforms before the first norm, between norms, and after the last."""
    runs: list[list[Transform]] = [[]]
    for transform in transforms:
        if transform.needs_norm:
            runs.append([])
        else:
            runs[-1].append(transform)
    return tuple(map(tuple, runs))


KINDS["chain"] = _Chain()


def chain(*parts: Transform | Optimizer) -> Optimizer:
    """Transforms of the gradient, the first first, and behind them the optimizer.

    In synchronous training the gradient is the mean over the replicas, in asynchronous training
    that of each replica.  A chain in a chain is the same as its parts in its place.

    Parameters
    ----------
    parts : Transform and Optimizer
        One or more transforms, and last an optimizer.

    Raises
    ------
    SpecError
        Names the part, what was found and what is allowed.
    """
    if not parts:
        raise SpecError("chain: found no parts, expected transforms and last an optimizer")
    if isinstance(parts[-1], Transform):
        raise SpecError(f"chain: found {parts[-1]!r} as the last part, expected an optimizer there")
    return Optimizer("chain", {"transforms": parts[:-1], "optimizer": parts[-1]})
