"""Averaging with compressed messages, and with messages modulo a bound.

On a CPU, compiled loops do the same arithmetic in fewer passes over memory, where there are some
for the compressor. See compiled_compression.py.
"""

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from powergossip import checks, kernels, randomness
from powergossip.algorithms import compiled_compression
from powergossip.algorithms.averaging import Kind, Rate, Saved, column
from powergossip.compressors import QSGD, BySize, Codec, pack, packed_size, unpack
from powergossip.network import Conversation, Network, ToAll
from powergossip.parameters import Layout

# Why "auto", the best rate of plain gossip, is rejected.
_AUTO = "; auto is too large here: leave it out for the default (docs/methods/{}.md)"


class ChocoGossip(Saved):
    """Workers keep public copies x̂ of themselves and of their neighbors, and send updates of them::

        q_i = C(x_i − x̂_i)
        x̂_j ← x̂_j + q_j                         for every neighbor j and for i itself
        x_i ← x_i + γ Σ_j w_ij (x̂_j − x̂_i)

    Koloskova, Stich & Jaggi (2019), arXiv:1902.00340, Algorithm 1. Sends C's message to every
    neighbor. The authors save memory by keeping only the sum Σ_j w_ij x̂_j. Every x̂_j is kept here,
    because the sum's rounding errors differ from the errors of its terms, accumulate, and make the
    mean drift, while the copies are the same to the bit at both ends.

    With a copy rate α below 1, the copies follow more slowly, as in LEAD (Liu et al. 2021,
    arXiv:2007.00232), whose unbiased compressors are not contractions::

        ŷ_j = x̂_j + q_j,   x̂_j ← x̂_j + α q_j,   x_i ← x_i + γ Σ_j w_ij (ŷ_j − ŷ_i)

    Both rates may be functions of the number of elements of a tensor. Each tensor then has its own
    rates, and the mean is still conserved.

    Args:
        codec: Codec of the messages, with the compressor C.
        diffusion_rate: Diffusion rate γ.
        copy_rate: Copy rate α.

    Attributes:
        public: x̂_i [worker, D].
        publics: x̂_j [worker, neighbor, D].
        again: The same rule on another network, with the same codec.

    Raises:
        ValueError: Unless γ > 0 and 0 < α ≤ 1, or for a time-varying topology, where the copies of
            neighbors that are absent in some rounds would be outdated.
    """

    saved: ClassVar[dict[str, str]] = {"steps": "_steps", "public": "public", "publics": "publics"}

    def __init__(
        self,
        network: Network,
        codec: Codec,
        diffusion_rate: Rate | BySize = 1.0,
        copy_rate: float | BySize = 1.0,
    ):
        where: Any = {"dtype": network.dtype, "device": network.device}
        self.again = partial(
            ChocoGossip, codec=codec, diffusion_rate=diffusion_rate, copy_rate=copy_rate
        )
        # Of each element [D], or None where all have the same.
        self._rate_of_elements: Tensor | None = None
        self._copy_rate: float | Tensor
        if callable(diffusion_rate):
            self._rate_of_elements = codec.by_size(diffusion_rate).to(**where)
            diffusion_rate = 1.0
        if callable(copy_rate):
            self._copy_rate = codec.by_size(copy_rate).to(**where)
        else:
            checks.check("copy_rate", f"{copy_rate}", 0 < copy_rate <= 1, "above 0, at most 1")
            self._copy_rate = copy_rate
        if len(network.rounds) > 1:
            raise ValueError(
                f"topology={network.topology.name}: use a static topology with CHOCO, such as ring"
            )
        rate = column(network, "diffusion_rate", diffusion_rate, _AUTO.format("choco"))
        self._rates = rate * network.weights
        self._total = self._rates.sum(1, keepdim=True)
        self._network, self.codec, self.saved_layout = network, codec, codec.layout
        # True if x̂ = ŷ and all elements have one γ, as in the paper.
        self._published = copy_rate == 1 and self._rate_of_elements is None
        unbiased = getattr(codec.compressor, "unbiased", False)
        self.kind = Kind.UNBIASED_COPIES if unbiased else Kind.BIASED_COPIES
        self._senders, self._neighbors = network.row_workers, network.neighbors
        self.public = torch.zeros(network.rows, codec.elements, **where)
        self.publics = torch.zeros(*network.neighbors.shape, codec.elements, **where)
        self._flow: Tensor | None = None  # for the compiled loops, Σ_j γ w_ij (x̂_j − x̂_i)
        self._steps = 0

    @cached_property
    def _loops(self) -> compiled_compression.Loops | None:
        return compiled_compression.loops(self._network, self.codec) if self._published else None

    def step(self, x: Tensor) -> Conversation:
        """One step of Algorithm 1."""
        if self._loops:
            yield from self._compiled_step(self._loops, x)
            return
        if self._network.dtype != torch.float32 or not self._published:
            flow = torch.empty_like(x)
            yield from self.increment(x, flow)
            x.add_(flow)
            return
        codec, t = self.codec, self._steps
        message = codec.encode(x, t, minus=self.public)
        received = codec.incoming((yield ToAll(codec.outgoing(message))))
        codec.add(message, self._senders, t, self.public)
        codec.add(received, self._neighbors, t, self.publics)
        x[:, None].baddbmm_(self._rates[:, None], self.publics)
        x.addcmul_(self._total, self.public, value=-1)
        self._steps += 1

    def increment(self, x: Tensor, out: Tensor) -> Conversation:
        """out_i ← Σ_j γ w_ij (ŷ_j − ŷ_i). Messages are in single precision, whatever the precision
        of x."""
        codec, t = self.codec, self._steps
        message = self.message(x, t)
        received = codec.incoming((yield ToAll(codec.outgoing(message))))
        self.update(out, message, received, t)
        self._flow = None
        self._steps += 1

    def message(self, x: Tensor, t: int) -> Tensor:
        """q_i of step t."""
        return self.codec.encode(x, t, minus=self.public)

    def update(self, out: Tensor, message: Tensor, received: Tensor, t: int) -> None:
        """out ← the increment of step t, and copies follow, by the messages q_i and q_j."""
        codec, rate = self.codec, self._copy_rate
        if isinstance(rate, float | int) and rate == 1:
            codec.add(message, self._senders, t, self.public)
            codec.add(received, self._neighbors, t, self.publics)
            copy, copies = self.public, self.publics
        else:
            own = codec.decode(message, self._senders, t)
            theirs = codec.decode(received, self._neighbors, t)
            copy, copies = self.public + own, self.publics + theirs
            # The product is rounded by itself, so that copies are the same to the bit at both ends.
            self.public.add_(own.to(copy).mul_(rate))
            self.publics.add_(theirs.to(copies).mul_(rate))
        self.flow(copy, copies, out)

    def flow(self, copy: Tensor, copies: Tensor, out: Tensor) -> None:
        """out_i ← Σ_j γ w_ij (x̂_j − x̂_i)"""
        out.zero_()
        for weight, copy_j in zip(self._rates.unbind(1), copies.unbind(1), strict=True):
            out.addcmul_(weight[:, None], copy_j - copy)
        if self._rate_of_elements is not None:
            out.mul_(self._rate_of_elements)

    def _compiled_step(self, loops: compiled_compression.Loops, x: Tensor) -> Conversation:
        """The same. Where all q have the same positions, the sum is updated there only."""
        copies = self.public, self.publics
        if self._flow is None:
            self._flow = loops.flow(self._rates, *copies)
        received = yield ToAll(loops.encode(True, x, self.public, self._steps))
        loops.choco(x, self._rates, received, *copies, self._flow)
        self._steps += 1

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        super().load_state_dict(state)
        self._flow = None

    def begin_at(self, point: Tensor) -> None:
        """x̂_j ← point [D] for all j. See `averaging.Copies`."""
        self.public.copy_(point)
        self.publics.copy_(point)
        self._flow = None


