"""A GPU for the replicas of one host: the model's arrays there, and the copies to and fro.

The shards stay in host memory, and so do the links and the optimizer.  What a GPU has is a copy
of the parameters, one flat buffer for all replicas of a host, and a buffer for the gradient, which
they use one after the other.  Each crosses in one piece: the parameters once for each version, the
gradient once for each batch.  A replica on a CPU has none of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from dtrain.arrays import aligned_bytes, namespace, on, transfer
from dtrain.errors import DataError
from dtrain.layout import Layout, Views
from dtrain.runtime.arena import poisoned

#: The types of elements that CuPy has, as NumPy's characters.
_ELEMENTS = "?bBhHiIlLqQefdFD"

#: ``(x, y)``, or ``(x, y, w)``.
Batch = tuple[Any, ...]


class Gpu:
    """The replicas' own memory on a GPU.

    Parameters
    ----------
    name : str
        ``"cuda:<number>"``.
    layout : Layout
    """

    def __init__(self, name: str, layout: Layout) -> None:
        self.name = name
        self._xp = namespace(name)
        with on(name):
            self._params = layout.views(aligned_bytes(layout.nbytes, self._xp))
            #: the gradient that was computed last
            self.grads = poisoned(layout.views(aligned_bytes(layout.nbytes, self._xp)))
        #: the version of the parameters that is here
        self._version: int | None = None

    @contextmanager
    def step(
        self, version: int | None, params: Mapping[str, Any], batch: Batch, out: Mapping[str, Any]
    ) -> Iterator[tuple[Views, Batch, Views]]:
        """Inside: parameters, a batch, and where to write its gradient, all on the GPU.

        Once left without an error, the gradient is in ``out``.
        """
        with on(self.name):
            yield self.params(version, params), self.batch(*batch), self.grads
            assert isinstance(out, Views)
            transfer(out.flat, self.grads.flat)

    def params(self, version: int | None, params: Mapping[str, Any]) -> Views:
        """``params``, which are views of host memory, on the GPU; not to be written to.

        ``version`` says which they are.  None: nobody knows, and they are copied in any case.
        """
        assert isinstance(params, Views)
        if version is None or version != self._version:
            self._version = None
            transfer(self._params.flat, params.flat)
            self._version = version
        return self._params

    def batch(self, x: Any, y: Any, *weights: Any) -> Batch:
        """Rows, targets and, if there are any, weights on the GPU."""
        rest = (self.there("sample_weight", w) for w in weights)
        if isinstance(x, dict):
            x = {name: self.there(f"X[{name!r}]", one) for name, one in x.items()}
        else:
            x = self.there("X", x)
        return x, None if y is None else self.there("y", y), *rest

    def there(self, what: str, values: Any) -> Any:
        """An array on the GPU; ``what`` it is, for the error."""
        if not hasattr(values, "dtype"):
            values = np.asarray(values)
        if values.dtype.char not in _ELEMENTS:
            raise DataError(
                f"{what}: found dtype {values.dtype}, expected numbers, as the replica computes on "
                f"{self.name}"
            )
        return self._xp.asarray(values)
