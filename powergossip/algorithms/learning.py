"""Learning with an averaging algorithm."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from powergossip.algorithms.averaging import Averaging
from powergossip.algorithms.plain import AllReduce
from powergossip.network import Network
from powergossip.parameters import Parameters

V = TypeVar("V")


class Correction:
    """g ← g · min(1, clip/‖g‖) + λ x, the latter on all but normalization layers: in place on each
    worker's gradient.    Clipping: Pascanu, Mikolov & Bengio (2013), arXiv:1211.5063, § 3.2.
    """

    def __init__(self, parameters: Parameters, weight_decay: float, clip: float | None = None):
        self._clip, self._weight_decay, self._g = clip, weight_decay, parameters.grad
        self._decayed = [
            (parameters.grad[:, span], parameters.x[:, span])
            for span in (parameters.decay_spans() if weight_decay else [])
        ]

    def __call__(self) -> None:
        if self._clip is not None:
            norms = self._g.norm(dim=1, keepdim=True)
            self._g.mul_((self._clip / norms).clamp_(max=1))
        for gradient, x in self._decayed:
            gradient.add_(x, alpha=self._weight_decay)


class DPSGD:
    """Decentralized parallel SGD with any averaging algorithm G and local update u.

        overlapping:  x_{t+1} = G(x_t) − η u(g(x_t))
        otherwise:    x_{t+1} = G(x_t − η u(g(x_t)))

    Lian et al. (2017), arXiv:1705.09056, Algorithm 1, where the gradient is taken at the same x_t
    that goes to the neighbors: hence both can be under way at the same time. All-reduce always
    comes after the update, which makes it SGD on the mean gradient.

    `update(g)` is the step of a local optimizer over `parameters.x`, without weight decay of its
    own: the coupled one, g + λ x_t, is added here while x is still x_t.

    clip         see Correction
    local_steps  gossip takes place in every so many-th step only (Stich 2019, arXiv:1805.09767)
    """

    def __init__(
        self,
        network: Network,
        averaging: Averaging,
        parameters: Parameters,
        update: Callable[[Tensor], Any],
        *,
        overlapping: bool = True,
        weight_decay: float = 0.0,
        clip: float | None = None,
        local_steps: int = 1,
    ):
        self._network, self._averaging, self._update = network, averaging, update
        self._local_steps, self._steps = local_steps, 0
        self._overlapping = overlapping and not isinstance(averaging, AllReduce)
        self._x, self._g = parameters.x, parameters.grad
        self._correct = Correction(parameters, weight_decay, clip)

    def step(self, compute_gradient: Callable[[], V]) -> V:
        """One step; `compute_gradient` adds to `parameters.grad`, and what it returns is
        returned."""
        self._steps += 1
        if self._steps % self._local_steps:
            result = self._gradient(compute_gradient)
            self._update(self._g)
        elif self._overlapping:
            exchange = self._network.start(self._averaging.step(self._x))
            result = self._gradient(compute_gradient)
            exchange.finish()
            self._update(self._g)
        else:
            result = self._gradient(compute_gradient)
            self._update(self._g)
            self._network.run(self._averaging.step(self._x))
        return result

    def _gradient(self, compute_gradient: Callable[[], V]) -> V:
        self._g.zero_()
        result = compute_gradient()
        self._correct()
        return result

    def state_dict(self) -> dict[str, Any]:
        """Of the averaging algorithm, and how many steps there were; tensors are [worker, ...]."""
        return {"steps": self._steps, "averaging": self._averaging.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where another instance was."""
        self._steps = state["steps"]
        self._averaging.load_state_dict(state["averaging"])