class DeepSqueeze(Saved):
    """Gossip with error feedback: the compression error δ is added to the next message::

        v_i = x_i + δ_i,   c_i = C(v_i),   δ_i ← v_i − c_i
        x_i ← x_i + γ Σ_j w_ij (c_j − c_i)

    Tang et al. (2019), arXiv:1907.07346, Algorithm 1, as an averaging step. Sends C's message to
    every neighbor.

    Args:
        codec: Codec of the messages, with the compressor C.
        diffusion_rate: Diffusion rate γ.

    Raises:
        ValueError: Unless γ > 0, and for unbiased QSGD: the error δ of a compressor that is no
            contraction grows in each step.
    """

    saved: ClassVar[dict[str, str]] = {"steps": "_steps", "error": "_error"}

    def __init__(self, network: Network, codec: Codec, diffusion_rate: Rate = 1.0):
        unbiased = isinstance(codec.compressor, QSGD) and codec.compressor.unbiased
        what = "False with DeepSqueeze, whose error grows unless the compressor is a contraction"
        checks.check("unbiased", unbiased, not unbiased, what)
        rate = column(network, "diffusion_rate", diffusion_rate, _AUTO.format("deepsqueeze"))
        self._rates = [rate * slots.weights for slots in network.rounds]
        self._network, self.codec, self.saved_layout = network, codec, codec.layout
        self._senders = network.row_workers
        where: Any = {"dtype": network.dtype, "device": network.device}
        self._error = torch.zeros(network.rows, codec.elements, **where)  # δ
        self._steps = 0

    @cached_property
    def _loops(self) -> compiled_compression.Loops | None:
        return compiled_compression.loops(self._network, self.codec)

    def step(self, x: Tensor) -> Conversation:
        """One step of Algorithm 1."""
        codec, t, slots = self.codec, self._steps, self._network.slots
        rates = self._rates[self._network.round % len(self._rates)]
        if self._loops:
            received = yield ToAll(self._loops.encode(False, x, self._error, t))
            self._loops.deepsqueeze(x, rates, received)
            self._steps += 1
            return
        message = codec.encode(self._error.add_(x), t)  # v, in single precision
        received = codec.incoming((yield ToAll(codec.outgoing(message))))
        own = codec.decode(message, self._senders, t).to(x)
        self._error.sub_(own)
        x.addcmul_(rates.sum(1, keepdim=True), own, value=-1)
        for slot, neighbors in enumerate(slots.neighbors.unbind(1)):  # in the same memory
            theirs = codec.decode(received[:, slot], neighbors, t).to(x)
            x.addcmul_(rates[:, slot, None], theirs)
        self._steps += 1


