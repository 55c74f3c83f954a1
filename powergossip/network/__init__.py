"""The workers of this process and the messages between all workers. No other package uses MPI or
torch.distributed, but for PyTorch's own hooks.

An algorithm's step is a conversation: a generator that yields outgoing messages and is resumed with
the received ones. It yields one message, or a tuple of messages that are sent concurrently::

    yields                                                    is resumed with
    ToEach  tensor [worker, neighbor, ...]  one per neighbor  [worker, neighbor, ...]
    ToAll   tensor [worker, ...]            all the same      [worker, neighbor, ...]
    Mean    tensor [worker, ...]            all-reduce        [1, ...], the mean
    Gather  pieces, worker × [any length]   all-gather        n × [length], of all workers

The receive buffer and the requests belong to the memory of the tensor that is sent. They are
created when a tensor is sent for the first time, reused whenever it is sent again by the same kind
of message along the same edges, and freed with the tensor. A received tensor is therefore
overwritten when the next message is sent from the same memory.

`ToEach(tensor, edges)` uses other edges than the round's, such as the edges of a tree.

`Losses` loses messages, for methods without exchanges by edges (see powergossip.events).

Axes: worker (hosted by this process), neighbor (a slot, padded to the largest degree with weight 0
and index −1). Nothing is sent in a padded slot, and its received values are finite but meaningless.

Bits and messages are counted in this package only, from the bytes that a worker sends. Messages
between workers of one process count like those between processes, so that the counts do not depend
on the layout of workers over processes.
"""

from powergossip.exits import report
from powergossip.network.checked_barrier import checked_barrier, checked_barrier_at_exit
from powergossip.network.conversation import (
    Conversation,
    Gather,
    Mean,
    Message,
    ToAll,
    ToEach,
    together,
)
from powergossip.network.launch import (
    BACKENDS,
    processes,
    processes_of,
    processes_of_replicas,
)
from powergossip.network.lost_messages import Losses
from powergossip.network.mpi import cuda_aware_mpi
from powergossip.network.network import Exchange, Network, Slots, hosted_workers
from powergossip.network.processes import (
    Channel,
    Processes,
    Requests,
    choose_device,
    torch_kept,
)
from powergossip.network.torch.processes import torch_group

__all__ = [
    "BACKENDS",
    "Channel",
    "Conversation",
    "Exchange",
    "Gather",
    "Losses",
    "Mean",
    "Message",
    "Network",
    "Processes",
    "Requests",
    "Slots",
    "ToAll",
    "ToEach",
    "checked_barrier",
    "checked_barrier_at_exit",
    "choose_device",
    "cuda_aware_mpi",
    "hosted_workers",
    "processes",
    "processes_of",
    "processes_of_replicas",
    "report",
    "together",
    "torch_group",
    "torch_kept",
]
