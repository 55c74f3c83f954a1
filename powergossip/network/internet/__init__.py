"""Processes on machines anywhere, which find each other with a ticket and talk by QUIC.

Modules::

    binding.py     the package iroh, with one repair
    codec.py       values as bytes, without pickle
    tickets.py     tickets, and the files of a machine
    handshake.py   the proof that both ends know the ticket's secret
    node.py        connections to other machines: calls, callers, the way through NATs
    link.py        messages to and from one of them, with a connection that may be replaced
    meeting.py     how machines join a run
    processes.py   the processes of a run, their agreements and messages
    wire.py        messages between machines that may leave and come back
    link_check.py  the speed of all links

What is promised, and to whom:

- Only who knows the ticket's secret takes part, and only until the run has its machines. From then
  on, only the keys of these machines are let in. Both ends of a connection prove the secret, with
  fresh random numbers and the keys of the encrypted connection. A recorded handshake is useless.
- A stranger can slow down that machines join, and nothing else. QUIC refuses callers that do not
  name a protocol that follows from the secret. Before the proof, a machine reads 68 bytes and takes
  64 kB at most, for ten seconds at most, of 32 callers at the same time, four in each network.
- Everything that arrives has a length that is known before, or a limit. Memory is reserved as bytes
  arrive. Values are JSON and arrays of numbers: neither code nor paths come over the wire, and
  nothing is unpickled. The keys of a run that a joiner accepts are in powergossip/join.py. Messages
  for which a machine does not ask take 250 MB of another machine's at most.
- The machines of a run trust each other: one that sends wrong numbers spoils the model. One that
  shows no sign of life for 30 s, or sends another length than is due, ends the run with a sentence,
  or is lost. The last 16 MB of each tag are kept, for another connection.
  One that lives and sends nothing holds it up, with a line on the standard error.
- Servers of others see nothing: without the option `relay`, messages go directly.
"""
