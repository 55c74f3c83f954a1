"""Averaging without compression: plain gossip, of all or of some elements, all-reduce, and two
accelerated variants."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from powergossip import checks, kernels, randomness
from powergossip.algorithms.averaging import Kind, Rate, Saved, Stateless, column
from powergossip.compressors.sparse import distinct, fraction
from powergossip.network import Conversation, Mean, Network
from powergossip.network.rows import Rows, Shared
from powergossip.parameters import Layout


class PlainGossip(Stateless):
    """x_i ← x_i + γ Σ_j w_ij (x_j − x_i).    Xiao & Boyd (2004), doi:10.1016/j.sysconle.2004.02.022

    Sends D elements of 32 bits to each neighbor.

    Raises:
        ValueError: Unless γ > 0.
    """

    def __init__(self, network: Network, diffusion_rate: Rate = 1.0):
        rate = column(network, "diffusion_rate", diffusion_rate)
        self._network = network
        self.kind = Kind.ANTISYMMETRIC if network.symmetric else Kind.LINEAR
        # For each round: 1 − γ Σ_j w_ij [worker, 1], and γ w_ij [worker, 1] for each slot.
        weights = [rate * slots.weights for slots in network.rounds]
        self._own_weights = [1 - w.sum(1, keepdim=True) for w in weights]
        self._weights = [w.unsqueeze(-1).unbind(1) for w in weights]
        library = kernels.load(network)
        self._compiled = None
        if library is not None:
            self._compiled = kernels.function(library, "plain_gossip", "pipiipipiiippi")
            self._kept = [w.contiguous() for w in (*self._own_weights, *weights)]
            addresses = [kernels.address(w) for w in self._kept]
            half = len(weights)
            self._places = list(zip(addresses[:half], addresses[half:], strict=True))

    def step(self, x: Tensor) -> Conversation:
        """x_i ← (1 − γ Σ_j w_ij) x_i + Σ_j γ w_ij x_j"""
        self.mix(x, (yield Shared(x)))

    def increment(self, x: Tensor, out: Tensor) -> Conversation:
        """out_i ← Σ_j γ w_ij (x_j − x_i)"""
        received = yield Shared(x)
        self.add_increment(x, received, out.zero_())

    def add_increment(self, x: Tensor, received: Rows | Tensor, out: Tensor) -> None:
        """out_i ← out_i + Σ_j γ w_ij (x_j − x_i), with x_j received [worker, neighbor, D]."""
        t = self._network.round % len(self._network.rounds)
        whole = slice(0, x.shape[1])
        blocks = (
            received.by_blocks() if isinstance(received, Rows) else [(whole, received.unbind(1))]
        )
        for here, neighbors in blocks:
            for weight, x_j in zip(self._weights[t], neighbors, strict=True):
                out[:, here].addcmul_(weight, x_j - x[:, here])

    def add_differences(self, d: Tensor, out: Tensor) -> None:
        """out_i ← out_i + Σ_j γ w_ij d_ij, with d [worker, neighbor, D]."""
        t = self._network.round % len(self._network.rounds)
        for weight, d_ij in zip(self._weights[t], d.unbind(1), strict=True):
            out.addcmul_(weight, d_ij)

    def mix(self, x: Tensor, received: Rows | Tensor) -> None:
        """The update of x [worker, D] with the neighbors' received [worker, neighbor, D].

        Elementwise, so that a worker's result is the same to the bit in any layout of workers over
        processes. A matrix product would round differently for one worker and for eight.
        """
        t, rows = self._network.round % len(self._network.rounds), _rows(received)
        own, others, index = rows
        if self._compiled is not None and all(map(_fits, (x, own, others))):
            self._compiled(
                *(x.data_ptr(), x.stride(0), own.data_ptr(), own.stride(0), own.shape[0]),
                *(others.data_ptr(), others.stride(0), index.data_ptr(), *index.shape, x.shape[1]),
                *self._places[t],
                torch.get_num_threads(),
            )
            return
        for here, neighbors in rows.by_blocks():
            part = x[:, here].mul_(self._own_weights[t])
            for weight, x_j in zip(self._weights[t], neighbors, strict=True):
                part.addcmul_(weight, x_j)


def _rows(received: Rows | Tensor) -> Rows:
    """A tensor [worker, neighbor, D] as rows."""
    if isinstance(received, Rows):
        return received
    others = received.flatten(0, 1)
    index = torch.arange(len(others), device=others.device)
    return Rows(others[:0], others, index.view(received.shape[:2]))


def _fits(tensor: Tensor) -> bool:
    """True if compiled loops accept a tensor [*, element]."""
    return tensor.dtype == torch.float32 and tensor.stride(-1) == 1


class RandomEntries(Saved):
    """SPARTA: plain gossip of K random elements, resampled in each step, the same in all workers::

        x_i[S] ← x_i[S] + γ Σ_j w_ij (x_j[S] − x_i[S])            |S| = K = max(1, ⌊p D⌋)

    Beton et al. (2025), "SPARTA", in exo-explore/gym (9fa323c), sparta.py. There each element is
    in S with probability p, and G is the exact mean: topology=fully-connected.

    Sends K elements of 32 bits to each neighbor. Positions follow from the seed.

    Args:
        keep_ratio: Fraction p of the elements.
        diffusion_rate: Diffusion rate γ.
        seed: Seed of the positions.

    Raises:
        ValueError: Unless 0 < p ≤ 1 and γ > 0.
    """

    saved: ClassVar[dict[str, str]] = {"steps": "_steps"}

    def __init__(
        self,
        network: Network,
        layout: Layout,
        *,
        keep_ratio: float = 0.005,
        diffusion_rate: Rate = 1.0,
        seed: int = 0,
    ):
        ok = checks.is_finite(keep_ratio) and 0 < keep_ratio <= 1
        checks.check("keep_ratio", keep_ratio, ok, "a fraction above 0, at most 1")
        layout.check_undivided("sparta")
        self._gossip = PlainGossip(network, diffusion_rate)
        self._size, self._kept = layout.size, fraction(keep_ratio, layout.size)
        self._key = randomness.keys(seed, "sparta", [()])[0].to(network.device)
        self._part = torch.zeros(
            network.rows, self._kept, dtype=network.dtype, device=network.device
        )
        self._steps = 0

    def step(self, x: Tensor) -> Conversation:
        """One step of plain gossip of x[S]."""
        positions = distinct(
            lambda count: randomness.bits(self._key, self._steps, (count,)), self._kept, self._size
        )
        torch.index_select(x, 1, positions, out=self._part)
        yield from self._gossip.step(self._part)
        x.index_copy_(1, positions, self._part)
        self._steps += 1


class ExactMean(Stateless):
    """x_i ← (1/n) Σ_j x_j: the centralized baseline.

    Sends 2 (n − 1)/n · 32 D bits a worker, the lower bound (Patarasuk & Yuan 2009,
    doi:10.1016/j.jpdc.2008.09.002).
    """

    needs_doubly_stochastic = False  # it does not use W

    def __init__(self, network: Network):
        del network  # a parameter of all algorithms

    def step(self, x: Tensor) -> Conversation:
        """x_i ← (1/n) Σ_j x_j"""
        x.copy_((yield Mean(x)))


class ChebyshevGossip:
    """Chebyshev acceleration of plain gossip: the best polynomial of W for its spectrum::

        x^{t+1} ← ω_{t+1} (x^t − γ* (I − W) x^t − x^{t−1}) + x^{t−1},   ω_1 = 1
        ω_2 = 1/(1 − ρ²/2),  ω_{t+1} = 1/(1 − ρ² ω_t/4),   ρ the contraction of plain gossip at γ*

    Contracts by (1 − √ξ)/(1 + √ξ) a step asymptotically, ξ = λ_2/λ_max. Golub & Varga (1961),
    "Chebyshev semi-iterative methods", doi:10.1007/BF01386013. Costs as much as plain gossip.

    Raises:
        ValueError: For a topology without a spectrum: directed or time-varying.
    """

    def __init__(self, network: Network):
        topology = network.topology
        self._gossip = PlainGossip(network, topology.best_diffusion_rate)
        self._rho = topology.contraction(topology.best_diffusion_rate)
        self._omega = 1.0
        self._steps = 0
        self._previous: Tensor | None = None

    def step(self, x: Tensor) -> Conversation:
        """x^{t+1} from x^t and x^{t−1}"""
        now = x.clone()
        yield from self._gossip.step(x)
        if self._previous is not None:
            square = self._rho**2
            self._omega = 1 / (1 - square * (self._omega / 4 if self._steps > 1 else 1 / 2))
            x.sub_(self._previous).mul_(self._omega).add_(self._previous)
        self._previous = now
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"omega": self._omega, "steps": self._steps, "previous": self._previous}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._omega, self._steps = state["omega"], state["steps"]
        self._previous = state["previous"]


class FiniteTimeGossip:
    """Gossip that is exact after as many steps as I − W has distinct non-zero eigenvalues λ::

        x^{t+1} ← (1 − ω_t) x^{t−1} + ω_t x^t − γ_t (I − W) x^t,   ω_0 = 1

    x^t − x̄ = p_t(I − W) (x^0 − x̄), with p_t(0) = 1 and polynomials p_t that are orthogonal on the
    eigenvalues λ. The last one is 0 at each of them: the product Π (1 − λ/λ_k) of Hendrickx et al.
    (2014), arXiv:1211.6324. They multiply its factors one by one. Partial products may be large and
    then amplify rounding errors; polynomials that are orthogonal are small. After this pass another
    one begins. Costs as much as plain gossip.

    Raises:
        ValueError: For a topology without a spectrum: directed or time-varying.
    """

    def __init__(self, network: Network):
        eigenvalues = network.topology.distinct_eigenvalues
        self._gossip = [
            (PlainGossip(network, rate), omega) for rate, omega in _orthogonal(eigenvalues)
        ]
        self._steps = 0
        self._previous: Tensor | None = None

    def step(self, x: Tensor) -> Conversation:
        """x^{t+1} from x^t and x^{t−1}"""
        if self._gossip:
            t, now = self._steps % len(self._gossip), x.clone()
            gossip, omega = self._gossip[t]
            yield from gossip.step(x)
            if t > 0:
                assert self._previous is not None
                x.add_(self._previous - now, alpha=1 - omega)
            self._previous = now
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "previous": self._previous}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps, self._previous = state["steps"], state["previous"]


def _orthogonal(eigenvalues: np.ndarray) -> Iterator[tuple[float, float]]:
    """γ_t and ω_t of `FiniteTimeGossip`, by Stieltjes' procedure."""
    before, p = np.zeros_like(eigenvalues), np.ones_like(eigenvalues)
    for t in range(len(eigenvalues)):
        # λ p_t = α p_t + β p_{t−1} − (α + β) p_{t+1}
        alpha = (eigenvalues * p) @ p / (p @ p)
        beta = (eigenvalues * p) @ before / (before @ before) if t > 0 else 0.0
        omega, rate = alpha / (alpha + beta), 1 / (alpha + beta)
        yield float(rate), float(omega)
        before, p = p, (1 - omega) * before + (omega - rate * eigenvalues) * p
