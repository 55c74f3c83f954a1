"""Exchanges by edges: messages that are late or lost, workers that die or join.

The averaging rules of `powergossip.algorithms` move all workers in one step. Here workers exchange
with one neighbor at a time, each at its own time::

    averaging.py      averaging rules in edge form: plain gossip, PowerGossip, CHOCO-Gossip
    members.py        the workers alive, and weights between them
    worker.py         the life of a worker, for any driver
    scenario.py       speeds, delays, losses, deaths and joins
    virtual_clock.py  the driver of one process, in virtual time
    wall_clock.py     the driver of one process among several, in real time
    deadline.py       how long a worker waits for a neighbor
    packing.py        messages between processes as bytes
    clock.py          common parts of the drivers
"""
