"""The codec: a worker's tensors through a compressor into one message of bytes, and back."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powergossip import randomness
from powergossip import registry_options as options
from powergossip.compressors.compressor import (
    BySize,
    Compressor,
    Field,
    Levels,
    Senders,
    Stream,
)
from powergossip.compressors.packing import pack, packed_size, unpack
from powergossip.parameters import Layout, Stack
from powergossip.tensor_cache import TensorCache

INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
AT_ONCE = 2**22  # elements of several senders that are decoded together, in new memory


class Codec:
    """Messages of x [worker, D], tensor by tensor through a compressor.

    A message lies in memory that the next `encode` overwrites. Decoded elements lie in memory that
    the next `decode` for the same shape of senders overwrites.

    Args:
        workers: Index of the worker in each row of an encoded x, int64 [worker].
        seed: Seed of the random numbers.
        chosen: Function chosen(rows, columns) that selects the tensors in the message, by default
            all. The others are not read, and decode to zeros.

    Attributes:
        size: Bytes of one worker's message.
        elements: Number D of elements.
        layout: Layout of the D elements. For blocks of rows, see `Compressor.divides`.
        stacks: Stacks of the tensors in the message: matrices, and vectors as one column.
        plan: The places of their fields in a message.
        key: Key of their stream.
        message: Memory of the last encoded messages, uint8 [worker, bytes].
        linear: True if the mean of the workers' messages, as float32, decodes to the mean of C(x).
    """

    def __init__(
        self,
        layout: Layout,
        compressor: Compressor,
        workers: Sequence[int],
        seed: int = 0,
        device: torch.device | None = None,
        chosen: Callable[[int, int], bool] = lambda rows, columns: True,
    ):
        self.compressor, self.elements, self.layout = compressor, layout.size, layout
        self._whole = [m for m in matrices(layout.whole) if chosen(m.rows, m.columns)]
        self.stacks = [layout.local(stack) for stack in self._whole]
        self._of_script = not options.are_of_library(type(compressor))
        self.linear = bool(getattr(compressor, "linear", False))
        divides = getattr(compressor, "divides", "")
        if layout.shards is not None and not divides:
            raise ValueError(
                f"compressor {type(compressor).__name__} of sharded matrices: use per_shard=True, "
                "or a compressor that divides their rows"
            )
        self.plan = Plan(compressor, self._whole if divides == "whole" else self.stacks)
        self.size = self.plan.size
        self._slices: Tensor | None = None  # of messages of whole matrices, for this shard
        if layout.shards is not None and divides == "whole":
            length = -(-self.size // layout.shards.size)
            self._slices = torch.zeros(len(workers), length, dtype=torch.uint8, device=device)
        self.workers = torch.tensor(workers, dtype=torch.int64, device=device)
        self.seed = seed
        self.key = randomness.keys(seed, "compressor", [()])[0].to(device)
        self._counter = -1  # of the last message
        self._kept: list[dict[str, Tensor]] = []  # by stack, for that counter
        self._matrices = TensorCache[list[Tensor]]()
        self._outgoing = _Fields(self.plan, (len(workers),), torch.uint8, device)
        self.message = torch.zeros(len(workers), self.size, dtype=torch.uint8, device=device)
        # By the senders' shape: the fields of their messages, and the decoded elements.
        self._incoming: dict[tuple[int, ...], _Fields] = {}
        self._decoded: dict[tuple[int, ...], Tensor] = {}

    def encode(self, x: Tensor, counter: int, minus: Tensor | None = None) -> Tensor:
        """The message of each worker: uint8 [worker, bytes], contiguous, the same memory each time.

        Args:
            x: Parameters [worker, D], of any row stride.
            counter: Index of the step (or of the message, where a step has several). It selects the
                random numbers.
            minus: Where given, x − minus is encoded, tensor by tensor, which needs less memory.
        """
        assert x.shape == (len(self.workers), self.elements), x.shape
        matrices = self._matrices.get(x, self._matrices_of)
        if minus is not None:
            subtracted = self._matrices.get(minus, self._matrices_of)
        streams = self.streams(self.workers, counter)
        for index, (fields, stream) in enumerate(zip(self._outgoing.fields, streams, strict=True)):
            v = matrices[index] if minus is None else matrices[index] - subtracted[index]
            parts = self.compressor.compress(v.float(), stream)
            if self._of_script:
                self._check(fields, index, v, parts)
            for field, part in zip(fields, parts, strict=True):
                field.copy_(part)
        self._outgoing.write(self.message)
        return self.message

    def _check(self, fields: Sequence[Tensor], index: int, v: Tensor, parts: Any) -> None:
        """Raise errors for parts that are not the fields of the matrices v of a stack."""
        name, stack = f"{type(self.compressor).__name__}.compress", self.stacks[index]
        if not isinstance(parts, tuple | list) or len(parts) != len(fields):
            found = len(parts) if isinstance(parts, tuple | list) else type(parts).__name__
            raise TypeError(
                f"{name} returned {found}; use a tuple of {len(fields)} tensors, one for each of "
                "its fields"
            )
        kinds = [field.kind for field in self.compressor.fields(stack.rows, stack.columns)]
        for i, (field, part, kind) in enumerate(zip(fields, parts, kinds, strict=True)):
            if getattr(part, "shape", None) != field.shape:
                is_tensor = isinstance(part, Tensor)
                found = f"shape {tuple(part.shape)}" if is_tensor else type(part).__name__
                raise ValueError(
                    f"{name} returned {found} for field {i}; use a tensor of shape "
                    f"{tuple(field.shape)}, such as v.flatten(-2) of a matrix"
                )
            if isinstance(kind, Levels):
                lowest, highest = 0, kind.count - 1
            elif kind in INTEGERS and part.numel() and kind != part.dtype:
                lowest, highest = torch.iinfo(kind).min, torch.iinfo(kind).max
            else:
                continue
            least, most = part.min().item(), part.max().item()
            if not lowest <= least <= most <= highest and v.isfinite().all():
                raise ValueError(
                    f"{name} returned {least:g} … {most:g} for field {i}, which holds {lowest} … "
                    f"{highest}; the matrix is {stack.rows} × {stack.columns}"
                )

    def outgoing(self, message: Tensor) -> Tensor:
        """This process' part of the message: all, or a slice if all shards of a worker have it."""
        if self._slices is None:
            return message
        assert self.layout.shards is not None
        return self.layout.shards.piece(message, self._slices)

    def incoming(self, received: Tensor) -> Tensor:
        """The messages of the neighbors [..., bytes], from the received tensors."""
        if self._slices is None:
            return received
        assert self.layout.shards is not None
        return self.layout.shards.message(received, self.size)

    def decode(self, message: Tensor, senders: Tensor, counter: int) -> Tensor:
        """C(x) of each sender: `[*, D]`, for messages `[*, bytes]` of the workers `senders` `[*]`.

        Leading axes are arbitrary, such as [worker] or [worker, neighbor].

        Args:
            senders: Indices of the workers. Padding (−1) decodes to zeros if its message is zeros.
            counter: The senders' counter in `encode`.
        """
        leading = tuple(senders.shape)
        if leading not in self._decoded:
            self._decoded[leading] = torch.empty(
                *leading, self.elements, dtype=torch.float32, device=message.device
            )
        out = self._decoded[leading].zero_()
        self.add(message, senders, counter, out)
        return out

    def add(self, message: Tensor, senders: Tensor, counter: int, out: Tensor) -> None:
        """out ← out + C(x), for out `[*, D]` with adjacent elements, otherwise as `decode`."""
        if out.dtype != torch.float32:  # C(x) is in single precision
            out.add_(self.decode(message, senders, counter))
            return
        if senders.dim() > 1 and out.numel() > AT_ONCE:
            for part in zip(message.unbind(-2), senders.unbind(-1), out.unbind(-2), strict=True):
                self.add(*part[:2], counter, part[2])
            return
        leading = tuple(senders.shape)
        assert message.shape == (*leading, self.size), (message.shape, leading, self.size)
        if leading not in self._incoming:
            # Floats are faster to add, integers take a quarter of the memory.
            levels = torch.float32 if out.numel() <= AT_ONCE else torch.int8
            self._incoming[leading] = _Fields(self.plan, leading, levels, message.device)
        incoming = self._incoming[leading]
        incoming.read(message)
        matrices = self._matrices.get(out, self._matrices_of)
        streams = self.streams(senders, counter)
        for fields, matrix, stream in zip(incoming.fields, matrices, streams, strict=True):
            values = tuple(f.float() if f.dtype == torch.int8 else f for f in fields)  # levels
            self.compressor.decompress(values, matrix, stream)

    def by_size(self, value: BySize) -> Tensor:
        """The value of each element for the number of elements of its tensor: float64 [D].

        1 for elements that are not in the message.
        """
        found = torch.ones(self.elements, dtype=torch.float64, device=self.workers.device)
        for stack, whole in zip(self.stacks, self._whole, strict=True):
            found[stack.start : stack.stop] = value(whole.rows * whole.columns)
        return found

    def streams(self, senders: Tensor, counter: int) -> list[Stream]:
        """The random streams of the senders' layers, by stack."""
        if counter != self._counter:
            self._counter, self._kept = counter, [{} for _ in self.stacks]
        of_all, shards = Senders(self.key, senders, counter, self.layout), self.layout.shards
        rows = zip(self._whole, self.stacks, self._kept, strict=True)
        return [Stream(of_all, whole, own, shards, kept) for whole, own, kept in rows]

    def _matrices_of(self, x: Tensor) -> list[Tensor]:
        """Views `[*, layer, row, column]` of x `[*, D]`, by stack."""
        return [
            x[..., s.start : s.stop].unflatten(-1, (s.layers, s.rows, s.columns))
            for s in self.stacks
        ]


