"""The messages that a conversation yields."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from powergossip.network.edges import Edges


@dataclass(eq=False)
class ToEach:
    """A separate message for every neighbor: tensor [worker, neighbor, ...], contiguous.

    Attributes:
        edges: Edges between neighbors, by default the round's.
        memory: Flat memory for the received messages, by default new. It may serve for messages
            that are not in flight at the same time.
    """

    tensor: Tensor
    edges: Edges | None = None
    memory: Tensor | None = None


@dataclass(eq=False)
class ToAll:
    """The same message for every neighbor: tensor [worker, ...]."""

    tensor: Tensor


@dataclass(eq=False)
class Mean:
    """All-reduce: every worker receives the mean over all n workers. tensor [worker, ...]."""

    tensor: Tensor


@dataclass(eq=False)
class Gather:
    """All-gather: every worker receives the pieces of all n workers, ordered by worker index.

    Attributes:
        pieces: A contiguous tensor [length] for each hosted worker. Lengths may differ between
            workers and between calls. All pieces have the same dtype.
    """

    pieces: Sequence[Tensor]


Message = ToEach | ToAll | Mean | Gather
Conversation = Generator[Any, Any, None]  # yields Message | tuple[Message, ...]


def together(*conversations: Conversation) -> Conversation:
    """Merge conversations into one that sends their messages concurrently."""
    waiting: list[tuple[Conversation, Any]] = [(c, None) for c in conversations]
    while True:
        asked: list[tuple[Conversation, tuple[Message, ...], bool]] = []
        for conversation, received in waiting:
            try:
                messages = conversation.send(received)
            except StopIteration:
                continue
            several = isinstance(messages, tuple)
            asked.append((conversation, messages if several else (messages,), several))
        if not asked:
            return
        answers = iter((yield tuple(m for _, messages, _ in asked for m in messages)))
        waiting = []
        for conversation, messages, several in asked:
            received = tuple(next(answers) for _ in messages)
            waiting.append((conversation, received if several else received[0]))


def mapped(
    conversation: Conversation,
    received: Callable[[tuple[Message, ...], tuple[Any, ...]], tuple[Any, ...]],
) -> Conversation:
    """The conversation with received(messages, received messages) in place of the latter."""
    merged, answers = together(conversation), None
    while True:
        try:
            messages = merged.send(answers)
        except StopIteration:
            return
        answers = received(messages, (yield messages))
