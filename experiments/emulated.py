"""Runs on an emulated cluster of this machine."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from environment import emulated_cluster
from powergossip.errors import BadInput
from powergossip.runner.runner import ROOT, Run

EMULATOR = ROOT / "environment" / "emulated_cluster.py"
# Without it, long messages that cross wait for each other, see the README.
CROSSING_MESSAGES = "OMPI_MCA_btl_tcp_flags=send"


@dataclass(frozen=True)
class EmulatedRun(Run):
    """A run on a cluster with a host for each process, which the emulator starts.

    Attributes:
        rate: Rate of its links, as an argument of environment/emulated_cluster.py ("100mbit",
            "none").
        latency: Latency of these links, likewise ("20ms"). "": that of this machine.
    """

    rate: str = "none"
    latency: str = ""

    @property
    def links(self) -> Mapping[str, str]:
        return {"rate": self.rate, **({"latency": self.latency} if self.latency else {})}

    @property
    def program(self) -> list[str]:
        hosts = ["--hosts", str(self.processes)]
        hosts += [part for name, text in self.links.items() for part in (f"--{name}", text)]
        emulator = [sys.executable, str(EMULATOR), *hosts]
        return ["env", CROSSING_MESSAGES, *emulator, "--", *super().program]

    @property
    def launched(self) -> int:
        return 1

    def cores(self, available: int) -> int:
        return available

    def check(self, launcher: str) -> None:
        if launcher != "mpirun":
            raise BadInput(
                f"--launcher={launcher}: use mpirun; these runs emulate a cluster on this machine"
            )
        try:
            emulated_cluster.check_machine(sys.executable)
        except emulated_cluster.Refused as refusal:
            raise BadInput(f"these runs emulate a cluster on this machine: {refusal}") from refusal
