"""Every numeric test that takes `xp` runs on NumPy and, where there is a GPU, on CuPy."""

from __future__ import annotations

import numpy as np
import pytest

from dtrain import arrays
from dtrain.errors import SpecError


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request):
    if request.param == "numpy":
        return np
    try:
        return arrays.namespace("cuda")
    except SpecError as error:
        pytest.skip(f"needs a GPU: {error}")
