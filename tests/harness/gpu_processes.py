"""A process of torchrun's, which compares its workers on a device with one process on the CPU.

Arguments: gloo, with messages staged through host memory, or nccl; cuda or cpu. Process 0 prints
{check: errors of all processes} as JSON. The order of the messages is checked too.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from powergossip.network import Conversation, Mean, Processes, ToAll, choose_device, processes
from powergossip.network.torch.processes import GroupProcesses
from tests.harness.averaging import EVERY
from tests.harness.on_device import CPU, Rule, allowed, described, difference, ring, values
from tests.harness.order import check_order, record

STEPS = 3
SECONDS = 120  # after which a process that waits is ended, also in a library


def main(transport: str, place: str) -> None:
    signal.alarm(SECONDS)
    device = choose_device(place, int(os.environ["LOCAL_RANK"]))
    if os.environ["WORLD_SIZE"] == "1":
        print(json.dumps(alone(transport, device)))
        return
    found = processes(transport)
    assert isinstance(found, GroupProcesses)
    batches = record(found.gloo)
    wrong = {}
    for name, error in checks(transport, device, found):
        errors = sorted({*found.gather(error)} - {""})
        wrong.update({name: errors} if errors else {})
    check_order(found.gather(batches))
    if found.rank == 0:
        print(json.dumps(wrong))


def alone(transport: str, device: torch.device) -> dict[str, str]:
    """NCCL's all-reduce in one process, where there is one GPU."""
    dist.init_process_group(transport)
    x = torch.arange(1000.0, device=device)
    total = x.clone()
    dist.all_reduce(total)
    same = torch.equal(total, x)
    dist.destroy_process_group()
    return {} if same else {"all-reduce": "changes the x of one process"}


def checks(transport: str, device: torch.device, found: Processes) -> Iterator[tuple[str, str]]:
    """(check, error of this process, or nothing)"""
    stage = transport == "gloo" or None
    network, x = ring(device, found, stage=stage), values(seed=0)
    channel = network.connection.channel
    assert channel is not None
    used = channel.name, network.connection.stage
    yield "transport", "" if used == (transport, bool(stage)) else f"channel, stage = {used}"
    own = slice(network.workers.start, network.workers.stop)
    received: list[Tensor] = []

    def conversation(message: ToAll | Mean) -> Conversation:
        received.append((yield message).clone())

    network.run(conversation(ToAll(x[own].to(device))))
    neighbors = x[network.neighbors.cpu()]
    yield "exchange", "" if torch.equal(received[-1].cpu(), neighbors) else "wrong elements"
    network.run(conversation(Mean(x[own].to(device))))
    apart = difference(received[-1][0], x.mean(0))
    yield "all-reduce", str(apart) if apart.off else ""
    for name, options in EVERY:
        apart = difference(
            Rule(name, options, ring(device, found, stage=stage), x[own]).steps(STEPS),
            Rule(name, options, ring(CPU), x).steps(STEPS)[own],
        )
        too_many = apart.off > allowed(name, options)
        yield described(name, options), str(apart) if too_many else ""


if __name__ == "__main__":
    main(*sys.argv[1:])
