"""Real data, to a real accuracy."""

from __future__ import annotations

import numpy as np
import pytest

import dtrain
from dtrain.models import MLP


@pytest.mark.cluster
def test_mnist_reaches_097_in_five_epochs(mnist, forked):
    X, X_test = (mnist[k].reshape(-1, 784).astype(np.float32) / 255 for k in ("x_train", "x_test"))
    y, y_test = mnist["y_train"], mnist["y_test"]
    result = dtrain.fit(
        MLP([784, 128, 10]),
        X,
        y,
        optimizer=dtrain.optim.adam(1e-3),
        replicas=2,
        batch_size=64,
        epochs=5,
        validation_data=(X_test, y_test),
        metrics=["accuracy"],
        client=forked,
        progress=False,
    )
    assert result.metrics["val_accuracy"] >= 0.97
    assert result.ledger.samples == [60_000] * 5
    assert result.evaluate(X_test, y_test)["accuracy"] == result.metrics["val_accuracy"]
