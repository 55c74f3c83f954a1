"""PowerGossip: averaging by power iteration on the difference of neighbors.

The update rule is `PowerGossip._iteration`. `directions.py` has the memory of the directions and
their orthonormalization, `power_gossip_reference.py` a plain version of the algorithm. On a CPU
with a C compiler, the loops of `compiled_directions.py` take their place.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powergossip import checks, kernels
from powergossip.algorithms import rates
from powergossip.algorithms.averaging import Kind, Rate, column
from powergossip.algorithms.compiled_directions import CompiledDirections, CompiledSide
from powergossip.algorithms.directions import Directions, EdgeConstants
from powergossip.algorithms.plain import PlainGossip
from powergossip.network import Conversation, Network, ToAll, ToEach, together
from powergossip.parameters import Layout, batches
from powergossip.tensor_cache import TensorCache


class PowerGossip:
    """Neighbors learn a low-rank part of the difference of their matrices by power iteration.

    Per edge (i, j) and matrix, both ends hold the same directions p (rank r). One iteration::

        p ← orthonormalize(p)
        s_i = X_iᵀ p                    is sent to j      (the next iteration: X_i p, sides swap)
        d = s_j − s_i                   the same at both ends
        X_i ← X_i + γ w_ij p dᵀ,   X_j ← X_j − γ w_ij p dᵀ
        p ← d                           warm start, or else p is resampled

    Vogels, Karimireddy & Jaggi (2020), arXiv:2008.01425, Algorithm 1. The update is an orthogonal
    projection of the difference. It preserves the mean, and V = Σ_i ‖x_i − x̄‖² grows in no step
    with γ ≤ 2/λ_max(I − W) (ibid., Lemma 1).

    Departures from the paper:

    - Collapsed directions (d = 0 up to rounding, because the neighbors agree) are resampled at both
      ends.
    - Matrices that rank r cannot compress, min(rows, columns) ≤ r, and vectors take part in plain
      gossip, once a step and in one message. Matrices use the same γ. Vectors use γ = 1, since γ is
      tuned for compressed messages.
    - For r > 1, orthonormalization is a Cholesky factorization of the Gram matrix in double
      precision, with a relative ridge of 1e-12. It is a continuous function of d, which both ends
      have to the bit, so the ends cannot disagree. A linearly dependent direction is dropped
      instead of the factorization failing.

    Cost, a step and neighbor: num_iterations · 32 r Σ_matrices (columns or rows, in turns) bits,
    and 32 bits for each element of the vectors and of the matrices that are not compressed.

    Args:
        diffusion_rate: Diffusion rate γ, or "auto": the best one of plain gossip on this topology,
            2/(λ_2 + λ_max). Above 2/λ_max there is a warning: V may grow, and at a high rank it
            does.
        rank: Rank r of the messages, at most the smaller side of a matrix.
        num_iterations: Iterations of power iteration in a step.
        warm_start: Reuse the last step's directions. Otherwise they are resampled.
        round_weights: Round directions to their signs, at rank 1.
        seed: Seed of random directions.

    Raises:
        ValueError: For a rank or number of iterations below 1, γ that is not positive,
            round_weights with a rank other than 1, or a mixing matrix that is not symmetric.
    """

    kind = Kind.ANTISYMMETRIC
    dual_rate = 0.1  # of exact diffusion

    def __init__(
        self,
        network: Network,
        layout: Layout,
        *,
        diffusion_rate: Rate | str = 1.0,
        rank: int = 1,
        num_iterations: int = 1,
        warm_start: bool = True,
        round_weights: bool = False,
        seed: int = 0,
    ):
        diffusion_rate = rates.checked(network, diffusion_rate)
        rate = column(network, "diffusion_rate", diffusion_rate)
        checks.at_least_one("rank", rank)
        checks.at_least_one("num_iterations", num_iterations)
        if round_weights and rank != 1:
            raise ValueError(f"rank={rank}: use rank=1 with round_weights=True")
        if not network.symmetric:
            raise ValueError(
                f"topology={network.topology.name}: use an undirected topology with PowerGossip, "
                f"such as ring (both ends of an edge must have the same weight)"
            )
        self._network = network
        self._num_iterations = num_iterations
        self._warm_start = warm_start
        self._round_weights = round_weights

        self._stacks = layout.compressible(rank)
        rows = [(stack.layers, stack.rows) for stack in self._stacks]
        columns = [(stack.layers, stack.columns) for stack in self._stacks]
        # For each round, the directions of both sides: for PyTorch or for compiled loops.
        self._edges: list[tuple[Directions, Directions]] = []
        self._compiled: list[CompiledDirections] = []
        library = kernels.load(network)
        for slots in network.rounds:
            edges = EdgeConstants(network, slots, rate, seed)
            if library is not None:
                self._compiled.append(CompiledDirections(library, edges, rank, self._stacks))
            else:
                self._edges.append(
                    (Directions(edges, rank, rows), Directions(edges, rank, columns))
                )
        self._iterations = [0] * len(network.rounds)  # by round, since the start

        # Spans of the elements that are not compressed, which lie behind the compressed ones.
        self._compressed = self._stacks[-1].stop if self._stacks else 0
        matrices = slice(0, layout.matrices_size - self._compressed)
        vectors = slice(matrices.stop, layout.size - self._compressed)
        self._plain = [
            (span, PlainGossip(network, gossip_rate))
            for span, gossip_rate in ((matrices, diffusion_rate), (vectors, 1.0))
            if span.stop > span.start
        ]
        self._views = TensorCache[_Views]()
        self._spans = TensorCache[list[Tensor]]()
        for t in range(len(network.rounds)):
            self._sides(t)[0].draw(self._counter(t))

    def step(self, x: Tensor) -> Conversation:
        """num_iterations iterations on the compressed matrices, plain gossip on the rest."""
        views = self._views.get(x, self._views_of)
        if self._compiled and self._stacks:
            yield from self._compiled_step(x, views.rest)
            return
        steps = []
        if self._stacks:
            steps.append(self._compressed_step(views))
        if self._plain:
            steps.append(self._plain_step(views.rest))
        yield from together(*steps)

    def increment(self, x: Tensor, out: Tensor) -> Conversation:
        """out ← the sum of the exchanges of a step, which leaves x as it is."""
        x = x.clone() if self._num_iterations > 1 else x  # an iteration sees those before it
        views, increments = self._views.get(x, self._views_of), self._views_of(out.zero_())
        received_rest: Tensor | None = None
        t = self._network.round % len(self._network.rounds)
        for iteration in range(self._num_iterations if self._stacks else min(1, len(self._plain))):
            rest = (ToAll(views.rest),) if iteration == 0 and self._plain else ()
            last = iteration == self._num_iterations - 1
            if not self._stacks:
                (received_rest,) = yield rest
                break
            counter, side = self._counter(t), self._iterations[t] % 2
            if self._compiled:
                compiled_p = self._compiled[t].sides[side]
                random = self._round_weights, not self._warm_start
                received, *others = yield compiled_p.project(x, counter, *random), *rest
                compiled_p.update(out, received)
                if not last:
                    compiled_p.update(x, received)
            else:
                p, d = self._edges[t][side], self._edges[t][1 - side]
                self._prepare(p, counter)
                received, *others = yield self._project(p, d, _of_side(views, side)), *rest
                d.take_differences(received)
                _add_products(p, d, _of_side(increments, side))
                if not last:
                    _add_products(p, d, _of_side(views, side))
            self._iterations[t] += 1
            received_rest = others[0] if others else received_rest
        if received_rest is not None:
            self._add_rest(views.rest, received_rest, increments.rest)

    def _add_rest(self, rest: Tensor, received: Tensor, out: Tensor) -> None:
        for span, gossip in self._plain:
            gossip.add_increment(rest[:, span], received[..., span], out[:, span])

    def _plain_step(self, rest: Tensor) -> Conversation:
        self._mix(rest, (yield ToAll(rest)))

    def _mix(self, rest: Tensor, received: Tensor) -> None:
        if len(self._plain) == 1:
            self._plain[0][1].mix(rest, received)
            return
        spans = zip(
            self._plain,
            self._spans.get(rest, self._spans_of),
            self._spans.get(received, self._spans_of),
            strict=True,
        )
        for (_, gossip), x, received_x in spans:
            gossip.mix(x, received_x)

    def _compressed_step(self, views: "_Views") -> Conversation:
        t = self._network.round % len(self._edges)
        for _ in range(self._num_iterations):
            # Side 0: p are rows long, s and d columns. Side 1: the other way round.
            side = self._iterations[t] % 2
            p, d = self._edges[t][side], self._edges[t][1 - side]
            self._prepare(p, self._counter(t))
            yield from self._iteration(p, d, _of_side(views, side))
            self._iterations[t] += 1

    def _prepare(self, p: Directions, counter: int) -> None:
        """p ← orthonormalize(p)"""
        if not self._warm_start:
            p.draw(counter)
        if self._round_weights:
            p.round(counter)
        else:
            p.orthonormalize(counter)

    def _compiled_step(self, x: Tensor, rest: Tensor) -> Conversation:
        """`_compressed_step` and `_plain_step` by compiled loops."""
        t = self._network.round % len(self._compiled)
        random = self._round_weights, not self._warm_start
        for iteration in range(self._num_iterations):
            p = self._compiled[t].sides[self._iterations[t] % 2]
            message = p.project(x, self._counter(t), *random)
            if iteration == 0 and self._plain:
                received, received_rest = yield message, ToAll(rest)
                self._mix(rest, received_rest)
            else:
                received = yield message
            p.update(x, received)
            self._iterations[t] += 1

    def _iteration(self, p: Directions, d: Directions, matrices: Sequence[Tensor]) -> Conversation:
        """X_i ← X_i + Σ_j γ w_ij p d_ijᵀ, for all matrices and neighbors. d is the next p.

        A batched product serves the matrices of one shape. Its rows are the directions of all
        neighbors, hence the transposes: s_iᵀ = pᵀ X_i.
        """
        received = yield self._project(p, d, matrices)
        d.take_differences(received)
        _add_products(p, d, matrices)

    def _project(self, p: Directions, d: Directions, matrices: Sequence[Tensor]) -> ToEach:
        """The message s = Xᵀ p."""
        for p_T, X, s_T in zip(p.stacks, matrices, d.own.stacks, strict=True):
            torch.bmm(p_T, X, out=s_T)
        return d.message()

    def _views_of(self, x: Tensor) -> "_Views":
        matrices = [view for stack in self._stacks for view in batches(x, stack)]
        return _Views(matrices, [view.mT for view in matrices], x[:, self._compressed :])

    def _spans_of(self, rest: Tensor) -> list[Tensor]:
        return [rest[..., span] for span, _ in self._plain]

    def _sides(self, t: int) -> "Sequence[Directions | CompiledSide]":
        """The directions of both sides in a round of the topology."""
        return self._compiled[t].sides if self._compiled else self._edges[t]

    def _counter(self, t: int) -> int:
        """The counter of random draws, different for every round and iteration."""
        return self._iterations[t] * len(self._iterations) + t

    def state_dict(self) -> dict[str, Any]:
        """Under `matrices`, for each round of the topology: the number of iterations, and
        `directions` [worker, neighbor, ...], the next p before orthonormalization.

        `rest` is the state of plain gossip, which is empty.
        """
        return {
            "matrices": {
                "iterations": list(self._iterations),
                "directions": [
                    self._sides(t)[iterations % 2].packed()
                    for t, iterations in enumerate(self._iterations)
                ],
            },
            "rest": {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        matrices = state["matrices"]
        self._iterations = list(matrices["iterations"])
        for t, directions in enumerate(matrices["directions"]):
            self._sides(t)[self._iterations[t] % 2].unpack(directions)


def _add_products(p: Directions, d: Directions, matrices: Sequence[Tensor]) -> None:
    """X ← X + γ w p dᵀ"""
    for weighted_p_T, d_T, X in zip(p.weighted().stacks, d.stacks, matrices, strict=True):
        X.baddbmm_(weighted_p_T.mT, d_T)


class _Views(NamedTuple):
    """Views of x [worker, D]."""

    matrices: list[Tensor]  # [batch, row, column], those that are compressed
    transposes: list[Tensor]  # [batch, column, row]
    rest: Tensor  # [worker, element], the elements that are not compressed


def _of_side(views: _Views, side: int) -> list[Tensor]:
    return views.transposes if side else views.matrices
