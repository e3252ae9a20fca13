"""The data of digits.toml: scikit-learn's bundled 8 by 8 images of handwritten digits."""

import numpy as np
from sklearn.datasets import load_digits


def load() -> tuple[np.ndarray, np.ndarray]:
    """1,797 images of 64 pixels in 0..1, float32, and their digits in 0..9."""
    X, y = load_digits(return_X_y=True)
    return (X / 16).astype(np.float32), y
