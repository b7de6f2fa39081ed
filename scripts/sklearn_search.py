"""The default study's job by scikit-learn: the quickest peer that was found, with nothing stored and nothing reported.

`RandomizedSearchCV` over `MLPClassifier(solver="sgd")`: the same network, data, split, epochs and search space as
studies/digits_mlp.py, in two processes. Prints the best validation score. It imports nothing of tuner.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings

import numpy as np
from scipy.stats import loguniform, uniform
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import PredefinedSplit, RandomizedSearchCV, train_test_split
from sklearn.neural_network import MLPClassifier

EPOCHS = 20


def main() -> None:
    """Search and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-trials", type=int, default=50)
    parser.add_argument("--n-jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.perf_counter()
    warnings.simplefilter("ignore", ConvergenceWarning)
    x, y = load_digits(return_X_y=True)
    x_train, x_rest, y_train, y_rest = train_test_split(x / 16, y, train_size=0.6, stratify=y, random_state=0)
    x_val, _, y_val, _ = train_test_split(x_rest, y_rest, train_size=0.5, stratify=y_rest, random_state=0)
    fold = np.r_[np.full(len(x_train), -1), np.zeros(len(x_val), dtype=int)]
    network = MLPClassifier((64, 64), solver="sgd", max_iter=EPOCHS, tol=0.0, n_iter_no_change=EPOCHS + 1)
    space = {
        "learning_rate_init": loguniform(1e-3, 1.0),
        "batch_size": [32, 64, 128, 256],
        "momentum": uniform(0.0, 0.99),
        "alpha": loguniform(1e-6, 1e-2),
    }
    search = RandomizedSearchCV(
        network,
        space,
        n_iter=args.n_trials,
        n_jobs=args.n_jobs,
        cv=PredefinedSplit(fold),
        scoring="neg_log_loss",
        refit=False,
        random_state=args.seed,
    )
    with np.errstate(all="ignore"):
        search.fit(np.r_[x_train, x_val].astype(np.float32), np.r_[y_train, y_val])
    scores = search.cv_results_["mean_test_score"]
    print(
        json.dumps({"best": float(-np.nanmax(scores)), "trials": len(scores), "seconds": time.perf_counter() - start})
    )


if __name__ == "__main__":
    main()
