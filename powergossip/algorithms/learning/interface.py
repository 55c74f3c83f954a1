"""The common parts of learning rules: their interface, clipping and weight decay."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from powergossip.algorithms.averaging import Saved
from powergossip.parameters import Parameters
from powergossip.state_trees import Stateful

LocalStep = Callable[[Tensor], Any]  # a local optimizer's, with a gradient [worker, D]


class Learning(Stateful, Protocol):
    """A learning rule over the flat buffers `parameters.x` and `parameters.grad`.

    With another number of workers, all entries of its state but these begin as at the start of a
    run. They do not depend on the topology.

    Attributes:
        kept: Entries that a worker keeps. New workers begin with the mean.
        conserved: Updates still to come, whose mean over the workers stays the same, too.
    """

    @property
    def kept(self) -> Iterable[str]: ...

    @property
    def conserved(self) -> Iterable[str]: ...

    def start(self) -> None:
        """Prepare `parameters.grad` for the backward pass, and send the first messages."""
        ...

    def finish(self) -> None:
        """Complete the step with the gradients in `parameters.grad`. Changes `parameters.x`."""
        ...


class Decay(Saved):
    """Weight decay λ x of all parameters outside normalization layers.

    With momentum m, in its own buffer d that starts at 0::

        d ← m d + λ x          add d, or with Nesterov's momentum λ x + m d

    Momentum is linear: SGD's momentum of g + λ x is its momentum of g plus this.
    """

    saved: ClassVar[dict[str, str]] = {"momentum": "_d"}

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


class Correction:
    """g ← g · min(1, clip/‖g‖) + λ x, in place on the gradient of each worker.

    Weight decay λ spares normalization layers.
    Clipping: Pascanu, Mikolov & Bengio (2013), arXiv:1211.5063, § 3.2.
    """

    def __init__(self, parameters: Any, weight_decay: float, clip: float | None = None):
        self._clip, self._g, self._layout = clip, parameters.grad, parameters.layout
        self._decay = Decay(parameters, weight_decay)

    def __call__(self) -> None:
        if self._clip is not None:
            self._g.mul_((self._clip / self._layout.norms(self._g)).clamp_(max=1))
        self._decay.add_to(self._g)
