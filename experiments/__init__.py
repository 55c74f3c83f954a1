"""Experiments: configurations and a report of their rows, in a file per question.

The command line is in __main__.py, the machinery in powergossip/runner. A new experiment is a file
and a row in `EXPERIMENTS`.
"""

from experiments import (
    compressed_gradients,
    compression_pays,
    consensus,
    different_data,
    failing_workers,
    few_bits,
    language,
    language_bits,
    language_larger,
    papers,
    relay,
    spectrum,
    tuned_methods,
)
from powergossip.runner.runner import Experiment

# Of experiments that have the tables and figures of a paper: title → their names.
PAPERS: dict[str, tuple[str, ...]] = {
    "PowerGossip, arXiv:2008.01425": (
        "consensus",
        "consensus_faces",
        "cifar10_resnet20",
        "cifar10_resnet20_small",
        "wikitext2_lstm",
        "wikitext2_lstm_small",
        "lstm_spectrum",
        "lstm_spectrum_small",
    ),
    "RelaySGD, arXiv:2110.04175": ("cifar10_vgg11", "cifar10_vgg11_small"),
}
EXPERIMENTS: dict[str, Experiment] = {
    "consensus": consensus.experiment(
        "how fast workers agree, and for how many bits: random, low-rank, faces",
        ["random", "low-rank", "lfw"],
    ),
    "consensus_faces": consensus.experiment(
        "how fast workers agree on the paper's photographs of faces, which are downloaded",
        ["faces"],
    ),
    "digits": tuned_methods.experiment(
        "accuracy of each method on Digits, IID data", tuned_methods.DIGITS, tuning_epochs=10
    ),
    "fashion_mnist": tuned_methods.experiment(
        "accuracy of each method on FashionMNIST, IID data",
        tuned_methods.FASHION_MNIST,
        methods=tuned_methods.METHODS | tuned_methods.FEW_BITS,
    ),
    "fashion_mnist_sorted": tuned_methods.experiment(
        "accuracy of each method on FashionMNIST, non-IID: one or two labels per worker",
        tuned_methods.FASHION_MNIST | {"use_decentralized_data": True},
        rates=(0.01, 0.02, 0.05),
        tuning_epochs=1,
    ),
    "fashion_mnist_dirichlet": tuned_methods.experiment(
        "accuracy of each method on FashionMNIST, non-IID: Dirichlet, alpha 0.1",
        tuned_methods.FASHION_MNIST | {"decentralized_data_dirichlet_alpha": 0.1},
        rates=(0.02, 0.05, 0.1),
        tuning_epochs=1,
    ),
    "different_data_sorted": different_data.experiment(
        "accuracy of each learning rule on FashionMNIST, fixed shards, sorted by label",
        tuned_methods.FASHION_MNIST | {"reshuffle_data": False, "use_decentralized_data": True},
        different_data.MORE,
    ),
    "different_data_dirichlet": different_data.experiment(
        "accuracy of learning rules on FashionMNIST, fixed shards, Dirichlet, alpha 0.1",
        tuned_methods.FASHION_MNIST
        | {"reshuffle_data": False, "decentralized_data_dirichlet_alpha": 0.1},
    ),
    "different_data_even": different_data.experiment(
        "accuracy of learning rules on FashionMNIST, fixed shards, IID data",
        tuned_methods.FASHION_MNIST | {"reshuffle_data": False},
    ),
    "different_data_topics": different_data.experiment(
        "perplexity of learning rules in language modeling, each worker with its own topics",
        tuned_methods.TOPICS_LSTM,
        measure="perplexity",
        rates=(2.5, 5.0, 10.0, 20.0),
        tuning_epochs=3,
    ),
    "language": language.experiment(),
    "language_bits": language_bits.experiment(),
    "language_larger": language_larger.experiment(),
    "compressed_gradients": compressed_gradients.experiment(),
    "topics_lstm": tuned_methods.experiment(
        "perplexity of each method in language modeling: an LSTM on Python's reference texts",
        tuned_methods.TOPICS_LSTM,
        measure="perplexity",
        rates=(10.0, 20.0, 40.0),
        tuning_epochs=3,  # perplexities of one epoch are alike
    ),
    "compression_pays": compression_pays.experiment(),
    "few_bits": few_bits.experiment(),
    "message_loss": failing_workers.message_loss(),
    "late_exchanges": failing_workers.late_exchanges(),
    "churn": failing_workers.churn(),
    # The experiments of the PowerGossip paper, as published and in a small form.
    "cifar10_resnet20": papers.cifar10(),
    "cifar10_resnet20_small": papers.cifar10_small(),
    "wikitext2_lstm": papers.wikitext2(),
    "wikitext2_lstm_small": papers.wikitext2_small(),
    # RelaySGD's table, likewise.
    "cifar10_vgg11": relay.published(),
    "cifar10_vgg11_small": relay.small(),
    "lstm_spectrum": spectrum.published(),
    "lstm_spectrum_small": spectrum.small(),
}
