"""The directions of PowerGossip in memory of compiled loops, kernels/power_gossip.c.

They do the same as `MatrixSide` in PyTorch, with fewer passes over memory: one over x before the
message, and one after it.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from powergossip import kernels
from powergossip.algorithms.directions import EdgeConstants
from powergossip.network import ToEach
from powergossip.parameters import Stack


class _Edges(ctypes.Structure):
    """Edges of power_gossip.c. `memory` keeps the arrays behind its pointers."""

    memory: Any

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("workers", "neighbors", "rank", "matrices")),
        ("size", ctypes.c_int64 * 2),
        ("elements", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("matrix", "weight", "sign", "absent", "key")),
    )


def compiled_sides(
    library: kernels.Kernels, edges: EdgeConstants, rank: int, stacks: Sequence[Stack]
) -> tuple["CompiledSide", "CompiledSide"]:
    """Both sides of the edges of one round."""
    workers, neighbors = edges.key.shape
    matrices, at = [], (0, 0)
    for stack in stacks:
        size = stack.rows * stack.columns
        for start in range(stack.start, stack.stop, size):
            matrices.append((start, stack.rows, stack.columns, *at))
            at = at[0] + rank * stack.rows, at[1] + rank * stack.columns
    matrix = np.array(matrices, dtype=np.int64)
    tensors = [t.contiguous() for t in (edges.weight, edges.sign, edges.absent, edges.key)]
    structure = _Edges(
        *(workers, neighbors, rank, len(matrices)),
        (ctypes.c_int64 * 2)(*at),
        stacks[-1].stop if stacks else 0,
        matrix.ctypes.data,
        *(kernels.address(tensor) for tensor in tensors),
    )
    structure.memory = matrix, tensors
    shapes = [(workers, neighbors, size) for size in at]
    memory = torch.zeros(workers * neighbors * max(at), dtype=torch.float32)
    p, q = (CompiledSide(library, structure, i, shapes[i], memory) for i in (0, 1))
    p.other, q.other = q, p
    return p, q


class CompiledSide:
    """A side in compiled loops.

    Attributes:
        directions: Directions of this side [worker, neighbor, M], in the order of a message, and 0
            in padded slots. While the other side is p, this memory first has its products s, then
            d = s_received − s.
    """

    other: "CompiledSide"

    def __init__(
        self,
        library: kernels.Kernels,
        edges: _Edges,
        side: int,
        shape: tuple[int, int, int],
        memory: Tensor,
    ):
        self.directions = torch.zeros(*shape, dtype=torch.float32)
        self.flat = self.directions.view(-1)
        self._message = ToEach(self.directions, memory=memory)
        self._structure = edges
        self._edges, self._side = ctypes.addressof(edges), side
        self._project = kernels.function(library, "power_gossip_project", "ppiippiii")
        self._update = kernels.function(library, "power_gossip_update", "ppiipppi")
        self._draw = kernels.function(library, "power_gossip_draw", "pipi")

    def draw(self, counter: int) -> None:
        self._draw(self._edges, self._side, kernels.address(self.directions), counter)

    def project(self, x: Tensor, counter: int, round_weights: bool) -> ToEach:
        assert x.dtype == torch.float32
        assert x.stride(1) == 1
        message = self.other._message
        self._project(
            *(self._edges, x.data_ptr(), x.stride(0), self._side, self.directions.data_ptr()),
            *(message.tensor.data_ptr(), counter, round_weights),
            torch.get_num_threads(),
        )
        return message

    def update(self, x: Tensor, received: Tensor | None) -> "CompiledSide":
        self._update(
            *(self._edges, x.data_ptr(), x.stride(0), self._side, self.directions.data_ptr()),
            self.other.directions.data_ptr(),
            None if received is None else kernels.address(received),
            torch.get_num_threads(),
        )
        return self.other

    def products(self) -> Tensor:
        return self.directions

    def recall(self, message: Tensor) -> None:
        self.other.directions.copy_(message)

    def packed(self) -> Tensor:
        return self.directions.clone()

    def unpack(self, message: Tensor) -> None:
        self.directions.copy_(message)
