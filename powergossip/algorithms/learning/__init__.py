"""Learning rules: how workers combine local updates with communication.

A step of a rule consists of `start()`, the gradients, and `finish()`::

    rule.start()                   the first messages are sent; parameters.grad is cleared
    ... add to parameters.grad     messages are in flight
    rule.finish()                  receive, mix, update parameters.x

    interface.py        the interface, clipping, weight decay
    centralized.py      one mean of compressed gradients in all workers
    registry.py         the rules by name, and the averaging rules that they accept
    gossip_rule.py      the base of the following, and D-PSGD's step in it
    dpsgd.py            D-PSGD: models are averaged
    quasi_global.py     quasi-global momentum
    tracking.py         gradient tracking, normalized, and over CHOCO-Gossip: BEER, MoTEF; momentum
                        tracking
    k_gt.py             K-GT: gradient tracking over local steps
    outer.py            outer optimizers of language models: DiLoCo, GASLoC, NoLoCo
    fragments.py        parts of a model that end their rounds at different steps
    outer_stability.py  diffusion rates that keep momentum stable
    exact_diffusion.py  exact diffusion, over CHOCO-Gossip: LEAD, CEDAS
    relay.py            RelaySGD on trees, in place of an averaging rule
    accelerated.py      A²CiD², for messages that may be late

To add one, write its class and its row in `LEARNING`, in registry.py. train.py and the tests of the
laws of learning rules (tests/algorithms/test_learning.py) use the registry.

Axes: worker (hosted here); D parameters of a worker.
"""

from powergossip.algorithms.averaging import Kind
from powergossip.algorithms.learning.accelerated import A2CiD2, Acceleration, acceleration
from powergossip.algorithms.learning.centralized import CentralizedLocal, CentralizedSGD
from powergossip.algorithms.learning.dpsgd import DPSGD
from powergossip.algorithms.learning.exact_diffusion import ExactDiffusion
from powergossip.algorithms.learning.gossip_rule import (
    Buffers,
    GossipRule,
    Local,
    Variable,
    Workers,
)
from powergossip.algorithms.learning.interface import (
    Correction,
    Learning,
    LocalStep,
)
from powergossip.algorithms.learning.k_gt import KGT
from powergossip.algorithms.learning.outer import DiLoCo, GASLoC, NoLoCo
from powergossip.algorithms.learning.quasi_global import QuasiGlobalAdam, QuasiGlobalMomentum
from powergossip.algorithms.learning.registry import (
    DEFAULT,
    LEARNING,
    POLICIES,
    accepting,
    averaging_defaults,
    check,
    check_overlapping,
    diffusion_factor,
    is_sgd,
    make,
    options,
    overlapping,
    rule,
    with_local_steps,
    without,
)
from powergossip.algorithms.learning.relay import RelaySGD
from powergossip.algorithms.learning.tracking import (
    BEER,
    GradientTracking,
    MomentumTracking,
    MoTEF,
    NormalizedGradientTracking,
)

__all__ = [
    "BEER",
    "DEFAULT",
    "DPSGD",
    "KGT",
    "LEARNING",
    "POLICIES",
    "A2CiD2",
    "Acceleration",
    "Buffers",
    "CentralizedLocal",
    "CentralizedSGD",
    "Correction",
    "DiLoCo",
    "ExactDiffusion",
    "GASLoC",
    "GossipRule",
    "GradientTracking",
    "Kind",
    "Learning",
    "Local",
    "LocalStep",
    "MoTEF",
    "MomentumTracking",
    "NoLoCo",
    "NormalizedGradientTracking",
    "QuasiGlobalAdam",
    "QuasiGlobalMomentum",
    "RelaySGD",
    "Variable",
    "Workers",
    "acceleration",
    "accepting",
    "averaging_defaults",
    "check",
    "check_overlapping",
    "diffusion_factor",
    "is_sgd",
    "make",
    "options",
    "overlapping",
    "rule",
    "with_local_steps",
    "without",
]
