"""Learning rules: how workers combine local updates with communication.

A step of a rule consists of `start()`, the gradients, and `finish()`:

    rule.start()                   the first messages are sent; parameters.grad is cleared
    ... add to parameters.grad     messages are in flight
    rule.finish()                  receive, mix, update parameters.x

DPSGD averages models. CentralizedSGD applies one mean of compressed gradients in all workers, as
`ddp.DDPHook` does with PyTorch's hooks. Gradient aggregations, its building blocks, are in
power_sgd.py and dgc.py.

Axes: worker (hosted here); D parameters of a worker.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from powergossip.algorithms.aggregation import Aggregation, momentum_of
from powergossip.algorithms.averaging import Averaging, on_numerator
from powergossip.algorithms.plain import AllReduce
from powergossip.network import Exchange, Network
from powergossip.parameters import Parameters

Update = Callable[[Tensor], Any]  # the step of a local optimizer with a gradient [worker, D]


class Learning(Protocol):
    """A learning rule over the flat buffers `parameters.x` and `parameters.grad`."""

    def start(self) -> None:
        """Prepare `parameters.grad` for the backward pass, and send the first messages."""
        ...

    def finish(self) -> None:
        """Complete the step with the gradients in `parameters.grad`. Changes `parameters.x`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on. Tensors are [worker, ...]."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        ...


class Decay:
    """Weight decay λ x of all parameters but those of normalization layers.

    With momentum m, in a buffer d of its own that starts at 0:

        d ← m d + λ x          add d, or with Nesterov's momentum λ x + m d

    Momentum is linear: SGD's momentum of g + λ x is its momentum of g plus this.
    """

    def __init__(
        self,
        parameters: Parameters,
        weight_decay: float,
        momentum: float = 0.0,
        nesterov: bool = False,
    ):
        self._weight_decay, self._m, self._nesterov = weight_decay, momentum, nesterov
        self._x = parameters.x
        self._spans = parameters.decay_spans() if weight_decay else []
        self._d = torch.zeros_like(parameters.x) if self._spans and momentum else None

    def add_to(self, gradient: Tensor) -> None:
        """Add the decay of this step to gradient [worker, D]."""
        if self._d is not None:
            self._d.mul_(self._m)
        for span in self._spans:
            g, x = gradient[:, span], self._x[:, span]
            if self._d is None:
                g.add_(x, alpha=self._weight_decay)
                continue
            d = self._d[:, span].add_(x, alpha=self._weight_decay)
            if self._nesterov:
                g.add_(x, alpha=self._weight_decay).add_(d, alpha=self._m)
            else:
                g.add_(d)

    def state_dict(self) -> dict[str, Any]:
        """The momentum d [worker, D], or None without."""
        return {"momentum": self._d}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        if self._d is not None:
            self._d.copy_(state["momentum"])


class Correction:
    """g ← g · min(1, clip/‖g‖) + λ x, in place on the gradient of each worker.

    Weight decay λ spares normalization layers.
    Clipping: Pascanu, Mikolov & Bengio (2013), arXiv:1211.5063, § 3.2.
    """

    def __init__(self, parameters: Parameters, weight_decay: float, clip: float | None = None):
        self._clip, self._g = clip, parameters.grad
        self._decay = Decay(parameters, weight_decay)

    def __call__(self) -> None:
        if self._clip is not None:
            norms = self._g.norm(dim=1, keepdim=True)
            self._g.mul_((self._clip / norms).clamp_(max=1))
        self._decay.add_to(self._g)


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
        self._overlapping = overlapping and not isinstance(averaging, AllReduce)
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

    def state_dict(self) -> dict[str, Any]:
        """The number of steps and the state of the averaging algorithm."""
        return {"steps": self._steps, "averaging": self._averaging.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        self._steps = state["steps"]
        self._averaging.load_state_dict(state["averaging"])


class CentralizedSGD:
    """x_i ← x_i − η u(mean + λ x_i), mean = aggregate(e_i + g_i), e_i ← the residual of worker i.

    Workers that start alike stay alike, those of one process to the bit. The residual e_i stays in
    `parameters.grad`, where the next backward pass adds to it: error feedback costs no time.

    Weight decay is never compressed. If the aggregation owns the momentum, so that u has none, the
    decay has a momentum buffer of its own, as in the published code of Deep Gradient Compression
    (github.com/synxlin/deep-gradient-compression, DGCSGD). See `Decay`.

    update                the step of a local optimizer over `parameters.x`
    weight_decay          λ. Normalization layers are exempt.
    clip                  of a worker's own gradient g_i, before e_i is added (see Correction)
    num_batches_per_step  g_i is the mean over this number of batches. Nothing is sent in between.
    """

    def __init__(
        self,
        network: Network,
        aggregation: Aggregation,
        parameters: Parameters,
        update: Update,
        *,
        weight_decay: float = 0.0,
        clip: float | None = None,
        num_batches_per_step: int = 1,
    ):
        self._network, self._aggregation, self._update = network, aggregation, update
        self._x, self._gradient = parameters.x, parameters.grad
        self._mean = torch.zeros_like(parameters.grad)
        self._clip = Correction(parameters, 0.0, clip)
        self._decay = Decay(parameters, weight_decay, *momentum_of(aggregation))
        self._num_batches, self._batches = num_batches_per_step, 0
        # Where the gradient alone is needed, the residual has a buffer of its own.
        apart = clip is not None or num_batches_per_step > 1
        self._error = torch.zeros_like(parameters.grad) if apart else None

    def start(self) -> None:
        """Clear the gradient before the first batch of a step, unless it holds the residual."""
        if self._error is not None and self._batches == 0:
            self._gradient.zero_()

    def finish(self) -> None:
        """Aggregate and update after the last batch of a step. Otherwise only count the batch."""
        g = self._gradient
        self._batches = (self._batches + 1) % self._num_batches
        if self._batches:
            return
        if self._num_batches > 1:
            g.div_(self._num_batches)
        self._clip()
        if self._error is not None:
            g.add_(self._error)
        self._network.run(self._aggregation.step(g, self._mean))
        if self._error is not None:
            self._error.copy_(g)
        self._decay.add_to(self._mean)
        self._update(self._mean)
        if len(self._x) > 1:  # torch's kernels may round the last elements of a buffer differently
            self._x[1:] = self._x[0]

    def state_dict(self) -> dict[str, Any]:
        """The aggregation's state, the decay's momentum, the residuals, and the batches of an
        incomplete step."""
        return {
            "aggregation": self._aggregation.state_dict(),
            "decay": self._decay.state_dict(),
            "batches": self._batches,
            "gradient": self._gradient,
            "error": self._error,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        self._aggregation.load_state_dict(state["aggregation"])
        if "decay" in state:  # earlier versions added the decay to the gradients
            self._decay.load_state_dict(state["decay"])
        self._batches = state["batches"]
        self._gradient.copy_(state["gradient"])
        if self._error is not None:
            self._error.copy_(state["error"])