class Plan:
    """The places of the fields of each stack in a message.

    Attributes:
        places: The places by stack, in the compressor's order.
        wide: Bytes of the fields other than levels, which come first.
        levels: Kind of all levels, or None.
        count: Number of levels.
        size: Bytes of the message.
    """

    def __init__(self, compressor: Compressor, stacks: Sequence[Stack]):
        fields = [compressor.fields(stack.rows, stack.columns) for stack in stacks]
        for of_stack in fields:
            if not all(isinstance(field, Field) for field in of_stack):
                raise ValueError(
                    f"{type(compressor).__name__}.fields returned {of_stack}; use a tuple of "
                    "Fields, such as (Field(torch.float16, rows * columns),)"
                )
        self.wide = self.count = 0
        self.levels: Levels | None = None
        order = [(s, f) for s in range(len(stacks)) for f in range(len(fields[s]))]

        def width(index: tuple[int, int]) -> int:
            kind = fields[index[0]][index[1]].kind
            return 0 if isinstance(kind, Levels) else kind.itemsize

        placed: dict[tuple[int, int], Place] = {}
        for s, f in sorted(order, key=width, reverse=True):  # stable
            kind, length = fields[s][f]
            layers = stacks[s].layers
            if isinstance(kind, Levels):
                if self.levels not in (None, kind):
                    raise ValueError(
                        f"{type(compressor).__name__}.fields returned {self.levels} and {kind}; "
                        "use one kind of Levels"
                    )
                self.levels = kind
                placed[s, f] = Place(None, layers, length, self.count)
                self.count += layers * length
            else:
                start = self.wide // kind.itemsize
                placed[s, f] = Place(kind, layers, length, start)
                self.wide += layers * length * kind.itemsize
        self.places = [[placed[s, f] for f in range(len(of))] for s, of in enumerate(fields)]
        self.size = self.wide
        if self.levels:
            self.size += packed_size(self.count, self.levels.bits)


