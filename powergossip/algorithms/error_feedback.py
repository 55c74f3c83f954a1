"""Error-feedback SGD: all workers apply the mean of compressed gradients, with any compressor.

`optimizers.ErrorFeedback` puts it into your own training loop.

Axes: worker (hosted here). Each worker has D elements.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from powergossip import checks, compressors
from powergossip.algorithms.averaging import Aggregation
from powergossip.compressors import Codec, Compressor
from powergossip.network import Conversation, Gather, Mean, Network
from powergossip.parameters import Layout, complement, put_in, take_out


@dataclass(frozen=True)
class ErrorFeedbackConfig:
    """Options of error feedback.

    Args:
        momentum: Momentum before compression, as in torch.optim.SGD. With 0, the local optimizer
            may have momentum, which then follows the aggregation.
        nesterov: Nesterov's momentum.
        rescale_error: Keep the error in units of the update when the learning rate changes.
        error_decay: Factor β on the error in each step.
        mean_over: Workers in the mean of an element: all, or senders, those with a value that is
            not 0.
        error_feedback: Add a worker's error to its next gradient. Otherwise it is lost.
        min_compression_rate: Tensors that would be compressed by this factor or less are
            all-reduced whole.
        per_tensor: Compress each tensor by itself. Otherwise all are one vector.
        seed: Seed of random compressors.

    Raises:
        ValueError: For a value out of range.
    """

    momentum: float = 0.0
    nesterov: bool = False
    rescale_error: bool = True
    error_decay: float = 1.0
    mean_over: str = "all"
    error_feedback: bool = True
    min_compression_rate: float = 1.0
    per_tensor: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        checks.below_one("momentum", self.momentum)
        checks.fraction("error_decay", self.error_decay)
        checks.one_of("mean_over", self.mean_over, ("all", "senders"))
        rate = self.min_compression_rate
        checks.check(
            "min_compression_rate", rate, checks.is_finite(rate) and rate >= 1, "1 or more"
        )


class ErrorFeedback(Aggregation):
    """The mean of the workers' compressed gradients. Each worker keeps its error e_i.

    In step t, with the learning rate η_t, the compressor C and momentum m::

        u_i ← m u_i + g_i                          momentum before compression, or u_i = g_i
        p_i ← u_i + (η_{t−1}/η_t) e_i              with Nesterov's, g_i + m u_i + (η_{t−1}/η_t) e_i
        mean ← 1/n Σ_j C(p_j)
        e_i ← p_i − C(p_i)

    Karimireddy, Rebjock, Stich & Jaggi (2019), arXiv:1901.09847, Algorithm 2, where the error is
    η_{t−1} e_i, in units of the update. With momentum before compression: Zheng, Huang & Kwok
    (2019), arXiv:1905.10936, Algorithm 3, without its second compression at a server. With the
    local optimizer's momentum after aggregation: Vogels, Karimireddy & Jaggi (2019),
    arXiv:1905.13727, Algorithm 2. Their code leaves e_i in units of the gradient:
    rescale_error=False. A step with η_t = 0 does not change the unit.

    Law: Σ_t η_t mean_t + η_T (mean error) = Σ_t η_t (mean of the u_i), for any C, unless e_i has a
    factor `error_decay` in each step.

    A tensor of N elements is compressed if its part of a message is less than 32 N /
    min_compression_rate bits. All others are in one all-reduce, uncompressed, and have no error.
    Thus vectors and small matrices are not compressed by `SVD`, as in the published code, and
    `Identity` is plain all-reduce SGD.

    Cost on the wire: an all-reduce of all other tensors. A linear compressor (see compressors) adds
    the elements of its message to it: `RandomK` and `RandomBlock` take no more. All other messages
    are all-gathered, so that a worker sends its own to n − 1 others. All workers decode and add
    them in the same order, and stay equal to the bit.
    """

    saved: ClassVar[dict[str, str]] = {
        "steps": "_steps",
        "rates": "_last_rates",
        "error": "_error",  # e [worker, D]
        "momentum": "_momentum",  # u [worker, D], or None
    }

    def __init__(
        self, network: Network, layout: Layout, compressor: Compressor, config: ErrorFeedbackConfig
    ):
        self._network, self._layout, self._config = network, layout, config
        self.owns_momentum = config.momentum > 0
        self.momentum, self.nesterov = config.momentum, config.nesterov

        def smaller(rows: int, columns: int) -> bool:
            size = compressors.size(compressor, rows, columns)
            return 4 * rows * columns > config.min_compression_rate * size

        compressed = layout if config.per_tensor else Layout([(layout.size,)])
        workers, device = network.rows, network.device
        where: Any = {"dtype": network.dtype, "device": device}
        self._codec = Codec(
            compressed, compressor, network.workers, config.seed, device, chosen=smaller
        )
        self._everyone = torch.arange(network.n_workers, device=device)  # [n]
        self._whole = complement([(s.start, s.stop) for s in self._codec.stacks], layout.size)
        self._n_whole = sum(span.stop - span.start for span in self._whole)
        averaged = self._codec.size // 4 if self._codec.linear else 0  # elements of the codec
        self._averaged = Mean(torch.zeros(workers, self._n_whole + averaged, **where))
        self._error = torch.zeros(workers, layout.size, **where)  # e, and p within a step
        self._momentum = torch.zeros_like(self._error) if config.momentum else None  # u
        self._steps = 0
        # η_t and η_{t−1}: one for all tensors, or one for each.
        self._rates = [0.0]
        self._last_rates = self._rates

    def at_learning_rate(self, *rates: float) -> None:
        """Set η of the next step: one for all tensors, or one for each, as in layout.shapes."""
        assert len(rates) in (1, len(self._layout.shapes)), len(rates)
        self._rates = [*rates]

    @property
    def compression_rate(self) -> float:
        """Bits of a gradient over the bits of a worker's message."""
        gathered = 0 if self._codec.linear else self._codec.size  # bytes
        item, averaged = self._error.itemsize, self._averaged.tensor.shape[1]
        return item * self._layout.size / (item * averaged + gathered)

    def step(self, gradient: Tensor, mean: Tensor) -> Conversation:
        """Take gradient [worker, D] and clear it. Fill mean [worker, D]."""
        codec, p = self._codec, self._error
        self._add_gradient(gradient)
        messages: list[Mean | Gather] = []
        if self._averaged.tensor.shape[1]:
            take_out(p, self._whole, self._averaged.tensor)
            messages.append(self._averaged)
        own: Tensor | None = None  # C(p_i) of the hosted workers
        if codec.size:
            message = codec.encode(p, self._steps)  # uint8 [worker, bytes]
            own = codec.decode(message, codec.workers, self._steps)
            p.sub_(own)
            if codec.linear:
                self._averaged.tensor[:, self._n_whole :] = message.view(torch.float32)
            else:
                messages.append(Gather(list(message)))
        received = dict(zip(map(type, messages), (yield tuple(messages)), strict=True))
        total = mean[:1].zero_()
        if own is not None and codec.linear:
            values = received[Mean][:, self._n_whole :]
            single = values.float()
            rest = [(values - single).float()] if values.dtype != single.dtype else []
            for part in (single, *rest):  # their sum decodes to the sum: C is linear
                fields = part.contiguous().view(torch.uint8)
                codec.add(fields, self._everyone[:1], self._steps, total)
        elif own is not None:
            self._add_decoded(received[Gather], own, total)
        if self._whole:
            put_in(received[Mean], self._whole, total)
        mean[1:] = total
        if not self._config.error_feedback:
            p.zero_()
        self._steps += 1

    def _add_gradient(self, gradient: Tensor) -> None:
        """p ← u + β (η_{t−1}/η_t) e, in the memory of e. Clears the gradient."""
        config, p, u = self._config, self._error, self._momentum
        if config.rescale_error:
            self._rescale()
        if config.error_decay != 1:
            p.mul_(config.error_decay)
        if u is not None:
            u.mul_(config.momentum).add_(gradient)
            if config.nesterov:
                p.add_(gradient).add_(u, alpha=config.momentum)
            else:
                p.add_(u)
        else:
            p.add_(gradient)
        gradient.zero_()

    def _rescale(self) -> None:
        """e ← (η_{t−1}/η_t) e"""
        if self._rates == self._last_rates:
            return
        count = max(len(self._rates), len(self._last_rates))
        before, now = (rates * (count // len(rates)) for rates in (self._last_rates, self._rates))
        ratios = [old / new if new > 0 else 1.0 for old, new in zip(before, now, strict=True)]
        if self._steps and len(set(ratios)) == 1:
            self._error.mul_(ratios[0])
        elif self._steps:
            layout = self._layout
            for start, shape, ratio in zip(layout.starts, layout.shapes, ratios, strict=True):
                self._error[:, start : start + prod(shape)].mul_(ratio)
        self._last_rates = [new if new > 0 else old for old, new in zip(before, now, strict=True)]

    def _add_decoded(self, pieces: list[Tensor], own: Tensor, total: Tensor) -> None:
        """total [1, D] ← 1/n Σ_j C(p_j), added in the order of the workers. `own` has the decoded
        messages of the hosted ones."""
        hosted = self._network.workers
        senders = torch.zeros_like(total) if self._config.mean_over == "senders" else None
        for worker, piece in enumerate(pieces):
            sender = self._everyone[worker : worker + 1]
            if worker in hosted:
                values = own[worker - hosted.start]
            elif senders is None:
                self._codec.add(piece[None], sender, self._steps, total)
                continue
            else:
                values = self._codec.decode(piece[None], sender, self._steps)
            total.add_(values)
            if senders is not None:
                senders.add_(values != 0)
        total.div_(len(pieces) if senders is None else senders.clamp_(min=1))
