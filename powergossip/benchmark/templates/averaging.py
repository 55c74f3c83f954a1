"""An averaging rule for the benchmark. Change the class and the settings, then run

powergossip-benchmark run my_method.py
powergossip-benchmark show my_method
"""

from powergossip import algorithms
from powergossip.network import ToAll


class OneNeighbor:
    """x_i ← (1 − β) x_i + β x_j with the neighbor j in slot t mod degree."""

    def __init__(self, network, layout, *, weight=0.5):  # weight: β, an option
        self.t, self.weight = 0, weight

    def step(self, x):  # [worker, D], the models; other workers are known by messages only
        received = yield ToAll(x)  # [worker, neighbor, D]
        x.lerp_(received[:, self.t % received.shape[1]], self.weight)
        self.t += 1

    def state_dict(self):  # for checkpoints
        return {"t": self.t}

    def load_state_dict(self, state):
        self.t = state["t"]


algorithms.AVERAGING["one-neighbor"] = OneNeighbor


def settings(rates):  # to try; options of the rule begin with optimizer_
    return [
        {"optimizer": "one-neighbor", "optimizer_weight": weight, "learning_rate": rate}
        for weight in (0.5, 0.3)
        for rate in rates
    ]


# The quick tier tries the first 4 settings. Images train with SGD, text with AdamW.
SETTINGS = {"all": settings((0.1, 0.05)), "text": settings((0.01, 0.003))}
