"""How late will a flight arrive?  A Dask data frame in, a column of predictions out.

    python examples/flights.py

It trains on January to August, validates on September and October, and tests on November and
December, beside scikit-learn's MLPRegressor of the same size on the same rows.
``dtrain submit examples/flights.toml`` trains the same model.
"""

import argparse
import time

import numpy as np
from flights_data import FEATURES, TARGET, flights, split
from sklearn.neural_network import MLPRegressor

import dtrain

HIDDEN, RATE, BATCH = 32, 1e-3, 256


def main(fraction: float, epochs: int) -> None:
    with dtrain.connect(workers=2) as client:
        train, validation, test = (part.persist() for part in split(flights(fraction)))
        width = 4 + sum(
            len(train[name].cat.categories) for name in ("carrier", "origin", "weekday")
        )
        began = time.perf_counter()
        result = dtrain.fit(
            dtrain.models.MLP([width, HIDDEN, 1], loss="squared"),
            train[FEATURES],
            train[TARGET],
            optimizer=dtrain.optim.adam(RATE),
            replicas=2,
            batch_size=BATCH // 2,
            epochs=epochs,
            validation_data=(validation[FEATURES], validation[TARGET]),
            metrics=["mse", "mae"],
            client=client,
        )
        ours = time.perf_counter() - began
        for epoch in result.history:
            rmse = epoch["val_mse"] ** 0.5
            print(f"epoch {epoch['epoch']}: off by {epoch['val_mae']:.2f} min, RMSE {rmse:.2f}")

        # Back into the frame, beside what the airline said.
        test = test.assign(predicted=result.predict(test))
        found = test[["carrier", TARGET, "predicted"]].compute()
        error = found["predicted"] - found[TARGET]
        print(error.abs().groupby(found["carrier"], observed=True).mean().round(1).to_string())

        # The same model elsewhere, of the same rows as one array in this process.
        X, y = (part.compute() for part in (train[FEATURES], train[TARGET]))
        reference = MLPRegressor(
            hidden_layer_sizes=(HIDDEN,),
            alpha=0,
            learning_rate_init=RATE,
            batch_size=BATCH,
            max_iter=epochs,
            random_state=0,
        )
        began = time.perf_counter()
        reference.fit(result.columns.encode(X), y.to_numpy())
        theirs = time.perf_counter() - began
        said = reference.predict(result.columns.encode(test[FEATURES].compute()))

    rmse = float(np.sqrt(np.mean(error**2)))
    other = float(np.sqrt(np.mean((said - found[TARGET]) ** 2)))
    rows = result.ledger.samples[-1]
    print(f"{rows} flights to train on, {len(found)} to test with")
    print(f"RMSE of dtrain       {rmse:.3f} min, {ours:.1f} s")
    print(f"RMSE of scikit-learn {other:.3f} min, {theirs:.1f} s ({rmse / other - 1:+.2%})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fraction", type=float, default=1.0, help="how many of the flights")
    parser.add_argument("--epochs", type=int, default=8)
    main(**vars(parser.parse_args()))
