"""Fragments: parts of a model whose rounds of local steps end at different steps. See outer.py."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor

from powergossip import checks
from powergossip.algorithms.difference_code import DifferenceCode
from powergossip.algorithms.learning.gossip_rule import Joint, MakeAveraging
from powergossip.network import Conversation
from powergossip.parameters import Layout


class Fragment:
    """A part of the model: some of its tensors, and the averaging rule of their variables.

    Args:
        tensors: Indices in layout.shapes.
        variables: Number of variables that are sent in one message.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: list[int],
        like: Tensor,
        make: MakeAveraging,
        variables: int,
    ):
        self.layout = layout.select(tensors)
        pairs = zip(tensors, self.layout.starts, strict=True)
        sizes = ((layout.starts[i], start, prod(layout.shapes[i])) for i, start in pairs)
        self._pieces = [(slice(a, a + n), slice(b, b + n)) for a, b, n in sizes]
        self._whole = len(tensors) == len(layout.shapes)
        self.joint = Joint(self.layout, like[:, : self.layout.size], variables)
        self.averaging = make(self.joint.layout)

    def take(self, *flat: Tensor) -> list[Tensor]:
        """Its elements of variables [worker, D]: copies, or the variables if it has all."""
        if self._whole:
            return list(flat)
        found = []
        for variable in flat:
            own = variable.new_empty(len(variable), self.layout.size if variable.numel() else 0)
            for there, here in self._pieces if variable.numel() else []:
                own[:, here] = variable[:, there]
            found.append(own)
        return found

    def put(self, own: Sequence[Tensor], *flat: Tensor) -> None:
        """Write the copies of `take` back to the variables."""
        if self._whole:
            return
        for copy, variable in zip(own, flat, strict=True):
            for there, here in self._pieces if variable.numel() else []:
                variable[:, there] = copy[:, here]

    def mix(self, *variables: Tensor) -> Conversation:
        """The variables ← G of each."""
        yield from self.averaging.step(self.joint.load(*variables))
        self.joint.store(*variables)

    def begin_at(self, point: Tensor) -> None:
        """See `averaging.Copies`."""
        (own,) = self.take(point[None])
        self.joint.begin_at(self.averaging, own[0])


class Fragments:
    """The averaging rules of all fragments, with one state."""

    def __init__(self, all_of_them: Sequence[Fragment]):
        self._fragments = all_of_them

    @property
    def codes(self) -> list[tuple[DifferenceCode, ...]]:
        """The codes of messages of few bits, of all fragments."""
        return [codes for f in self._fragments for codes in getattr(f.averaging, "codes", ())]

    def begin_at(self, point: Tensor) -> None:
        for fragment in self._fragments:
            fragment.begin_at(point)

    def state_dict(self) -> dict[str, Any]:
        return {"fragments": [f.averaging.state_dict() for f in self._fragments]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
            fragment.averaging.load_state_dict(saved)


def divided(layout: Layout, fragments: int) -> list[list[int]]:
    """Indices of the tensors of each fragment.

    The tensors are cut into pieces of nearly equal size, which go to the fragments in turn: four
    pieces for each fragment, or fewer if there are too few tensors.

    Raises:
        BadValue: For more fragments than tensors.
    """
    count = len(layout.shapes)
    accepted = f"1 to {count}, the number of tensors"
    layout = layout.whole
    checks.check("fragments", fragments, 1 <= fragments <= count, accepted)
    pieces = min(4 * fragments, count) // fragments * fragments
    found: list[list[int]] = [[] for _ in range(fragments)]
    position, piece = 0, 0
    for index, shape in enumerate(layout.shapes):
        left = count - index
        is_full = position >= layout.size * (piece + 1) / pieces
        if index and piece + 1 < pieces and (is_full or left <= pieces - piece - 1):
            piece += 1
        found[piece % fragments].append(index)
        position += prod(shape)
    return found
