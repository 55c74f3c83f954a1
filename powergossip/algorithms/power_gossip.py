"""PowerGossip: averaging by power iteration on the difference of neighbors.

The loop over iterations and messages is `PowerGossip.increment`. A `Side` computes an iteration's
products and its update of X: `MatrixSide` of directions.py, or on a CPU with a C compiler
`CompiledSide` of compiled_directions.py. The tests have a plain version, tests/harness/
power_gossip_reference.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from powergossip import checks, kernels
from powergossip.algorithms import rates
from powergossip.algorithms.averaging import Kind, Rate, column
from powergossip.algorithms.compiled_directions import compiled_sides
from powergossip.algorithms.directions import EdgeConstants, Side, matrix_sides
from powergossip.algorithms.plain import PlainGossip
from powergossip.algorithms.sharded_directions import sharded_sides
from powergossip.network import Conversation, Message, Network, ToAll
from powergossip.parameters import Layout


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

    Attributes:
        directions: The present or next p, for each round of the topology.
        lengths: The elements of p for a neighbor, on both sides.
        rounds: Number of iterations in a step.

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
        num_iterations: int = 2,
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
        self._warm_start = warm_start
        self._round_weights = round_weights

        self.seed, self._stacks = seed, layout.compressible(rank)
        self.rounds = num_iterations if self._stacks else 1
        whole = layout.whole.compressible(rank)
        self.lengths = (
            rank * sum(stack.layers * stack.rows for stack in whole),
            rank * sum(stack.layers * stack.columns for stack in whole),
        )
        library, shards = kernels.load(network), layout.shards
        self._sides: list[tuple[Side, Side]] = []  # of each round
        self._edges = [EdgeConstants(network, slots, rate, seed) for slots in network.rounds]
        for edges in self._edges:
            if shards is not None:
                self._sides.append(sharded_sides(edges, rank, self._stacks, whole, shards))
            elif library is not None:
                self._sides.append(compiled_sides(library, edges, rank, self._stacks))
            else:
                self._sides.append(matrix_sides(edges, rank, self._stacks))
        self.directions = [sides[0] for sides in self._sides]
        self._iterations = [0] * len(network.rounds)  # by round, since the start

        # Spans of the elements that are not compressed, which lie behind the compressed ones.
        self.compressed = self._stacks[-1].stop if self._stacks else 0
        matrices = slice(0, layout.matrices_size - self.compressed)
        vectors = slice(matrices.stop, layout.size - self.compressed)
        self._plain = [
            (span, PlainGossip(network, gossip_rate))
            for span, gossip_rate in ((matrices, diffusion_rate), (vectors, 1.0))
            if span.stop > span.start
        ]
        for t, p in enumerate(self.directions):
            p.draw(self._counter(t))

    def step(self, x: Tensor) -> Conversation:
        """num_iterations iterations on the compressed matrices, plain gossip on the rest."""
        yield from self._iterate(x, x)

    def increment(self, x: Tensor, out: Tensor) -> Conversation:
        """out ← the sum of the exchanges of a step, which leaves x as it is."""
        # An iteration sees those before it.
        x = x.clone() if self.rounds > 1 else x
        yield from self._iterate(x, out.zero_())

    def _iterate(self, x: Tensor, out: Tensor) -> Conversation:
        """out ← out + the exchanges of a step from x.

        Unless out is x, the compressed matrices of x take part in all but the last exchange.
        """
        for iteration in range(self.rounds if self._stacks or self._plain else 0):
            p, messages = self.directions[self._t], self.messages(x, iteration)
            received = yield messages
            last = messages[-1]
            self.update(out, received, last.tensor if isinstance(last, ToAll) else None)
            if out is not x and iteration < self.rounds - 1:
                p.update(x, None)

    @property
    def _t(self) -> int:
        """The round of the topology."""
        return self._network.round % len(self._sides)

    def messages(self, x: Tensor, iteration: int) -> tuple[Message, ...]:
        """s = Xᵀ p, and in the first iteration of a step the elements that are not compressed."""
        t, messages = self._t, list[Message]()
        if self._stacks:
            p = self.directions[t]
            if not self._warm_start:
                p.draw(self._counter(t))
            messages.append(p.project(x, self._counter(t), self._round_weights))
        if self._plain and iteration == 0:
            messages.append(ToAll(x[:, self.compressed :]))
        return tuple(messages)

    def update(self, out: Tensor, received: Sequence[Tensor], rest: Tensor | None) -> None:
        """out ← out + the exchanges of an iteration. rest: the plain message, or None."""
        t = self._t
        if rest is not None:
            self._gossip(rest, received[-1], out[:, self.compressed :])
        if self._stacks:
            d = self.directions[t].update(out, received[0])
            self.directions[t] = d  # p ← d, the warm start. Otherwise p is drawn again
            self._iterations[t] += 1

    def _gossip(self, rest: Tensor, received: Tensor, out: Tensor) -> None:
        """Plain gossip on elements that are not compressed, in place if out is rest."""
        for span, gossip in self._plain:
            own, theirs, result = rest[..., span], received[..., span], out[..., span]
            if result.data_ptr() == own.data_ptr():
                gossip.mix(own, theirs)
            else:
                gossip.add_increment(own, theirs, result)

    def _counter(self, t: int) -> int:
        """The counter of random draws, different for every round and iteration."""
        return self._iterations[t] * len(self._iterations) + t

    def state_dict(self) -> dict[str, Any]:
        """Under `matrices`, for each round of the topology: the number of iterations, and
        `directions` [worker, neighbor, ...], the next p before orthonormalization. They end with
        zeros, so that their shape does not depend on the iteration.

        `rest` is the state of plain gossip, which is empty.
        """
        return {
            "matrices": {
                "iterations": list(self._iterations),
                "directions": [self._padded(p.packed()) for p in self.directions],
            },
            "rest": {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        for t, directions in enumerate(state["matrices"]["directions"]):
            iterations = state["matrices"]["iterations"][t]
            expected = (*self._edges[t].key.shape, self.lengths[iterations % 2])
            if directions.shape[-1] == max(self.lengths):
                directions = directions[..., : expected[-1]]
            if directions.shape != expected:
                raise ValueError(
                    f"directions of shape {tuple(directions.shape)} do not fit; this run's are "
                    f"{expected}"
                )
            self.resume(iterations, t).unpack(directions)

    def resume(self, iterations: int, t: int = 0, keys: Tensor | None = None) -> Side:
        """Go to an iteration of round t of the topology. Returns p, which the caller sets.

        Args:
            keys: Keys [worker, neighbor] of the random streams, of other edges than before.
        """
        if keys is not None:
            self._edges[t].key.copy_(keys)
        self._iterations[t] = iterations
        p = self.directions[t] = self._sides[t][iterations % 2]
        return p

    def _padded(self, directions: Tensor) -> Tensor:
        missing = max(self.lengths) - directions.shape[-1]
        return torch.nn.functional.pad(directions, (0, missing))
