"""The workers of this process and the messages between all workers. No other package uses MPI.

An algorithm's step is a conversation: a generator that yields outgoing messages and is resumed with
the received ones. It yields one message, or a tuple of messages that are sent concurrently:

    yields                                                        is resumed with
    ToEach(tensor)  # [worker, neighbor, ...]  one per neighbor   [worker, neighbor, ...]
    ToAll(tensor)   # [worker, ...]            all the same       [worker, neighbor, ...]
    Mean(tensor)    # [worker, ...]            all-reduce         [1, ...], the mean
    Gather(pieces)  # worker × [any length]    all-gather         n × [length], of all workers

The receive buffer and the MPI requests belong to the memory of the tensor that is sent. They are
created when a tensor is sent for the first time, reused whenever it is sent again by the same kind
of message (in the same round of a time-varying topology), and freed with the tensor. A received
tensor is therefore overwritten when the next message is sent from the same memory.

Axes: worker (hosted by this process), neighbor (a slot, padded to the largest degree with weight 0
and index −1). Nothing is sent in a padded slot, and its received values are finite but meaningless.

Bits and messages are counted in this package only, from the bytes that a worker sends. Messages
between workers of one process count like those between processes, so that the counts do not depend
on the layout of workers over processes.
"""

from powergossip.network.meeting import meet, meet_at_exit
from powergossip.network.messages import Conversation, Gather, Mean, Message, ToAll, ToEach
from powergossip.network.mpi import (
    Processes,
    choose_device,
    cuda_aware_mpi,
    processes,
    report,
    torch_kept,
)
from powergossip.network.workers import Exchange, Network, Slots, hosted_workers, together

__all__ = [
    "Conversation",
    "Exchange",
    "Gather",
    "Mean",
    "Message",
    "Network",
    "Processes",
    "Slots",
    "ToAll",
    "ToEach",
    "choose_device",
    "cuda_aware_mpi",
    "hosted_workers",
    "meet",
    "meet_at_exit",
    "processes",
    "report",
    "together",
    "torch_kept",
]
