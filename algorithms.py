"""Averaging algorithms, and the learning algorithms built on them.

An averaging algorithm's `step(x)` changes x [worker, D] in place. It is a generator that does no
communication itself: it yields messages and is resumed with what arrived (see network).

To add one: write its class here and its row in `AVERAGING`; train.py, the benchmark and the tests
of the laws that every averaging algorithm obeys (tests/test_algorithms.py) find it there.

Axes: worker (hosted here), neighbor (slot), batch (matrices of one shape that one product serves:
the layers of one worker, or one layer of all workers), rank, row, column.
Symbols: x_i worker i's numbers; w_ij the weight with which i uses what j sends; γ the diffusion
rate; X_i one of i's parameter tensors seen as a matrix [row, column].
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

import compressors
import randomness
from compressors import Codec, pack, packed_size, unpack
from directions import Directions, EdgeNumbers
from network import Conversation, Mean, Network, ToAll, together
from parameters import Layout, Parameters, Stack, batches

V = TypeVar("V")
Rate = float | Tensor  # a number, or one for each hosted worker [worker]


class Averaging(Protocol):
    """Moves the workers' x towards their mean."""

    def step(self, x: Tensor) -> Conversation:
        """One step, in place on x [worker, D]. Call it with the same tensor each time."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on besides x; tensors are [worker, ...]."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where another instance was."""
        ...


class _Stateless:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ValueError(f"{type(self).__name__} has no state, but was given {sorted(state)}")


class _Remember(Generic[V]):
    """make(tensor), made anew only when the tensor is another one (views cost time in a step)."""

    def __init__(self, make: Callable[[Tensor], V]):
        self._make = make
        self._tensor: Tensor | None = None
        self._made: V

    def __call__(self, tensor: Tensor) -> V:
        if tensor is not self._tensor:
            self._tensor, self._made = tensor, self._make(tensor)
        return self._made


# --- Averaging -----------------------------------------------------------------------------------


class PlainGossip(_Stateless):
    """x_i ← x_i + γ Σ_j w_ij (x_j − x_i).    Xiao & Boyd (2004), doi:10.1016/j.sysconle.2004.02.022

    Sends D numbers of 32 bits to each neighbor. Raises ValueError unless γ > 0.
    """

    def __init__(self, network: Network, diffusion_rate: Rate = 1.0):
        rate = _column(network, "diffusion_rate", diffusion_rate)
        self._network = network
        # For each round: 1 − γ Σ_j w_ij [worker, 1]; γ w_ij [worker, 1] for each slot.
        weights = [rate * slots.weights for slots in network.rounds]
        self._own_weights = [1 - w.sum(1, keepdim=True) for w in weights]
        self._weights = [w.unsqueeze(-1).unbind(1) for w in weights]
        self._message = _Remember(ToAll)

    def step(self, x: Tensor) -> Conversation:
        """x_i ← (1 − γ Σ_j w_ij) x_i + Σ_j γ w_ij x_j

        Number by number, so that a worker's result is the same to the bit whoever is hosted beside
        it; a matrix product would round differently for one worker and for eight.
        """
        t = self._network.round % len(self._network.rounds)
        received = yield self._message(x)  # [worker, neighbor, D]
        x.mul_(self._own_weights[t])
        for weight, x_j in zip(self._weights[t], received.unbind(1), strict=True):
            x.addcmul_(weight, x_j)


class AllReduce(_Stateless):
    """x_i ← (1/n) Σ_j x_j: the centralized baseline.

    Sends 2 (n − 1)/n · 32 D bits a worker, as few as can be (Patarasuk & Yuan 2009,
    doi:10.1016/j.jpdc.2008.09.002).
    """

    def __init__(self, network: Network):
        self._message = _Remember(Mean)

    def step(self, x: Tensor) -> Conversation:
        """x_i ← (1/n) Σ_j x_j"""
        x.copy_((yield self._message(x)))


