"""PowerGossip: averaging by power iteration on the difference of neighbors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from powergossip import checks
from powergossip.algorithms.averaging import Rate, Remember, column
from powergossip.algorithms.directions import Directions, EdgeNumbers
from powergossip.algorithms.plain import PlainGossip
from powergossip.network import Conversation, Network, together
from powergossip.parameters import Layout, Stack, batches


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
        rate = column(network, "diffusion_rate", diffusion_rate)
        checks.at_least_one("rank", rank)
        checks.at_least_one("num_iterations", num_iterations)
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
        self._matrices = Remember(lambda x: _matrices(x, stacks))
        compressed = stacks[-1].stop if stacks else 0
        self._uncompressed = Remember(lambda x: x[:, compressed:])
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
