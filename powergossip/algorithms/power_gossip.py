"""PowerGossip: averaging by power iteration on the difference of neighbors.

The loop over iterations and messages is `PowerGossip.increment`. A `Side` computes an iteration's
products and its update of X: `MatrixSide` of directions.py, or on a CPU with a C compiler
`CompiledSide` of compiled_directions.py. docs/methods/power-gossip.md has a plain version.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from powergossip import checks, kernels
from powergossip.algorithms import rates
from powergossip.algorithms.averaging import Kind, Rate, column
from powergossip.algorithms.compiled_directions import CompiledSide, compiled_sides
from powergossip.algorithms.difference_code import WHOLE, DifferenceCode
from powergossip.algorithms.directions import EdgeConstants, MatrixSide, matrix_sides
from powergossip.algorithms.plain import PlainGossip
from powergossip.algorithms.sharded_directions import sharded_sides
from powergossip.compressors import matrices as matrices_of
from powergossip.network import Conversation, Gather, Message, Network, ToAll, ToEach
from powergossip.network.rows import Rows, Shared
from powergossip.parameters import Layout, Stack

Side = MatrixSide | CompiledSide


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
    and 32 bits for each element of the vectors and of the matrices that are not compressed. With
    b bits, b in place of 32, and 16 for each 64 elements.

    With b bits, d comes from integers modulo 2^b, see `DifferenceCode`. It has the error of a
    random rounding: the expectation is the same, both ends have the same d to the bit, and the mean
    stays. The first messages of each edge are whole: in two steps, or in four if num_iterations
    is odd.

    Args:
        diffusion_rate: Diffusion rate γ, or "auto": the best one of plain gossip on this topology,
            2/(λ_2 + λ_max). Above 2/λ_max there is a warning: V may grow, and at a high rank it
            does.
        rank: Rank r of the messages, at most the smaller side of a matrix.
        num_iterations: Iterations of power iteration in a step.
        warm_start: Reuse the last step's directions. Otherwise they are resampled.
        round_weights: Round directions to their signs, at rank 1.
        bits: Bits b of an element, 3 to 16, or 32.
        seed: Seed of random directions.

    Attributes:
        directions: The present or next p, for each round of the topology.
        lengths: The elements of p for a neighbor, on both sides.
        rounds: Number of iterations in a step.

    Raises:
        ValueError: For a rank or number of iterations below 1, γ that is not positive,
            round_weights with a rank other than 1, other bits, few bits with a shard without
            elements that are not compressed, or a mixing matrix that is not symmetric.
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
        bits: int = WHOLE,
        seed: int = 0,
    ):
        diffusion_rate = rates.checked(network, diffusion_rate)
        rate = column(network, "diffusion_rate", diffusion_rate)
        checks.at_least_one("rank", rank)
        checks.at_least_one("num_iterations", num_iterations)
        if round_weights and rank != 1:
            raise ValueError(f"rank={rank}: use rank=1 with round_weights=True")
        checks.check("bits", bits, bits == WHOLE or 3 <= bits <= 16, f"3 to 16, or {WHOLE}")
        if not network.symmetric:
            raise ValueError(
                f"topology={network.topology.name}: use an undirected topology with PowerGossip, "
                f"such as ring (both ends of an edge must have the same weight)"
            )
        self._network, self._dtype = network, network.dtype
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
        # Iterations that have ranges of their own: of a step, on both sides.
        self._slots = self.rounds * (1 + self.rounds % 2)
        self._layout = layout
        stop = whole[-1].stop if whole else 0
        self._rest = [stack for stack in matrices_of(layout.whole) if stack.start >= stop]
        if bits < WHOLE and shards is not None and _last_is_empty(self._rest, shards.size):
            raise ValueError(
                f"bits={bits}: use {WHOLE} with {shards.size} shards, since one would have no "
                "elements of the vectors and small matrices"
            )
        self.codes: list[tuple[DifferenceCode, ...]] = []
        if bits < WHOLE:
            sides = [
                [(s.rows, s.columns)[side] for s in whole for _ in range(s.layers * rank)]
                for side in (0, 1)
            ]
            rest = [m.rows * m.columns for m in self._rest for _ in range(m.layers)]
            self.codes = [
                (
                    DifferenceCode(edges, bits, sides[0], self._slots // 2, 0, shards, library),
                    DifferenceCode(edges, bits, sides[1], self._slots // 2, 1, shards, library),
                    DifferenceCode(edges, bits, rest, 1, 2, shards, library),
                )
                for edges in self._edges
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
            own = [message.tensor for message in messages if not isinstance(message, Gather)]
            self.update(out, own, received)
            if out is not x and iteration < self.rounds - 1:
                p.update(x, None)

    @property
    def _t(self) -> int:
        """The round of the topology."""
        return self._network.round % len(self._sides)

    def messages(self, x: Tensor, iteration: int) -> tuple[Message, ...]:
        """s = Xᵀ p, and in the first iteration of a step the elements that are not compressed."""
        t = self._t
        messages: list[Message] = []
        if self._stacks:
            p, counter = self.directions[t], self._counter(t)
            if not self._warm_start:
                p.draw(counter)
            message = p.project(x, counter, self._round_weights)
            code, slot = self._code(t)
            if code and code.known(slot):
                message = ToEach(code.encode(self._side(t, 1).products(), slot, counter))
            messages.append(message)
        if self._plain and iteration == 0:
            rest = x[:, self.compressed :]
            if self.codes and self.codes[t][2].known(0):
                rest = self._gathered(rest)
                each = self.codes[t][2].encode(rest[:, None], 0, self._counter(t))
                messages.append(ToEach(each))
            else:
                messages.append(ToAll(rest) if self.codes else Shared(rest))
        return tuple(messages)

    def update(self, out: Tensor, own: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """out ← out + the exchanges of an iteration, from the messages of both ends."""
        t = self._t
        if len(own) > bool(self._stacks):
            self._gossip(t, own[-1], received[-1], out[:, self.compressed :])
        if self._stacks:
            p, d = self.directions[t], self._side(t, 1)
            code, slot = self._code(t)
            if code and code.known(slot):
                d.unpack(code.decode(own[0], received[0], slot, d.products()))
                p.update(out, None)
            else:
                p.update(out, received[0])
                if code:
                    code.begin(d.packed(), slot)
            self.directions[t] = d  # p ← d, the warm start. Otherwise p is drawn again
        self._iterations[t] += 1

    def split(self, part: Tensor) -> list[Tensor]:
        """The messages of this iteration, of one worker with one neighbor, in a part of bytes."""
        code, slot = self._code(0)
        messages, start = [], 0
        if self._stacks:
            start = self._side(0, 1).flat.nbytes
            if code and code.known(slot):
                start = code.size
                messages.append(part[:start].view(1, 1, -1))
            else:
                messages.append(part[:start].view(self._dtype).view(1, 1, -1))
        if len(part) > start:
            rest = part[start:]
            if self.codes and self.codes[0][2].known(0):
                messages.append(rest.view(1, 1, -1))
            else:
                messages.append(rest.view(self._dtype).view(1, 1, -1))
        return messages

    def recall(self, own: Sequence[Tensor]) -> None:
        """s ← the messages of an earlier `messages` of this iteration, if they are whole."""
        code, slot = self._code(0)
        if self._stacks and not (code and code.known(slot)):
            self.directions[0].recall(own[0])

    def _side(self, t: int, later: int = 0) -> Side:
        """The side of this iteration, or of the next one."""
        return self._sides[t][(self._iterations[t] + later) % 2]

    def _code(self, t: int) -> tuple[DifferenceCode | None, int]:
        """The code of the products of this iteration, and the index of its ranges."""
        if not self.codes:
            return None, 0
        k = self._iterations[t]
        return self.codes[t][1 - k % 2], k % self._slots // 2

    def _gossip(self, t: int, rest: Tensor, received: Tensor, out: Tensor) -> None:
        """Plain gossip on elements that are not compressed, in place if out is rest."""
        code = self.codes[t][2] if self.codes else None
        if code and code.known(0):
            d = out.new_empty(*self._edges[t].key.shape, code.elements)
            d = self._own(code.decode(rest, received, 0, d))
            for span, gossip in self._plain:
                gossip.add_differences(d[..., span], out[:, span])
            return
        rest = rest[:, 0] if rest.dim() > out.dim() else rest
        if code:
            code.begin(self._gathered(received - rest[:, None]), 0)
        in_place = out.data_ptr() == rest.data_ptr()
        for span, gossip in self._plain:
            own, theirs, result = rest, received, out
            if len(self._plain) > 1:
                own, result = rest[:, span], out[:, span]
                theirs = received.part(span) if isinstance(received, Rows) else received[..., span]
            if in_place:
                gossip.mix(own, theirs)
            else:
                gossip.add_increment(own, theirs, result)

    def _gathered(self, rest: Tensor) -> Tensor:
        """The uncompressed elements of whole tensors, gathered from all shards."""
        shards = self._layout.shards
        if shards is None:
            return rest
        size = sum(stack.stop - stack.start for stack in self._rest)
        whole = rest.new_zeros(*rest.shape[:-1], size)
        for block, own in self._blocks(whole, rest):
            block.copy_(own)
        return shards.sum_(whole)

    def _own(self, whole: Tensor) -> Tensor:
        """This shard's elements of whole tensors that are not compressed."""
        if self._layout.shards is None:
            return whole
        rest = whole.new_zeros(*whole.shape[:-1], self._layout.size - self.compressed)
        for block, own in self._blocks(whole, rest):
            own.copy_(block)
        return rest

    def _blocks(self, whole: Tensor, rest: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """This shard's blocks of rows in whole tensors, and in its own."""
        assert self._layout.shards is not None
        first = self._rest[0].start if self._rest else 0
        for stack in self._rest:
            own, rows = self._layout.local(stack), self._layout.shards.rows(stack.rows)
            views = [
                flat[..., s.start - start : s.stop - start].unflatten(
                    -1, (s.layers, s.rows, s.columns)
                )
                for flat, s, start in ((whole, stack, first), (rest, own, self.compressed))
            ]
            yield views[0][..., rows.start : rows.stop, :], views[1]

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
                **({"ranges": self.ranges()} if self.codes else {}),
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
        self.load_ranges(state["matrices"].get("ranges", ()))

    def ranges(self) -> list[dict[str, Any]]:
        """The ranges of messages of few bits."""
        return [code.saved() for codes in self.codes for code in codes]

    def load_ranges(self, ranges: Sequence[Mapping[str, Any]]) -> None:
        """Set the ranges of messages of few bits."""
        codes = [code for codes in self.codes for code in codes]
        for code, saved in zip(codes, ranges, strict=True):
            code.load(saved)

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


def _last_is_empty(tensors: Sequence[Stack], shards: int) -> bool:
    """True if the last shard has no rows, see Shards.rows."""
    return bool(tensors) and all(
        -(-tensor.rows // shards) * (shards - 1) >= tensor.rows for tensor in tensors
    )