class ChebyshevGossip:
    """Plain gossip with memory, as fast as its spectrum lets a polynomial of W be.

        x^{t+1} ← ω_{t+1} (x^t − γ* (I − W) x^t − x^{t−1}) + x^{t−1},   ω_1 = 1
        ω_2 = 1/(1 − ρ²/2),  ω_{t+1} = 1/(1 − ρ² ω_t/4),   ρ the contraction of plain gossip at γ*

    Contracts by (1 − √ξ)/(1 + √ξ) a step in the long run, ξ = λ_2/λ_max. Golub & Varga (1961),
    "Chebyshev semi-iterative methods", doi:10.1007/BF01386013. Sends what plain gossip sends.

    Raises ValueError for a topology without a spectrum: directed or time-varying.
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
    """Plain gossip with γ_t = 1/λ_t over the distinct non-zero eigenvalues λ_t of I − W.

    Exact after one pass over them, as Π_t (1 − λ/λ_t) is 0 at each; then it begins again.
    Hendrickx et al. (2014), arXiv:1211.6324.

    The order is Leja's, which keeps what rounding errors are multiplied by small. Sends what plain
    gossip sends. Raises ValueError for a topology without a spectrum: directed or time-varying.
    """

    def __init__(self, network: Network):
        rates = [1 / value for value in _leja_order(network.topology.distinct_eigenvalues.tolist())]
        self._gossip = [PlainGossip(network, rate) for rate in rates]
        self._steps = 0

    def step(self, x: Tensor) -> Conversation:
        """x ← x − γ_t (I − W) x"""
        if self._gossip:
            yield from self._gossip[self._steps % len(self._gossip)].step(x)
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps = state["steps"]


class ChocoGossip:
    """Everyone keeps public copies x̂ of itself and its neighbors, and sends what changes its own.

        q_i = C(x_i − x̂_i)
        x̂_j ← x̂_j + q_j                         for every neighbor j and for i itself
        x_i ← x_i + γ Σ_j w_ij (x̂_j − x̂_i)

    Koloskova, Stich & Jaggi (2019), arXiv:1902.00340, Algorithm 1. Sends C's message to every
    neighbor. Where its authors save memory and keep only the sum Σ_j w_ij x̂_j, we keep every x̂_j:
    the sum's rounding errors differ from those of its terms, stay, and push the mean on in every
    step, while copies are the same to the bit at both ends.

    Raises ValueError unless γ > 0, or for a time-varying topology: who is not heard in some rounds
    could not be copied.
    """

    def __init__(self, network: Network, codec: Codec, diffusion_rate: Rate = 1.0):
        if len(network.rounds) > 1:
            raise ValueError(
                f"CHOCO needs neighbors that hear each other in every round, but topology "
                f'"{network.topology.name}" is time-varying; use a static one, such as ring'
            )
        rates = _column(network, "diffusion_rate", diffusion_rate) * network.weights
        self._rates, self._total = rates[:, None], rates.sum(1, keepdim=True)
        self._codec = codec
        self._senders, self._neighbors = network.row_workers, network.neighbors
        shape = (network.rows, codec.numbers)
        self._public = torch.zeros(shape, device=network.device)  # x̂_i
        self._publics = torch.zeros(  # x̂_j [worker, neighbor, D]
            *network.neighbors.shape, codec.numbers, device=network.device
        )
        self._difference = torch.zeros_like(self._public)
        self._steps = 0
        self._message = _Remember(ToAll)

    def step(self, x: Tensor) -> Conversation:
        """One step of Algorithm 1."""
        codec, t = self._codec, self._steps
        message = codec.encode(torch.sub(x, self._public, out=self._difference), t)
        received = yield self._message(message)
        codec.add(message, self._senders, t, self._public)
        codec.add(received, self._neighbors, t, self._publics)
        x[:, None].baddbmm_(self._rates, self._publics)
        x.addcmul_(self._total, self._public, value=-1)
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        """public: x̂_i [worker, D]; publics: x̂_j [worker, neighbor, D]."""
        return {
            "steps": self._steps,
            "public": self._public.clone(),
            "publics": self._publics.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps = state["steps"]
        self._public.copy_(state["public"])
        self._publics.copy_(state["publics"])


class DeepSqueeze:
    """What compression leaves out is kept, and added the next time.

        v_i = x_i + δ_i;   c_i = C(v_i);   δ_i ← v_i − c_i
        x_i ← x_i + γ Σ_j w_ij (c_j − c_i)

    Tang et al. (2019), arXiv:1907.07346, Algorithm 1, as an averaging step. Sends C's message to
    every neighbor. Raises ValueError unless γ > 0.
    """

    def __init__(self, network: Network, codec: Codec, diffusion_rate: Rate = 1.0):
        self._rate = _column(network, "diffusion_rate", diffusion_rate)
        self._network, self._codec = network, codec
        self._senders = network.row_workers
        self._error = torch.zeros(network.rows, codec.numbers, device=network.device)  # δ
        self._steps = 0
        self._message = _Remember(ToAll)

    def step(self, x: Tensor) -> Conversation:
        """One step of Algorithm 1."""
        codec, t, slots = self._codec, self._steps, self._network.slots
        message = codec.encode(self._error.add_(x), t)  # v
        received = yield self._message(message)
        own = codec.decode(message, self._senders, t)
        self._error.sub_(own)
        rates = self._rate * slots.weights
        x[:, None].baddbmm_(rates[:, None], codec.decode(received, slots.neighbors, t))
        x.addcmul_(rates.sum(1, keepdim=True), own, value=-1)
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        """error: δ_i [worker, D]."""
        return {"steps": self._steps, "error": self._error.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps = state["steps"]
        self._error.copy_(state["error"])


class Moniqua:
    """Neighbors that differ by less than θ need only say where they are modulo B.

    With δ = 1/3 (2 bits: four levels), B = 2θ/(1 − 2δ) and mod(·, a) into [−a/2, a/2):

        q_i = ⌊(mod(x_i/B, 1) + ½)/δ + u⌋ δ − ½      u uniform on [0, 1), the same at every worker
        x̂_i − x_i = q_i B − mod(x_i, B)
        x_i ← x_i + γ Σ_j w_ij (mod(q_j B − x_i, B) − (x̂_i − x_i))

    Lu & De Sa (2020), arXiv:2002.11787, Algorithm 1. Sends 2 bits a number to every neighbor.
    Raises ValueError unless γ > 0 and θ > 0.

    A step computes with whole numbers. In units of δB, with y = mod(x_i + B/2, B) in [0, 3) and
    l_i = ⌊y + u⌋ the level sent, the second term of the sum is l_i − y, and the first is l_j − y
    plus the multiple of 3 that brings it into [−3/2, 3/2): it depends on the cell c = ⌊y + ½⌋ only,

        mod(l_j − y, 3) − (l_i − y) = mod(l_j − c, 3) + c − l_i
    """

    def __init__(
        self,
        network: Network,
        numbers: int,
        theta: Rate,
        diffusion_rate: Rate = 1.0,
        seed: int = 0,
    ):
        """`numbers`: D."""
        self._rate = _column(network, "diffusion_rate", diffusion_rate)
        self._quantum = 2 * _column(network, "theta", theta)  # δB [worker, 1]
        self._network, self._numbers = network, numbers
        self._key = randomness.keys(seed, "moniqua", [()])[0].to(network.device)
        self._steps = 0
        shape, device = (network.rows, numbers), network.device
        self._outgoing = ToAll(
            torch.zeros(network.rows, packed_size(numbers, 2), dtype=torch.uint8, device=device)
        )
        # Scratch: new memory of this size would take longer than what is computed in it.
        self._y, self._work = torch.zeros(2, *shape, device=device)
        self._levels, self._cells, self._thirds = torch.zeros(
            3, *shape, dtype=torch.int8, device=device
        )

    def step(self, x: Tensor) -> Conversation:
        """One step, in units of δB."""
        slots, y, levels, cells = self._network.slots, self._y, self._levels, self._cells
        u = randomness.uniform(self._key, self._steps, self._numbers)
        torch.div(x, 3 * self._quantum, out=y).add_(0.5)
        y.sub_(torch.floor(y, out=self._work)).mul_(3)  # mod(x_i + B/2, B)
        levels.copy_(torch.add(y, u, out=self._work)).clamp_(max=3)
        self._outgoing.tensor.copy_(pack(levels.view(torch.uint8), 2))
        cells.copy_(y.add_(0.5))
        received = yield self._outgoing
        own = torch.sub(cells, levels, out=levels)
        rates = self._rate * slots.weights * self._quantum
        for slot in range(received.shape[1]):
            theirs = unpack(received[:, slot], 2, self._numbers).view(torch.int8).sub_(cells)
            # mod(·, 3) of −3 … 3: minus 3 times the whole number next to a third of it
            thirds = torch.mul(theirs, 11, out=self._thirds).add_(16).bitwise_right_shift_(5)
            theirs.sub_(thirds, alpha=3).add_(own)
            x.addcmul_(rates[:, slot, None], self._work.copy_(theirs))
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps = state["steps"]


class MatricesOnly:
    """One averaging algorithm for tensors of two or more dimensions, another for the rest."""

    def __init__(self, layout: Layout, matrices: Averaging, rest: Averaging):
        size = layout.matrices_size
        self._matrices, self._rest = matrices, rest
        self._parts = _Remember(lambda x: (x[:, :size], x[:, size:]))

    def step(self, x: Tensor) -> Conversation:
        """Both at the same time."""
        matrices, rest = self._parts(x)
        steps = []
        if matrices.shape[1]:
            steps.append(self._matrices.step(matrices))
        if rest.shape[1]:
            steps.append(self._rest.step(rest))
        yield from together(*steps)

    def state_dict(self) -> dict[str, Any]:
        return {"matrices": self._matrices.state_dict(), "rest": self._rest.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._matrices.load_state_dict(state["matrices"])
        self._rest.load_state_dict(state["rest"])


class PowerGossip:
    """Neighbors learn a low-rank piece of the difference of their matrices by power iteration.

    Per edge (i, j) and matrix, both ends hold the same directions p (rank r). One iteration:

        p ← orthonormalize(p)
        s_i = X_iᵀ p                    goes to j         (the next iteration: X_i p; sides swap)
        d = s_j − s_i                   the same at both ends
        X_i ← X_i + γ w_ij p dᵀ,   X_j ← X_j − γ w_ij p dᵀ
        p ← d                           warm start; else p is drawn anew

    Vogels, Karimireddy & Jaggi (2020), arXiv:2008.01425, Algorithm 1. The update is an orthogonal
    projection of the difference, so the mean stays where it is, and with
    V = Σ_i ‖x_i − x̄‖² no step with γ ≤ 2/λ_max(I − W) makes V grow (ibid., Lemma 1).

    Where we go further than the paper:

    - Directions that have collapsed (d = 0 up to rounding: the neighbors agreed) are drawn anew, at
      both ends.
    - A matrix that rank r cannot compress, min(rows, columns) ≤ r, is not sent twice over: it
      takes part in plain gossip with the same γ, once a step.
    - For r > 1, orthonormalization is a Cholesky factorization of the Gram matrix in double
      precision, with a relative ridge of 1e-12. Being a continuous function of d, which both ends
      have to the bit, it cannot let them disagree; where directions have become dependent, the
      projection loses that one, instead of the run.

    Cost, a step and neighbor: num_iterations · 32 r Σ_matrices (columns or rows, in turns) bits,
    and 32 bits for each number of the matrices not compressed.

    Raises ValueError for a rank or number of iterations below 1, γ that is not positive,
    round_weights with a rank other than 1, or a mixing matrix that is not symmetric.
    """

    def __init__(
        self,
        network: Network,
        layout: Layout,
        *,
        diffusion_rate: Rate = 1.0,
        rank: int = 1,
        num_iterations: int = 1,
        warm_start: bool = True,
        round_weights: bool = False,
        seed: int = 0,
    ):
        rate = _column(network, "diffusion_rate", diffusion_rate)
        _at_least_one("rank", rank)
        _at_least_one("num_iterations", num_iterations)
        if round_weights and rank != 1:
            raise ValueError(
                f"round_weights=True rounds a single direction; use rank=1, not {rank}"
            )
        if not network.symmetric:
            raise ValueError(
                f"PowerGossip needs both ends of an edge to use the same weight, but topology "
                f'"{network.topology.name}" is directed; use an undirected one, such as ring'
            )
        self._network = network
        self._num_iterations = num_iterations
        self._warm_start = warm_start
        self._round_weights = round_weights

        stacks = layout.compressible(rank)
        rows = [(stack.layers, stack.rows) for stack in stacks]
        columns = [(stack.layers, stack.columns) for stack in stacks]
        self._edges = []  # of each round: the two sides' directions
        for slots in network.rounds:
            edges = EdgeNumbers(network, slots, rate, seed)
            self._edges.append((Directions(edges, rank, rows), Directions(edges, rank, columns)))
        self._iterations = [0] * len(network.rounds)  # of each round, since the start
        self._any_compressed = bool(stacks)
        self._matrices = _Remember(lambda x: _matrices(x, stacks))
        compressed = stacks[-1].stop if stacks else 0
        self._uncompressed = _Remember(lambda x: x[:, compressed:])
        self._plain = PlainGossip(network, diffusion_rate)
        for t, (side, _) in enumerate(self._edges):
            side.draw(self._counter(t))

    def step(self, x: Tensor) -> Conversation:
        """num_iterations iterations on what can be compressed, plain gossip on the rest."""
        steps = []
        if self._any_compressed:
            steps.append(self._compressed_step(self._matrices(x)))
        if (rest := self._uncompressed(x)).shape[1]:
            steps.append(self._plain.step(rest))
        yield from together(*steps)

    def _compressed_step(self, matrices: tuple[Sequence[Tensor], Sequence[Tensor]]) -> Conversation:
        t = self._network.round % len(self._edges)
        for _ in range(self._num_iterations):
            # Side 0: p are rows long, s and d columns; side 1: the other way round.
            here = self._iterations[t] % 2
            p, d = self._edges[t][here], self._edges[t][1 - here]
            s, weighted = d.own, p.weighted
            if not self._warm_start:
                p.draw(self._counter(t))
            if self._round_weights:
                p.round(self._counter(t))
            else:
                p.orthonormalize(self._counter(t))

            for directions, X, own in zip(p.stacks, matrices[here], s.stacks, strict=True):
                torch.bmm(directions, X, out=own)  # s_i = X_iᵀ p, for all neighbors and layers
            for own, outgoing in zip(s.views, d.message_views, strict=True):
                outgoing.copy_(own)
            d.take_differences((yield d.message))
            torch.mul(p.flat, p.weights, out=weighted.flat)  # γ w_ij p
            for directions, difference, X in zip(
                weighted.stacks, d.stacks, matrices[here], strict=True
            ):
                X.baddbmm_(directions.mT, difference)  # X_i ← X_i + Σ_j γ w_ij p d_ijᵀ
            self._iterations[t] += 1

    def _counter(self, t: int) -> int:
        """Of random draws: different for every round and iteration."""
        return self._iterations[t] * len(self._edges) + t

    def state_dict(self) -> dict[str, Any]:
        """For each round of the topology: the number of iterations, and `directions`
        [worker, neighbor, ...], the next p before orthonormalization."""
        return {
            "iterations": list(self._iterations),
            "directions": [
                sides[iterations % 2].packed()
                for sides, iterations in zip(self._edges, self._iterations, strict=True)
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._iterations = list(state["iterations"])
        for sides, iterations, directions in zip(
            self._edges, self._iterations, state["directions"], strict=True
        ):
            sides[iterations % 2].unpack(directions)


def _matrices(x: Tensor, stacks: Sequence[Stack]) -> tuple[list[Tensor], list[Tensor]]:
    """Views [batch, row, column] of the stacks' matrices, and their transposes."""
    views = [view for stack in stacks for view in batches(x, stack)]
    return views, [view.mT for view in views]