class Moniqua(Saved):
    """Quantized values modulo B suffice between neighbors that differ by less than θ.

    With δ = 1/3 (2 bits: four levels), B = 2θ/(1 − 2δ) and mod(·, a) into [−a/2, a/2)::

        q_i = ⌊(mod(x_i/B, 1) + ½)/δ + u⌋ δ − ½      u uniform on [0, 1), the same at every worker
        x̂_i − x_i = q_i B − mod(x_i, B)
        x_i ← x_i + γ Σ_j w_ij (mod(q_j B − x_i, B) − (x̂_i − x_i))

    Lu & De Sa (2020), arXiv:2002.11787, Algorithm 1. Sends 2 bits an element to every neighbor.

    A step computes with integers. In units of δB, with y = mod(x_i + B/2, B) in [0, 3) and
    l_i = ⌊y + u⌋ the level sent, the second term of the sum is l_i − y, and the first is l_j − y
    plus the multiple of 3 that brings it into [−3/2, 3/2). That multiple depends on the cell
    c = ⌊y + ½⌋ only::

        mod(l_j − y, 3) − (l_i − y) = mod(l_j − c, 3) + c − l_i,   mod(n, 3) = n − 3 round(n/3)

    Args:
        layout: Layout of the D elements.
        theta: Bound θ on the differences between neighbors.
        diffusion_rate: Diffusion rate γ.
        seed: Seed of u.

    Raises:
        ValueError: Unless γ > 0 and θ > 0.
    """

    saved: ClassVar[dict[str, str]] = {"steps": "_steps"}

    def __init__(
        self,
        network: Network,
        layout: Layout,
        theta: Rate = 0.25,
        diffusion_rate: Rate = 0.1,
        seed: int = 0,
    ):
        rate = column(network, "diffusion_rate", diffusion_rate, _AUTO.format("moniqua"))
        quantum = 2 * column(network, "theta", theta)  # δB [worker, 1]
        self._thrice = 3 * quantum
        self._rates = [rate * slots.weights * quantum for slots in network.rounds]
        self._network, self._layout = network, layout
        elements = self._elements = layout.size
        self._key = randomness.keys(seed, "moniqua", [()])[0].to(network.device)
        self._steps = 0
        shape, device = (network.rows, elements), network.device
        self._dtype = network.dtype
        self._message = torch.zeros(
            network.rows, packed_size(elements, 2), dtype=torch.uint8, device=device
        )
        self._c = torch.zeros(shape, dtype=torch.int8, device=device)

    @cached_property
    def _loops(self) -> compiled_compression.MoniquaLoops | None:
        library = kernels.load(self._network) if self._layout.shards is None else None
        return None if library is None else compiled_compression.MoniquaLoops(library)

    @cached_property
    def _scratch(self) -> tuple[Tensor, ...]:
        """Memory: allocating it in every step would take longer than the arithmetic."""
        return (
            *torch.zeros(2, *self._c.shape, dtype=self._dtype, device=self._c.device),
            *torch.zeros(2, *self._c.shape, dtype=torch.int8, device=self._c.device),
        )

    def step(self, x: Tensor) -> Conversation:
        """One step, in units of δB."""
        rates = self._rates[self._network.round % len(self._rates)]
        if self._loops:
            self._loops.encode(x, self._thrice, self._key, self._steps, self._message, self._c)
            received = yield ToAll(self._message)
            self._loops.average(x, rates, self._message, received, self._c)
            self._steps += 1
            return
        c, (y, floats, l_i, thirds) = self._c, self._scratch
        u = self._layout.uniform(self._key, self._steps)
        torch.div(x, self._thrice, out=y).add_(0.5)
        y.sub_(torch.floor(y, out=floats)).mul_(3)  # mod(x_i + B/2, B)
        l_i.copy_(torch.add(y, u, out=floats)).clamp_(max=3)
        self._message.copy_(pack(l_i.view(torch.uint8), 2))
        c.copy_(y.add_(0.5))
        received = yield ToAll(self._message)
        c_minus_l_i = torch.sub(c, l_i, out=l_i)
        for slot in range(received.shape[1]):
            l_j = unpack(received[:, slot], 2, self._elements).view(torch.int8)
            n = l_j.sub_(c)
            n.sub_(_third_rounded(n, out=thirds), alpha=3)  # mod(l_j − c, 3)
            n.add_(c_minus_l_i)
            x.addcmul_(rates[:, slot, None], floats.copy_(n))
        self._steps += 1


def _third_rounded(n: Tensor, out: Tensor) -> Tensor:
    """round(n/3) for integers |n| ≤ 3, as ⌊(11 n + 16)/32⌋."""
    return torch.mul(n, 11, out=out).add_(16).bitwise_right_shift_(5)
