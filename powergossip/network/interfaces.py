"""The network interfaces of this host (Linux)."""

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address, ip_network

from powergossip.errors import Unconnected

ANYWHERE = "192.0.2.1"  # an address for documentation, to which the default route leads


def address_of(host: str) -> str:
    """The IPv4 address of a host's name, or ""."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return ""


def address_towards(host: str) -> str:
    """This host's address as another host sees it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()


def interface_towards(host: str) -> str:
    """The name of the interface that leads to a host, or ""."""
    own = address_towards(host)
    for name, address in interfaces():
        if address == own or (own.startswith("127.") and address == "127.0.0.1"):
            return name
    return ""


def check(variable: str) -> None:
    """Raise Unconnected if a variable of the environment names interfaces, but none of this host.

    Args:
        variable: Its value has names, or networks such as 192.0.2.0/24, and commas.
    """
    given, here = os.environ.get(variable, ""), [*interfaces()]
    for word in given.split(","):
        with suppress(ValueError):
            if word in dict(here):
                return
            network = ip_network(word, strict=False)
            if any(ip_address(own) in network for _, own in here):
                return
    if given:
        name = variable.removeprefix("OMPI_MCA_")
        raise Unconnected(f"{name}={given}: use an interface of this host: {listed()}")


def listed() -> str:
    """The interfaces with their IPv4 addresses, as text."""
    return ", ".join(f"{name} ({own})" for name, own in interfaces() if ":" not in own)


def interfaces() -> Iterator[tuple[str, str]]:
    """Names and addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue
            yield name, socket.inet_ntoa(answer[20:24])
    with suppress(OSError), open("/proc/net/if_inet6") as lines:
        for line in lines:
            octets, *_, name = line.split()
            yield name, str(ip_address(bytes.fromhex(octets)))
