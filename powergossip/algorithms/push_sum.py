"""Push-sum: exact averaging over directed and time-varying graphs."""

from collections.abc import Generator
from typing import Any, ClassVar

import torch
from torch import Tensor

from powergossip import checks
from powergossip.algorithms.averaging import Saved
from powergossip.network import Conversation, Network, ToAll
from powergossip.parameters import Layout

# The integers of the running sums of a dtype, and the elements that one unit stands for.
_GRIDS = {torch.float32: (torch.int32, 2.0**-24), torch.float64: (torch.int64, 2.0**-40)}


class PushSum(Saved):
    """Senders split their values and their weights. Receivers divide the one sum by the other::

        x̂_i = w_i z_i,   w_i⁰ = 1
        x̂_i ← Σ_j p_ij x̂_j,   w_i ← Σ_j p_ij w_j,   p_ji = 1/(d_i + 1)
        z_i ← x̂_i / w_i

    Kempe, Dobra & Gehrke (2003), doi:10.1109/SFCS.2003.1238221, Algorithm 1, and Assran et al.
    (2019), arXiv:1811.10792, Algorithm 1 (stochastic gradient push). d_i is the number of workers
    that i sends to in this round. P is column-stochastic, so that Σ_i x̂_i and Σ_i w_i = n are
    conserved, and z_i tends to the mean (1/n) Σ_j x̂_j on every graph that connects all workers over
    a period. Weights w_ij of the topology are not used.

    x in `step` is z. The weights w are state of this object. A local update moves x̂, so that it
    moves z by 1/w_i as much: see `rescale`. Otherwise workers would count by their stationary
    weights, not equally.

    Sends D + 1 elements of x's dtype to each neighbor, in one message: the fraction p_ji of x̂_i and
    of w_i. The sender keeps what remains after rounding, w_i z_i − d_i · message, so that rounding
    moves no mass.

    With `running_sums`, messages are the sums of all messages so far::

        σ_i ← σ_i + (x̂_i, w_i)/(d_i + 1)
        the receiver adds σ_i − ρ_ij, and then ρ_ij ← σ_i

    Hadjicostis, Vaidya & Domínguez-García (2016), doi:10.1109/TAC.2015.2471695. The next message
    repairs the loss of one. In float32 a growing sum would round ever more coarsely. Here the sums
    are 32-bit integers in units of 2⁻²⁴, modulo 2³² (64-bit integers in units of 2⁻⁴⁰ for x in
    float64). Their differences are exact for any number of steps, as long as the messages lost in a
    row sum to less than 128 in every element (2²³). The rest below the unit stays with the sender.

    Args:
        running_sums: Send the sums of all messages so far, so that the next message makes up for a
            lost one.

    Raises:
        BadValue: For running_sums on a time-varying topology: its receivers change, and a sum per
            worker serves receivers that are always the same.
        ValueError: In a step with running_sums, for a message of 128 or more.
    """

    saved: ClassVar[dict[str, str]] = {"weights": "_w", "sums": "_sums", "received": "_received"}
    needs_doubly_stochastic, one_way = False, True  # see GossipRule

    def __init__(self, network: Network, layout: Layout, *, running_sums: bool = False):
        checks.check(
            "running_sums",
            str(running_sums),
            not running_sums or len(network.rounds) == 1,
            f"False with topology={network.topology.name}, which changes from round to round",
        )
        if running_sums:
            layout.check_undivided("running_sums=True")
        self._network, rows = network, network.rows
        where: Any = {"dtype": network.dtype, "device": network.device}
        # For each round: d_i [worker, 1], and whether a slot has a neighbor, [worker, 1] for each.
        self._out_degrees = [
            torch.from_numpy(edges.out_degrees)[:, None].to(**where) for edges in network.edges
        ]
        self._present = [
            (slots.neighbors >= 0).to(network.dtype).unsqueeze(-1).unbind(1)
            for slots in network.rounds
        ]
        self._w = torch.ones(rows, 1, **where)
        self._fractions = torch.zeros(rows, layout.size + 1, **where)
        self._sums: Tensor | None = None  # σ_i [worker, D + 1]
        self._received: Tensor | None = None  # ρ_ij [worker, neighbor, D + 1]
        if running_sums:
            self._sums = torch.zeros_like(self._fractions, dtype=_GRIDS[network.dtype][0])
            self._received = self._sums.new_zeros(*network.neighbors.shape, layout.size + 1)

    def step(self, x: Tensor) -> Conversation:
        """z_i ← Σ_j p_ij w_j z_j / Σ_j p_ij w_j, where x is z."""
        t, message = self._network.round % len(self._out_degrees), self._fractions
        d, w = self._out_degrees[t], self._w
        fraction = w / (d + 1)
        torch.mul(x, fraction, out=message[:, :-1])
        message[:, -1:] = fraction
        if self._sums is None:
            received = yield ToAll(message)
        else:
            received = yield from self._exchange_sums(message)
        x.mul_(w)
        for total, column in ((x, slice(-1)), (w, slice(-1, None))):
            total.addcmul_(d, message[:, column], value=-1)
            for present, from_j in zip(self._present[t], received.unbind(1), strict=True):
                total.addcmul_(present, from_j[:, column])
        x.div_(w)

    def scale(self, u: Tensor) -> None:
        """See `averaging.Weighted`."""
        u.div_(self._w)

    def _exchange_sums(self, message: Tensor) -> Generator[Any, Any, Tensor]:
        """Round message [worker, D + 1] to the grid, send σ, and return σ_j − ρ_ij."""
        sums, last = self._sums, self._received
        assert sums is not None
        assert last is not None
        kind, unit = _GRIDS[message.dtype]
        largest, limit = float(message.abs().max()), unit * 2.0 ** (8 * sums.element_size() - 1)
        if largest >= limit:
            raise ValueError(
                f"running_sums=True: an element of a message is {largest:.4g}; use running_sums="
                f"False, or parameters with less than {limit:g} in each message"
            )
        units = message.div_(unit).round_()
        sums.add_(units.to(kind))
        units.mul_(unit)
        received = yield ToAll(sums)
        moved = (received - last).to(message.dtype).mul_(unit)
        last.copy_(received)
        return moved