class Place(NamedTuple):
    """The place of a field of all layers of a stack. `start` counts elements of its type."""

    dtype: torch.dtype | None  # None: levels
    layers: int
    length: int
    start: int

    def view(self, wide: Tensor, levels: Tensor) -> Tensor:
        """uint8 `[*, bytes]`, or levels `[*, level]` → `[*, layer, length]`"""
        memory = levels if self.dtype is None else wide.view(self.dtype)
        elements = memory[..., self.start : self.start + self.layers * self.length]
        return elements.unflatten(-1, (self.layers, self.length))


class _Fields:
    """The fields of messages of senders `[*]`, in memory where every element is aligned.

    Attributes:
        fields: Views `[*, layer, length]` by stack, in the compressor's order.
    """

    def __init__(
        self,
        plan: Plan,
        senders: tuple[int, ...],
        type_of_levels: torch.dtype,
        device: torch.device | None,
    ):
        wide = torch.zeros(*senders, -(-plan.wide // 8) * 8, dtype=torch.uint8, device=device)
        self._levels = torch.zeros(*senders, plan.count, dtype=type_of_levels, device=device)
        self.fields = [tuple(p.view(wide, self._levels) for p in of) for of in plan.places]
        self._wide, self._plan = wide[..., : plan.wide], plan

    def write(self, message: Tensor) -> None:
        """Write to message `[*, bytes]`. Levels are given by their indices."""
        plan = self._plan
        message[..., : plan.wide].copy_(self._wide)
        if plan.levels:
            message[..., plan.wide :].copy_(pack(self._levels, plan.levels.bits))

    def read(self, message: Tensor) -> None:
        """Read from message `[*, bytes]`. Levels become their values."""
        plan = self._plan
        self._wide.copy_(message[..., : plan.wide])
        if plan.levels:
            packed = message[..., plan.wide :]
            levels = unpack(packed, plan.levels.bits, plan.count).view(torch.int8)
            self._levels.copy_(levels.mul_(plan.levels.step).add_(plan.levels.first))


def matrices(layout: Layout) -> list[Stack]:
    """The tensors of a layout as stacks of matrices: vectors have one column."""
    return [*layout.stacks, *layout.vectors]


def size(compressor: Compressor, rows: int, columns: int) -> int:
    """Bytes of a matrix of this shape in a message."""
    return Plan(compressor, [Stack(rows, columns, layers=1, start=0)]).size
