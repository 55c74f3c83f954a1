"""One of several machines that meet with a ticket and exchange messages for a while.

Arguments: folder, rank, size, seconds, bytes, options. With a variable WORKER_TIMEOUT, messages go
by the links of exchanges by edges.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

from powergossip.network import launch
from powergossip.network.internet import meeting
from powergossip.network.internet.processes import InternetProcesses
from powergossip.network.internet.tickets import Record, Ticket
from powergossip.network.resilient.worker_messages import Links


def main() -> None:
    folder, rank, size, seconds, length = Path(sys.argv[1]), *map(int, sys.argv[2:6])
    options = meeting.Options.of(json.loads(sys.argv[6]))
    ticket = folder / "ticket"
    began = time.monotonic()
    if rank == 0:
        key, secret = os.urandom(32), os.urandom(32)
        new = Ticket("of-tests", meeting.public(key), secret, size, ())
        first = meeting.Meeting(new, Record("", key.hex()), options)
        (folder / "draft").write_text(str(first.ticket))
        (folder / "draft").rename(ticket)
        met = *first.enter(), first.ticket.name
    else:
        while not ticket.exists():
            time.sleep(0.1)
        node, keys, known = meeting.connect(ticket.read_text(), size, options, "")
        met = node, keys, known.name
    processes = InternetProcesses(*met)
    launch.use(processes)

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} {text}", flush=True)

    say(f"process {processes.rank} has met the others")
    rank, timeout = processes.rank, os.environ.get("WORKER_TIMEOUT")
    others = [process for process in range(size) if process != rank]
    links = Links(processes, range(size), float(timeout)) if timeout else None
    channel = processes.channel(torch.device("cpu"))
    received = {process: torch.zeros(1, length, dtype=torch.uint8) for process in others}

    def exchange() -> None:
        sent = torch.full((1, length), (rank + step) % 256, dtype=torch.uint8)
        if links is not None:
            for process in others:
                links.send(rank, process, step, sent)
            missing = set(others)
            while missing:
                links.wait(1.0)
                for i, _, k, payload in links.poll():  # one may be a step ahead
                    early.setdefault(k, {})[i] = payload.view(1, -1)
                missing -= set(early.get(step, ()))
                assert len(links.processes) == size
            received.update(early.pop(step))
            return
        work = channel.requests(
            [(process, received[process]) for process in others],
            [(process, sent) for process in others],
        )
        work.start()
        work.wait()

    early: dict[int, dict[int, torch.Tensor]] = {}
    agreed = links.group if links is not None else processes
    deadline, step, longest = time.monotonic() + seconds, 0, 0.0
    on = True
    while on:
        start = time.monotonic()
        exchange()
        for process in others:
            assert bool((received[process] == (process + step) % 256).all()), (process, step)
        spent = time.monotonic() - start
        if spent > max(1.0, 2 * longest) or step == 0:
            say(f"step {step} took {spent:.1f} s")
        longest = max(longest, spent)
        step += 1
        on = bool(agreed.gather_arrays(np.array([time.monotonic() < deadline]))[0, 0])
    for process in others:
        link = processes.node.wait(processes.link(process))
        paths = [(p.remote_addr, p.is_selected, p.rtt_ms) for p in link.connection.paths()]
        say(f"process {process}: {paths}")
    say(f"{step} steps, the longest {longest:.1f} s")
    if links is not None:
        links.finish()


if __name__ == "__main__":
    main()