def _leja_order(values: Sequence[float]) -> list[float]:
    """The largest, then always the one whose distances to those before have the largest product."""
    left, order = sorted(values), list[float]()
    while left:
        # The sum is 0 at first, for all: the last of them is the largest.
        best = max(reversed(left), key=lambda v: sum(log(abs(v - other)) for other in order))
        left.remove(best)
        order.append(best)
    return order


def _column(network: Network, name: str, value: Rate) -> Tensor:
    """A number, or one for each worker hosted here, as [worker, 1]. ValueError unless above 0."""
    values = torch.as_tensor(value, dtype=torch.float32, device=network.device).reshape(-1, 1)
    for number in values.flatten().tolist():
        if not 0 < number < float("inf"):
            raise ValueError(f"{name}={number:g}: use a number above 0")
    return values.expand(network.rows, 1)


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}={value}: use 1 or more")


# --- Learning ------------------------------------------------------------------------------------


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


# --- By name -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What averaging algorithms can be told; each takes what concerns it."""

    diffusion_rate: Rate = 1.0  # γ
    rank: int = 1  # power-gossip
    num_iterations: int = 1  # power-gossip: of power iteration, a step
    warm_start: bool = True  # power-gossip
    round_weights: bool = False  # power-gossip
    compressor: str = "sign-and-norm"  # choco, deepsqueeze: a row of compressors.COMPRESSORS
    compressor_options: compressors.Options = field(default_factory=compressors.Options)
    theta: Rate = 0.25  # moniqua: θ
    seed: int = 0


