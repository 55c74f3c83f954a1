"""signSGD with majority vote: all workers apply the sign that most of them have, of each element.

`optimizers.SignSGD` puts it into your own training loop.

Axes: worker (hosted here). Each worker has D elements.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from powergossip import checks
from powergossip.algorithms.averaging import Aggregation
from powergossip.compressors import pack, unpack
from powergossip.network import Conversation, Gather, Network
from powergossip.parameters import Layout


@dataclass(frozen=True)
class SignSGDConfig:
    """Options of signSGD.

    Args:
        momentum: β of the average whose sign is sent. 0: signSGD, otherwise Signum.

    Raises:
        ValueError: For a value out of range.
    """

    momentum: float = 0.9

    def __post_init__(self) -> None:
        checks.below_one("momentum", self.momentum)


class SignSGDAggregation(Aggregation):
    """The majority vote of the workers' signs, −1, 0 or 1 for each element::

        u_i ← β u_i + (1 − β) g_i
        mean ← sign(Σ_j sign(u_j))

    Bernstein, Wang, Azizzadenesheli & Anandkumar (2018), arXiv:1802.04434, Algorithms 2 and 3, and
    Bernstein, Zhao, Azizzadenesheli & Anandkumar (2019), arXiv:1810.05291, Algorithm 1, where the
    weight decay is added to the vote, without momentum. A tie, with an even number of workers, is
    0: the element stays. For u_ij = 0, worker i votes +1 in every second step and −1 in the others,
    workers of even and odd index in turns. So the votes cancel where all gradients are 0, as in the
    rows of unseen words in an embedding, which a fixed sign would move by η in every step. There is
    no error feedback, and η is the length of every step of every element.

    If an element of u_i is NaN or infinite, worker i sends an empty message, and the vote is NaN in
    all workers, so that divergence stays visible.

    Cost on the wire: an all-gather of 1 bit for each element, to n − 1 others, as in the code of
    Vogels et al. (github.com/epfml/powersgd). A vote counted at a server would lose the ties.
    """

    owns_momentum = True  # weight decay has no momentum
    saved: ClassVar[dict[str, str]] = {"steps": "_steps", "momentum": "_momentum"}

    def __init__(self, network: Network, layout: Layout, config: SignSGDConfig):
        self._network, self._size, self._beta = network, layout.size, config.momentum
        self._steps = 0
        self._momentum: Tensor | None = None
        if self._beta:
            shape = network.rows, layout.size
            self._momentum = torch.zeros(shape, dtype=network.dtype, device=network.device)

    @property
    def compression_rate(self) -> float:
        """Bits of a gradient over the bits of a worker's message."""
        return 8.0 * self._network.dtype.itemsize

    def step(self, gradient: Tensor, mean: Tensor) -> Conversation:
        """Take gradient [worker, D] and clear it. Fill mean [worker, D]."""
        u = gradient
        if self._momentum is not None:
            u = self._momentum.lerp_(gradient, 1 - self._beta)
        first = (self._network.workers.start + self._steps) % 2  # rows with +1 for 0
        positive = u > 0
        positive[first::2] = u[first::2] >= 0
        messages = pack(positive, 1)  # uint8 [worker, bytes]
        votes = u.isfinite().all(1).tolist()
        pieces = [m if valid else m[:0] for m, valid in zip(messages, votes, strict=True)]
        gradient.zero_()
        received = yield Gather(pieces)
        total = mean[0].zero_()
        for piece in filter(len, received):
            total.add_(unpack(piece, 1, self._size))
        total.mul_(2).sub_(len(received)).sign_()
        if not all(map(len, received)):
            total.fill_(torch.nan)
        mean[1:] = total
        self._steps += 1
