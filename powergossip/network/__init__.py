"""The workers of this process, and the messages between all workers. Nothing else knows MPI.

An algorithm's step is a conversation: a generator that yields what leaves and is resumed with what
arrived. It yields a message, or several in a tuple, to travel at the same time:

    yields                                                        is resumed with
    ToEach(tensor)  # [worker, neighbor, ...]  each its own       [worker, neighbor, ...]
    ToAll(tensor)   # [worker, ...]            all the same       [worker, neighbor, ...]
    Mean(tensor)    # [worker, ...]            all-reduce         [1, ...], the mean
    Gather(pieces)  # worker × [any length]    all-gather         n × [length], of all workers

What arrives lies in memory that the next message of the same object overwrites. A message object
that is yielded again (its tensor refilled) reuses its receive buffer and MPI requests; so a method
that sends the same shape at each step keeps its message objects.

Axes: worker (hosted by this process), neighbor (a slot; padded to the largest degree: weight 0,
number −1, nothing sent, and what "arrives" there is finite but has no meaning).

Bits and messages are counted here and nowhere else, from the bytes that leave a worker: messages
between workers of one process count as those between processes do, so that the layout of workers
over processes does not show.
"""

from powergossip.network.messages import Conversation, Gather, Mean, Message, ToAll, ToEach
from powergossip.network.mpi import Processes, choose_device, cuda_aware_mpi, processes
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
    "processes",
    "together",
]
