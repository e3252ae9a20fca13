"""The built-in models: stateless objects with closed-form gradients, on NumPy and CuPy."""

from __future__ import annotations

import inspect
from typing import Any

from dtrain.checks import arguments, choice
from dtrain.errors import SpecError
from dtrain.models.linear import Linear, Logistic
from dtrain.models.mlp import MLP

__all__ = ["MLP", "Linear", "Logistic"]

_NAMES: dict[str, type[Linear] | type[Logistic] | type[MLP]] = {
    "linear": Linear,
    "logistic": Logistic,
    "mlp": MLP,
}


def from_name(kind: str, **args: Any) -> Linear | Logistic | MLP:
    """The model of that name in lower_snake, as in a job's TOML file.

    Raises
    ------
    SpecError
        Lists the allowed names, or the allowed or missing arguments of ``kind``.
    """
    model = _NAMES[choice("model", kind, _NAMES)]
    parameters = inspect.signature(model).parameters
    arguments(kind, args, parameters)
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in args:
            raise SpecError(f"{kind}: found no {name!r}, expected one of these: {list(parameters)}")
    return model(**args)
