"""The other processes of a run that survives the loss of some: who is there, and who is silent."""

import sys
import time
from collections.abc import Mapping

from powergossip.errors import Dropped, Stopped
from powergossip.network.resilient.heartbeats import Identity, SignsOfLife
from powergossip.network.resilient.messages import Envelope, Payload, Wire

# Kinds of messages. The layers above send the first three, and the last one.
DATA, NOTE, GROUP, LOST, DROPPED, WELCOME = range(6)

_LOOKS = 20  # at signs of life, within worker_timeout
_SHORTEST_BACKOFF, _LONGEST_BACKOFF = 20e-6, 1e-3  # seconds


class Peers:
    """Messages between processes, some of which may end or stop.

    A process is lost if MPI reports its end (ULFM), if it is silent for `worker_timeout`, or if
    another process regards it as lost for its silence. It is silent while it neither sends messages
    nor lives, see heartbeats.py: a process that is busy may take any time. The time during which
    this process itself does not call `advance` counts as a quarter of the timeout at most, so that
    a process that was stopped does not regard the others as silent.

    A process that was regarded as lost but lives, such as one that was stopped, receives a notice.
    `advance` then raises Dropped.

    If the network splits, each side regards the processes of the other one as silent. The side with
    more processes goes on, or, if both have equally many, the side with the lowest index. On the
    other side, `advance` raises Stopped.

    Args:
        identities: Identity of each process, by rank.
        worker_timeout: Seconds of silence after which a process counts as lost.

    Attributes:
        own: Rank of this process.
        alive: Ranks of the processes that are not lost, own included.
        is_away: True in a process that has come back, until the others admit it.
    """

    def __init__(
        self,
        wire: Wire,
        liveness: SignsOfLife,
        identities: Mapping[int, Identity],
        worker_timeout: float,
        is_away: bool = False,
    ):
        self.wire, self.own, self.liveness = wire, wire.own, liveness
        self.identities = dict(identities)
        self.worker_timeout = worker_timeout
        self.is_away = is_away
        self.alive = {wire.own} if is_away else set(identities)
        self._advanced = self._looked = time.monotonic()
        self._silence = dict.fromkeys(identities, 0.0)  # seconds, by process
        self._out_of_reach: set[int] = set()  # lost for their silence, unless seen to be stopped
        self._arrived: dict[int, list[Envelope]] = {
            kind: [] for kind in (DATA, NOTE, GROUP, WELCOME)
        }

    def send(
        self, process: int, kind: int, i: int = 0, j: int = 0, k: int = 0, payload: Payload = b""
    ) -> None:
        """Start to send a message. Does not block. Messages to lost processes are discarded."""
        if time.monotonic() - self._advanced > min(1.0, self.worker_timeout / 4):
            self.advance()  # a process that was stopped reads first whether it was dropped
        self.wire.send(process, kind, i, j, k, payload)

    def take(self, kind: int) -> list[Envelope]:
        """The messages of a kind, not from lost processes, that came since the last call."""
        taken, self._arrived[kind] = self._arrived[kind], []
        return [m for m in taken if m.source in self.alive or self.is_away]

    def has(self, kind: int) -> bool:
        """True if `take` would return messages."""
        return bool(self._arrived[kind])

    def advance(self) -> None:
        """Advance all messages and notice lost processes. Does not block.

        Raises Dropped if the other processes regard this one as lost.
        """
        self._advanced = time.monotonic()
        for message in self.wire.receive():
            self._silence[message.source] = 0.0
            self._read(message)
        self.alive -= self.wire.lost
        elapsed = self._advanced - self._looked
        if elapsed >= self.worker_timeout / _LOOKS:
            self._looked = self._advanced
            self._look(min(elapsed, self.worker_timeout / 4))

    def _look(self, elapsed: float) -> None:
        """Drop the processes that have been silent for too long, with these last seconds."""
        for process in sorted(self.alive - {self.own}):
            if self.liveness.lives(process):
                self._silence[process] = 0.0
                continue
            self._silence[process] += elapsed
        lost = [p for p in sorted(self.alive) if self._silence[p] > self.worker_timeout]
        if lost:
            self._check_side()
        for process in lost:
            self._drop(process, self.liveness.sees(process))

    def _read(self, message: Envelope) -> None:
        if message.kind in self._arrived:
            self._arrived[message.kind].append(message)
        elif message.kind == LOST:
            if message.i != self.own:
                self._remove(message.i, seen=bool(message.j))
                self._check_side()
        elif message.kind == DROPPED:
            raise Dropped(
                f"the other processes regard process {self.own} as lost, which was silent for more "
                f"than worker_timeout={self.worker_timeout:g} seconds, and go on without it"
            )
        else:
            self.reject(message.source, f"a message of kind {message.kind}")

    def reject(self, process: int, text: str) -> None:
        """Regard a process as lost that has sent a message which is wrong."""
        if process in self.alive:
            print(f"process {process} is lost: it has sent {text}", file=sys.stderr, flush=True)
            self._drop(process, seen=True)

    def _drop(self, process: int, seen: bool) -> None:
        """Regard a process as lost. The others do so as well, and it ends if it lives."""
        for other in self.alive - {self.own, process}:
            self.send(other, LOST, i=process, j=int(seen))
        self._remove(process, seen)

    def _remove(self, process: int, seen: bool) -> None:
        if process in self.alive:
            self.wire.send(process, DROPPED)
            self.wire.remove(process)
            self.liveness.remove(process)
            self.alive.discard(process)
            self._out_of_reach.add(process)
        if seen or self.liveness.sees(process):
            self._out_of_reach.discard(process)

    def admit(self, process: int) -> None:
        """A process that was lost is there again. All survivors call it at the same time."""
        if process in self.alive:
            self._remove(process, seen=False)  # its loss was not noticed
        self.wire.admit(process)
        self.alive.add(process)
        self._out_of_reach.discard(process)
        self._silence[process] = 0.0

    def begin(self, alive: set[int]) -> None:
        """This process is one of these again."""
        for process in alive & self.wire.lost:  # that have come back with it
            self.wire.admit(process)
        self.is_away, self.alive = False, alive

    def _check_side(self) -> None:
        """Raise Stopped, or Dropped in all but one process, on the smaller side of a network."""
        silent = {p for p in self.alive if self._silence[p] > self.worker_timeout / 2}
        silent = {p for p in silent if not self.liveness.sees(p)}
        here, there = self.alive - silent, (self._out_of_reach | silent) - self.wire.ended
        if not there or (len(here), -min(here)) > (len(there), -min(there)):
            return
        text = (
            f"process {self.own} does not reach the processes {sorted(there)}, which may go on: it "
            "ends, so that the run is not continued twice"
        )
        raise Stopped(text) if self.own == min(here) else Dropped(text)

    def backoff(self, since: float) -> None:
        """Sleep, the longer the more time has passed since a time: others need the core."""
        waited = time.monotonic() - since
        time.sleep(min(max(waited / 8, _SHORTEST_BACKOFF), _LONGEST_BACKOFF))

    def dropped(self) -> set[int]:
        """Lost processes that MPI does not report as ended: they may be stopped, and live."""
        return set(self.identities) - self.alive - self.wire.ended
