"""Machines that meet with a ticket, in the processes of mpirun or the threads of a process."""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor

from mpi4py import MPI

from powergossip.network.internet import meeting, node, tickets
from powergossip.network.internet.meeting import Meeting
from powergossip.network.internet.processes import InternetProcesses
from powergossip.network.internet.tickets import Record, Ticket

# A machine of the same host has the end of a connection at once, or has ended.
node.CLOSING = 0.2


def prepare(rank: int, keys: list[bytes], secret: bytes) -> tuple[Ticket, Record]:
    """The ticket and the record of one of several machines, as of a run that has met before."""
    public = [meeting.public(key) for key in keys]
    ticket = Ticket("of-tests", public[0], secret, len(keys), ())
    record = Record(
        "", keys[rank].hex(), places=[[key.hex()] for key in public] if not rank else []
    )
    return ticket, record


def under_mpi() -> InternetProcesses:
    """The processes of mpirun, connected with a ticket in the order of their ranks."""
    world = MPI.COMM_WORLD
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="state-")
    keys, secret = world.bcast([os.urandom(32) for _ in range(world.size)]), bytes(32)
    ticket, record = prepare(world.rank, keys, secret)
    options = meeting.Options()
    if world.rank == 0:
        own = Meeting(ticket, record, options)
        world.bcast(str(own.ticket))
    else:
        own = Meeting(tickets.read(world.bcast(None)), record, options)
        own.call()
    return InternetProcesses(*own.enter(), ticket.name)


def in_threads(size: int) -> list[InternetProcesses]:
    """As many machines, in threads of this process."""
    keys, secret = [os.urandom(32) for _ in range(size)], bytes(32)
    options = meeting.Options()
    first = Meeting(*prepare(0, keys, secret), options)

    def join(rank: int) -> InternetProcesses:
        own = first if rank == 0 else Meeting(first.ticket, prepare(rank, keys, secret)[1], options)
        if rank:
            own.call()
            assert own.definition == "the definition"
        return InternetProcesses(*own.enter("the definition"), first.ticket.name)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(join, range(size)))
