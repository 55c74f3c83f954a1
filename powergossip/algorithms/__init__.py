"""Averaging algorithms, and the learning algorithms built on them.

An averaging algorithm's `step(x)` changes x [worker, D] in place. It is a generator that does no
communication itself: it yields messages and is resumed with the received ones (see network)::

    averaging.py      the interface
    plain.py          without compression: plain gossip, SPARTA, all-reduce, Chebyshev, …
    compressed_gossip.py     CHOCO-Gossip, DeepSqueeze, Moniqua
    compiled_compression.py  their compiled loops
    push_sum.py       push-sum, for directed graphs
    quantized_mean.py   all-reduce in few bits
    power_gossip.py   PowerGossip
    directions.py     its memory and orthonormalization
    compiled_directions.py      the same in compiled loops, on a CPU
    rates.py          diffusion rates: the best, the largest, rates of compressed messages
    learning/         learning rules on top of averaging algorithms: D-PSGD and others
    aggregation.py    the interface of compressed gradients: power_sgd.py, dgc/,
                      error_feedback.py, sign_sgd.py
    ddp_hooks.py  PyTorch's own hooks for compressed gradients
    method.py         a method by its names, with all options: what programs and optimizers make

To add one, write its class in a module beside this one and its row in `AVERAGING`, in
registry.py. train.py,
gossip_run.py and the tests of the laws of all averaging algorithms, in
tests/algorithms/test_algorithms.py, use the registry.

Axes: worker (hosted here), neighbor (slot), batch (matrices of one shape in one batched product:
the layers of one worker, or one layer of all workers), rank, row, column.
Symbols: x_i (the parameters of worker i, D elements), w_ij (the weight of j's values at i), γ (the
diffusion rate), X_i (one of i's parameter tensors as a matrix [row, column]).
"""

from powergossip.algorithms.averaging import Averaging, Rate
from powergossip.algorithms.compressed_gossip import ChocoGossip, DeepSqueeze, Moniqua
from powergossip.algorithms.learning import DPSGD, Correction
from powergossip.algorithms.plain import (
    ChebyshevGossip,
    ExactMean,
    FiniteTimeGossip,
    PlainGossip,
    RandomEntries,
)
from powergossip.algorithms.power_gossip import PowerGossip
from powergossip.algorithms.push_sum import PushSum
from powergossip.algorithms.quantized_mean import QuantizedMean
from powergossip.algorithms.registry import (
    AVERAGING,
    CONSENSUS_ONLY,
    default_rate,
    defaults,
    make,
)

__all__ = [
    "AVERAGING",
    "CONSENSUS_ONLY",
    "DPSGD",
    "Averaging",
    "ChebyshevGossip",
    "ChocoGossip",
    "Correction",
    "DeepSqueeze",
    "ExactMean",
    "FiniteTimeGossip",
    "Moniqua",
    "PlainGossip",
    "PowerGossip",
    "PushSum",
    "QuantizedMean",
    "RandomEntries",
    "Rate",
    "default_rate",
    "defaults",
    "make",
]
