"""One file a question: configurations, and a report of their rows. See __main__.py and runner.py.

A new experiment is its file and its row in `EXPERIMENTS`.
"""

from experiments import (
    compressed_gradients,
    compression_pays,
    consensus,
    learning,
    moniqua_tuning,
    papers,
    spectrum,
)
from experiments.runner import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    "consensus": consensus.experiment(
        "how fast workers agree, and for how many bits: random, low-rank, faces",
        {"random": {}, "low-rank": {}, "lfw": {}},
    ),
    "consensus_others": consensus.experiment(
        "how fast workers agree with further compressors",
        {"random": {}, "low-rank": {}, "lfw": {}},
        [consensus.OTHERS],
    ),
    "consensus_faces": consensus.experiment(
        "how fast workers agree on the paper's faces, which are fetched from the net",
        {"faces": {"matrix_size": 64}},
    ),
    "fashion_mnist": learning.experiment(
        "what each method reaches on FashionMNIST, data dealt out evenly", learning.FASHION_MNIST
    ),
    "fashion_mnist_sorted": learning.experiment(
        "what each method reaches on FashionMNIST, sorted by label: a worker sees one or two",
        learning.FASHION_MNIST | {"use_decentralized_data": True},
        tuning_epochs=1,
    ),
    "fashion_mnist_dirichlet": learning.experiment(
        "what each method reaches on FashionMNIST, dealt out by Dirichlet, alpha 0.1",
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
    "compression_pays": compression_pays.experiment(),
    # The paper's, as published, and each in a small form for data and cores at hand.
    "cifar10_resnet20": papers.cifar10(),
    "cifar10_resnet20_small": papers.cifar10_small(),
    "wikitext2_lstm": papers.wikitext2(),
    "wikitext2_lstm_small": papers.wikitext2_small(),
    "lstm_spectrum": spectrum.published(),
    "lstm_spectrum_small": spectrum.small(),
    "moniqua_tuning": moniqua_tuning.published(),
    "moniqua_tuning_small": moniqua_tuning.small(),
}
