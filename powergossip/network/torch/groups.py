"""Groups of torch.distributed, and how their processes find each other."""

import atexit
import os
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from powergossip.errors import BadInput
from powergossip.network.interfaces import address_towards, interface_towards
from powergossip.network.processes import Processes

_START = timedelta(minutes=10)  # within this time, all processes must have started
_made: tuple[int, int, str] | None = None  # rank, size, backend of the default group, if made here


def start_group(backend: str = "gloo", **options: Any) -> dist.ProcessGroup:
    """Make the default group, see torch.distributed.init_process_group, and destroy it at exit."""
    global _made
    ours = sys.excepthook
    try:
        dist.init_process_group(backend, timeout=_START, **options)
    except dist.DistError as error:
        reason = str(error).partition("\n")[0]
        raise BadInput(
            f"no connection ({reason}); use another MASTER_PORT, in all processes"
        ) from error
    # PyTorch's excepthook would capture the output of ours until ours returns. It never returns: it
    # ends all processes, and the reason would be lost.
    sys.excepthook = ours
    group = dist.group.WORLD
    assert group is not None
    _made = group.rank(), group.size(), backend
    return group


def group_of_launcher() -> dist.ProcessGroup:
    """The default group, which the first call makes from the variables of torchrun."""
    if dist.is_initialized():
        group = dist.group.WORLD
        assert group is not None
        return group
    use_interface_to(os.environ.get("MASTER_ADDR", ""))
    return start_group()


def group_under_mpi(processes: Processes, backend: str = "gloo") -> dist.ProcessGroup:
    """The default group for processes of MPI, or for this process alone. Collective."""
    wanted = processes.rank, processes.size, backend
    if dist.is_initialized() and _made not in (None, wanted):
        end()
    if not dist.is_initialized():
        return start_group(backend, store=_store(processes), rank=wanted[0], world_size=wanted[1])
    if _made is None:
        there = dist.get_rank(), dist.get_world_size()
        if there != wanted[:2]:
            raise ValueError(
                f"torch.distributed is in use as process {there[0]} of {there[1]}, where MPI has "
                f"{processes.rank} of {processes.size}; "
                f"call torch.distributed.destroy_process_group() first"
            )
    group = dist.group.WORLD
    assert group is not None
    return group


@atexit.register
def end() -> None:
    """Destroy the default group if it was made here."""
    global _made
    if _made is not None and dist.is_initialized():
        dist.destroy_process_group()
    _made = None


def _store(processes: Processes) -> dist.TCPStore:
    """The store where processes find each other's addresses; process 0 serves it."""
    store = None
    address = "", 0
    if processes.rank == 0:
        alone = processes.local_size == processes.size
        host = "127.0.0.1" if alone else address_towards("192.0.2.1")
        store = dist.TCPStore(host, 0, processes.size, is_master=True, wait_for_workers=False)
        address = host, store.port
    host, port = processes.broadcast(address)
    return store or dist.TCPStore(host, port, processes.size, is_master=False)


def use_interface_to(host: str) -> None:
    """Make gloo use the network interface that leads to a host, unless GLOO_SOCKET_IFNAME is set.

    By itself it uses the address of this host's name, which often belongs to no network.
    """
    if not host or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    if name := interface_towards(host):
        os.environ["GLOO_SOCKET_IFNAME"] = name
