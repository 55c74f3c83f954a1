"""Groups of torch.distributed, and how their processes find each other."""

import atexit
import os
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from powergossip.errors import Unconnected
from powergossip.network import interfaces, standstill
from powergossip.network.interfaces import (
    ANYWHERE,
    address_of,
    address_towards,
    interface_towards,
)
from powergossip.network.processes import Processes

_START = timedelta(minutes=10)  # within this time, all processes must have started
GLOO = "GLOO_SOCKET_IFNAME"
_made: tuple[int, int, str] | None = None  # rank, size, backend of the default group, if made here


def start_group(backend: str = "gloo", **options: Any) -> dist.ProcessGroup:
    """Make the default group, see torch.distributed.init_process_group, and destroy it at exit."""
    global _made
    interfaces.check(GLOO)
    _use_interface_to(socket.gethostname() if options else os.environ.get("MASTER_ADDR", ""))
    tried = _tried(options)
    ours, rank = sys.excepthook, options.get("rank", os.environ.get("RANK", 0))
    try:
        with standstill.waiting(rank, (), f"not all processes are here after {{seconds}} s{tried}"):
            dist.init_process_group(backend, timeout=_START, **options)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise Unconnected(f"no connection ({reason}){tried}") from error
    # PyTorch's excepthook would capture the output of ours until ours returns. It never returns: it
    # ends all processes, and the reason would be lost.
    sys.excepthook = ours
    group = world()
    _made = group.rank(), group.size(), backend
    return group


def _tried(options: Mapping[str, Any]) -> str:
    """The place where processes meet, the interface, and those that are accepted, as the end of a
    sentence."""
    place, accepted = options.get("init_method") or "the store of MPI's processes", ""
    if not options:
        host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT")
        found = address_of(host) or "unknown here"
        where = ", this host alone" if found.startswith("127.") else ""
        place = f"MASTER_ADDR={host} ({found}{where}), MASTER_PORT={port}"
        accepted = "an address and a free port of process 0's host, the same in all processes, and "
    through = os.environ.get(GLOO, "that of the host's name")
    return (
        f"; tried {place}, interface {through}; use {accepted}{GLOO} with an interface that leads "
        f"to the others: {interfaces.listed()}"
    )


def world() -> dist.ProcessGroup:
    """The default group, which there is."""
    group = dist.group.WORLD
    assert group is not None
    return group


def group_of_launcher() -> dist.ProcessGroup:
    """The default group, which the first call makes from the variables of torchrun."""
    return world() if dist.is_initialized() else start_group()


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
    return world()


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
        host = "127.0.0.1" if alone else address_towards(ANYWHERE)
        store = dist.TCPStore(host, 0, processes.size, is_master=True, wait_for_workers=False)
        address = host, store.port
    host, port = processes.broadcast(address)
    return store or dist.TCPStore(host, port, processes.size, is_master=False)


def _use_interface_to(host: str) -> None:
    """Make gloo use the network interface that leads to a host, unless GLOO_SOCKET_IFNAME is set.

    By itself it uses the address of this host's name, which often belongs to no network.
    """
    if not host or GLOO in os.environ:
        return
    address = address_of(host)
    if address.startswith("127.") and host not in ("localhost", address):
        host = ANYWHERE  # others do not see this host at the address of its name
    if name := interface_towards(host):
        os.environ[GLOO] = name
