"""Your own CSV file and model: regression with a multilayer perceptron.

Commands::

    python examples/tabular.py        writes diabetes.csv, with scikit-learn's data
    mpirun -np 4 python train.py task=examples.tabular:task task_options.file=diabetes.csv
"""

import pandas as pd
import torch
from torch import nn
from torch.utils.data import TensorDataset

from powergossip.tasks import Datasets

DEFAULTS = {"num_epochs": 20, "learning_rate": 0.01}  # of train.py, for this task


def task(file: str, target: str = "target") -> Datasets:
    """Every fifth row is for tests. All columns are standardized by the other rows."""
    table = pd.read_csv(file)
    is_test = table.index % 5 == 0
    standard = (table - table[~is_test].mean()) / table[~is_test].std()
    inputs = torch.tensor(standard.drop(columns=target).values).float()
    targets = torch.tensor(standard[target].values).float()
    return Datasets(
        TensorDataset(inputs[~is_test], targets[~is_test]),
        TensorDataset(inputs[is_test], targets[is_test]),
        model=mlp,
        model_arguments={"n_features": inputs.shape[1]},
        derived=lambda means: {"r2": 1 - means["mse"]},  # the targets have variance 1
        main_metric="r2",
        larger_is_better=True,
        columns=table[~is_test],
    )


def mlp(n_features: int, hidden: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(n_features, hidden), nn.ReLU(), nn.Linear(hidden, 1))


if __name__ == "__main__":
    from sklearn.datasets import load_diabetes

    load_diabetes(as_frame=True, scaled=False).frame.to_csv("diabetes.csv", index=False)
