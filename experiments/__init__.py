"""One file a question: configurations, and a report of their rows. See __main__.py and runner.py.

A new experiment is its file and its row in `EXPERIMENTS`.
"""

from experiments import compressed_gradients, learning
from experiments.runner import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    "fashion_mnist": learning.experiment(
        "what each method reaches on FashionMNIST, data dealt out evenly", learning.FASHION_MNIST
    ),
    "fashion_mnist_sorted": learning.experiment(
        "the same, data sorted by label: each worker sees one or two labels",
        learning.FASHION_MNIST | {"use_decentralized_data": True},
        tuning_epochs=1,
    ),
    "fashion_mnist_dirichlet": learning.experiment(
        "the same, labels dealt out by a Dirichlet distribution with alpha 0.1",
        learning.FASHION_MNIST | {"decentralized_data_dirichlet_alpha": 0.1},
        tuning_epochs=1,
    ),
    "compressed_gradients": compressed_gradients.experiment(),
    "topics_lstm": learning.experiment(
        "what each method reaches in language modeling: an LSTM on Python's reference texts",
        learning.TOPICS_LSTM,
        measure="perplexity",
        rates=(5.0, 10.0),
        tuning_epochs=1,
    ),
}
