"""What digits.toml says, in Python: python examples/digits.py"""

from digits_data import load

import dtrain


def main() -> None:
    X, y = load()
    result = dtrain.fit(
        dtrain.models.MLP([64, 128, 10]),
        X,
        y,
        optimizer=dtrain.optim.adam(3e-3),
        replicas=2,
        batch_size=32,
        epochs=30,
        validation_split=0.2,
        metrics=["accuracy"],
        seed=0,
        name="digits",
    )
    result.save("digits-model")
    print(f"val_accuracy {result.metrics['val_accuracy']:.4f}, saved in digits-model")


# The processes of the embedded cluster import this file: only the first may start one.
if __name__ == "__main__":
    main()
