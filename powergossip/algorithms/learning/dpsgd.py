"""D-PSGD over any averaging algorithm."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from powergossip.algorithms.averaging import Averaging, begin_at, on_numerator
from powergossip.algorithms.learning.rule import Correction, Update
from powergossip.algorithms.plain import ExactMean
from powergossip.network import Exchange, Network
from powergossip.parameters import Parameters


class DPSGD:
    """Decentralized parallel SGD with any averaging algorithm G and local update u.

        overlapping:  x_{t+1} = G(x_t) − η u(g(x_t))
        otherwise:    x_{t+1} = G(x_t − η u(g(x_t)))

    Lian et al. (2017), arXiv:1705.09056, Algorithm 1. There the gradient is taken at the same x_t
    that neighbors receive, so messages are in flight while it is computed. All-reduce always
    follows the update, which makes it SGD on the mean gradient.

    update        the step of a local optimizer over `parameters.x`, without coupled weight decay,
                  which is added here: g + λ x_t
    weight_decay, clip
                  see Correction
    local_steps   gossip in every k-th step only (Stich 2019, arXiv:1805.09767)
    """

    kept = ("steps",)
    conserved = ()

    def __init__(
        self,
        network: Network,
        averaging: Averaging,
        parameters: Parameters,
        update: Update,
        *,
        overlapping: bool = True,
        weight_decay: float = 0.0,
        clip: float | None = None,
        local_steps: int = 1,
    ):
        self._network, self._averaging = network, averaging
        self._update = on_numerator(averaging, parameters.x, update)
        self._local_steps, self._steps = local_steps, 0
        self._overlapping = overlapping and not isinstance(averaging, ExactMean)
        self._x, self._g = parameters.x, parameters.grad
        self._correct = Correction(parameters, weight_decay, clip)
        self._exchange: Exchange | None = None  # of this step, in flight

    def start(self) -> None:
        """Send the first messages of x_t, if this step gossips and overlaps. g ← 0."""
        self._steps += 1
        if self._overlapping and self._gossips():
            self._exchange = self._network.start(self._averaging.step(self._x))
        self._g.zero_()

    def finish(self) -> None:
        """Mix and update, in the order of the class's equations."""
        self._correct()
        if self._exchange is not None:
            self._exchange.finish()
            self._exchange = None
        self._update(self._g)
        if self._gossips() and not self._overlapping:
            self._network.run(self._averaging.step(self._x))

    def _gossips(self) -> bool:
        return self._steps % self._local_steps == 0

    def begin_at(self, point: Tensor) -> None:
        """See `averaging.Copies`."""
        begin_at(self._averaging, point)

    def state_dict(self) -> dict[str, Any]:
        """The number of steps and the state of the averaging algorithm."""
        return {"steps": self._steps, "averaging": self._averaging.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        self._steps = state["steps"]
        self._averaging.load_state_dict(state["averaging"])
