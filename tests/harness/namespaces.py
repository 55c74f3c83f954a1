"""An internet of network namespaces (Linux, as root): public hosts, and hosts behind NATs."""

import os
import subprocess
from collections.abc import Sequence

from environment.emulated_cluster import batch
from powergossip.errors import BadInput

PUBLIC = "203.0.113"  # first bytes of public addresses
V6 = "2001:db8::"


class Internet:
    """One switch with public addresses 203.0.113.N, and what is linked to it.

    In a namespace, eth0 leads to the internet, and lan to the hosts behind a NAT.
    """

    def __init__(self) -> None:
        self.names: list[str] = []

    def build(self) -> None:
        """Make the switch. Raises BadInput where the kernel does not support it."""
        self._add("switch", ["link set lo up", "link add switch type bridge", "link set switch up"])

    def _add(self, name: str, lines: Sequence[str]) -> None:
        batch("ip", [f"netns add {self.of(name)}"])
        self.names.append(self.of(name))
        batch("ip", ["link set lo up", *lines], self.of(name))

    def of(self, name: str) -> str:
        return f"internet-{os.getpid()}-{name}"

    def ip(self, name: str, *lines: str) -> None:
        batch("ip", lines, self.of(name))

    def host(self, name: str, number: int, v6: bool = False, device: str = "eth0") -> None:
        """A host with a public address, or another device of one."""
        if self.of(name) not in self.names:
            self._add(name, [])
        port = f"{name}-{device}"[:15]
        self.ip("switch", f"link add {port} type veth peer name {device} netns {self.of(name)}")
        self.ip("switch", f"link set {port} master switch up")
        address = f"{V6}{number:x}/64 dev {device} nodad" if v6 else f"{PUBLIC}.{number}/24"
        self.ip(name, f"address add {address} dev {device}", f"link set {device} up")

    def nat(self, name: str, number: int, lan: str, rule: str = "masquerade") -> None:
        """A router with a public address, behind which are hosts of the network `lan`.0."""
        self.host(name, number)
        self.ip(name, "link add lan type bridge", f"address add {lan}.1/24 dev lan")
        self.ip(name, "link set lan up")
        self.run(name, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        self.nft(
            name,
            "add table ip nat",
            "add chain ip nat post { type nat hook postrouting priority srcnat; }",
            "add chain ip nat pre { type nat hook prerouting priority dstnat; }",
            "add chain ip nat input { type filter hook input priority 0; }",
            "add chain ip nat forward { type filter hook forward priority 0; }",
            f"add rule ip nat post oifname eth0 {rule}",
            "add rule ip nat input iifname eth0 ct state new drop",
            "add rule ip nat forward iifname eth0 ct state new ct status ! dnat drop",
        )

    def behind(self, name: str, nat: str, lan: str, number: int = 2) -> None:
        """A host behind a NAT."""
        self._add(name, [])
        self.ip(nat, f"link add to-{name} type veth peer name eth0 netns {self.of(name)}")
        self.ip(nat, f"link set to-{name} master lan up")
        self.ip(name, f"address add {lan}.{number}/24 dev eth0", "link set eth0 up")
        self.ip(name, f"route add default via {lan}.1")

    def forward(self, nat: str, port: int, to: str) -> None:
        """Forward a UDP port of a NAT."""
        self.nft(nat, f"add rule ip nat pre iifname eth0 udp dport {port} dnat to {to}:{port}")

    def nft(self, name: str, *lines: str) -> None:
        self.run(name, "nft", "-f", "-", text="\n".join(lines))

    def rate(self, name: str, rate: str, device: str = "eth0") -> None:
        """Limit what a host sends."""
        limit = f"qdisc replace dev {device} root tbf rate {rate} burst 5k limit 50k"
        batch("tc", [limit], self.of(name))

    def lose(self, name: str, percent: int) -> None:
        """Lose packets from and to a host."""
        lines = ["add table inet loss"]
        for hook in ("input", "output"):
            lines.append(f"add chain inet loss {hook} {{ type filter hook {hook} priority 0; }}")
            lines.append(f"add rule inet loss {hook} numgen random mod 100 < {percent} drop")
        self.nft(name, *lines)

    def command(self, name: str, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.of(name), *words]

    def run(self, name: str, *words: str, text: str | None = None) -> str:
        done = subprocess.run(
            self.command(name, *words), input=text, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise BadInput(f"{' '.join(words)}: {done.stderr}")
        return done.stdout

    def remove(self) -> None:
        """Remove the namespaces, whose processes have ended."""
        batch("ip", [f"netns delete {name}" for name in self.names])
