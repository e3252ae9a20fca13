"""Transforms: what is done to a gradient before an optimizer sees it.

To add one: a constructor, its entry in ``_KINDS``, and its name in this package's ``__init__``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtrain.arrays import Array, quiet, xp_of
from dtrain.checks import arguments, choice, number
from dtrain.errors import SpecError
from dtrain.optim._blocks import norm, norms_of_all, scale
from dtrain.optim._described import Described


class Transform(Described):
    """A change of the gradient and its arguments; it holds no state.

    Make one with :func:`clip` or :func:`clip_by_global_norm`, and give it to :func:`chain`.

    Parameters
    ----------
    kind : str
        The name of its constructor.
    args : mapping
        That constructor's arguments.

    Raises
    ------
    SpecError
        Names the argument, what was found and what is allowed.
    """

    def _checked(self) -> dict[str, float]:
        return _checked(self.kind, choice("transform", self.kind, _KINDS), self.args)

    @property
    def needs_norm(self) -> bool:
        """Whether it scales the gradient by a factor that follows from its global norm."""
        return _KINDS[self.kind].factor is not None

    def factor(self, norm: float) -> float:
        """What a gradient of this global norm is multiplied by."""
        factor = _KINDS[self.kind].factor
        assert factor is not None
        return factor(self.args, norm)

    def apply(self, grad: Array) -> None:
        """Change any slice of a gradient, in place; only where no norm is needed."""
        elementwise = _KINDS[self.kind].elementwise
        assert elementwise is not None
        elementwise(self.args, grad)


def clip(clip_value: float) -> Transform:
    """Limit each element of the gradient to ``[-clip_value, clip_value]``.

    As ``torch.nn.utils.clip_grad_value_``.

    Parameters
    ----------
    clip_value : float
        At least 1e-30, so that it does not vanish in float32.

    Raises
    ------
    SpecError
        Names the argument, what was found and what is allowed.
    """
    return Transform("clip", dict(locals()))


def clip_by_global_norm(max_norm: float) -> Transform:
    """Scale the gradient down to a norm of ``max_norm`` where it is longer (Pascanu et al., 2013).

    ``g *= max_norm / max(norm, max_norm)``, with the norm over all elements of all variables.  As
    ``tf.clip_by_global_norm`` and ``optax.clip_by_global_norm``; PyTorch's ``clip_grad_norm_``
    adds 1e-6 to the norm.

    Parameters
    ----------
    max_norm : float
        At least 1e-30, so that it does not vanish in float32.

    Raises
    ------
    SpecError
        Names the argument, what was found and what is allowed.
    """
    return Transform("clip_by_global_norm", dict(locals()))


def transform_from(key: str, value: Any) -> Transform:
    """A transform, or the one that a mapping describes; errors name it ``key``."""
    if isinstance(value, Transform):
        return value
    if not isinstance(value, Mapping):
        raise SpecError(
            f"{key}: found {value!r}, expected a transform of dtrain.optim, like clip(1.0)"
        )
    rest = dict(value)
    kind = choice(f"{key}.kind", rest.pop("kind", None), _KINDS)
    return Transform(kind, _checked(key, kind, rest))


def transform_all(
    transforms: Sequence[Transform], flat: Sequence[Array], starts: Sequence[np.ndarray]
) -> None:
    """Apply transforms to a whole gradient, in place: see :meth:`Optimizer.transform`."""
    with quiet():
        for transform in transforms:
            if transform.needs_norm:
                factor = transform.factor(norm(norms_of_all(flat, starts)))
                for array, begins in zip(flat, starts, strict=True):
                    scale(array, begins, np.full(len(begins), factor), array)
            else:
                for array in flat:
                    transform.apply(array)


@dataclass(frozen=True)
class _Kind:
    """Either elementwise, or a factor by the global norm."""

    constructor: Callable[..., Transform]  # its signature holds the arguments
    elementwise: Callable[[Mapping[str, float], Array], None] | None = None
    factor: Callable[[Mapping[str, float], float], float] | None = None


def _clip(args: Mapping[str, float], grad: Array) -> None:
    limit = grad.dtype.type(args["clip_value"])
    xp_of(grad).clip(grad, -limit, limit, out=grad)


def _shrink(args: Mapping[str, float], norm: float) -> float:
    return args["max_norm"] / max(norm, args["max_norm"])


_KINDS: dict[str, _Kind] = {
    "clip": _Kind(clip, elementwise=_clip),
    "clip_by_global_norm": _Kind(clip_by_global_norm, factor=_shrink),
}


def _checked(key: str, kind: str, args: Mapping[str, Any]) -> dict[str, float]:
    names = inspect.signature(_KINDS[kind].constructor).parameters
    arguments(key, args, names)
    for name in names:
        if name not in args:
            raise SpecError(f"{key}: found no argument {name!r}, expected it")
    return {name: number(f"{key}.{name}", args[name], least=1e-30) for name in names}