Builder = Callable[[Network, Layout, Options], Averaging]


def _power_gossip(network: Network, layout: Layout, options: Options) -> Averaging:
    power_gossip = PowerGossip(
        network,
        layout,
        diffusion_rate=options.diffusion_rate,
        rank=options.rank,
        num_iterations=options.num_iterations,
        warm_start=options.warm_start,
        round_weights=options.round_weights,
        seed=options.seed,
    )
    return MatricesOnly(layout, power_gossip, PlainGossip(network))


def _codec(network: Network, layout: Layout, options: Options) -> Codec:
    compressor = compressors.make(options.compressor, options.compressor_options)
    senders = network.row_workers.tolist()
    return Codec(layout, compressor, senders, options.seed, network.device)


# The names that users choose from: optimizer in train.py, algorithm in the benchmark.
AVERAGING: dict[str, Builder] = {
    "all-reduce": lambda network, layout, options: AllReduce(network),
    "dpsgd": lambda network, layout, options: PlainGossip(network, options.diffusion_rate),
    "power-gossip": _power_gossip,
    "choco": lambda network, layout, options: ChocoGossip(
        network, _codec(network, layout, options), options.diffusion_rate
    ),
    "deepsqueeze": lambda network, layout, options: DeepSqueeze(
        network, _codec(network, layout, options), options.diffusion_rate
    ),
    "moniqua": lambda network, layout, options: Moniqua(
        network, layout.size, options.theta, options.diffusion_rate, options.seed
    ),
}

# Limits to hold the others against. They take x for what they left, so not for learning.
CONSENSUS_ONLY: dict[str, Builder] = {
    "chebyshev": lambda network, layout, options: ChebyshevGossip(network),
    "finite-time": lambda network, layout, options: FiniteTimeGossip(network),
}


def make(name: str, network: Network, layout: Layout, options: Options) -> Averaging:
    """The averaging algorithm of that name. ValueError for an unknown name or bad options."""
    builders = AVERAGING | CONSENSUS_ONLY
    if name not in builders:
        choices = ", ".join(sorted(builders))
        raise ValueError(f'algorithm "{name}" is unknown; choose from {choices}')
    return builders[name](network, layout, options)
