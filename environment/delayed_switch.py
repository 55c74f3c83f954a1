"""A switch in user space that delivers frames late, for emulated_cluster.py --latency.

    python delayed_switch.py SECONDS RATE NAMESPACE NAMESPACE …

Each network namespace gets a TAP device, `eth0`, with this process at the other end. It moves to
the first namespace, prints a line when the devices exist, and then forwards each frame to the
namespace that its address belongs to, SECONDS later. The frames for a namespace leave one after the
other at RATE bits per second (0: at once). Frames of up to 64 KiB, which TCP makes where the device
can split them, are forwarded whole, so that a few thousand frames per second suffice for 1 Gbit/s.
"""

import ctypes
import fcntl
import heapq
import os
import select
import struct
import sys
import time
from itertools import count

CLONE_NEWNET = 0x40000000  # linux/sched.h
PR_SET_PDEATHSIG, SIGTERM = 1, 15
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0  # linux/if_tun.h
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 = 0x01, 0x02, 0x04
DEVICE = "eth0"
HEADER = 10  # bytes of struct virtio_net_hdr in front of each frame
LARGEST = HEADER + 2**16 + 64  # bytes of a read
SEGMENT, ON_WIRE = 1448, 1514  # bytes of TCP in a frame, and of the frame


def open_devices(namespaces: list[str]) -> list[int]:
    """Create a device in each namespace, the first one last, which this process stays in."""
    libc = ctypes.CDLL(None, use_errno=True)
    opened = {}
    for name in [*namespaces[1:], namespaces[0]]:
        with open(f"/run/netns/{name}") as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {name}")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
        fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)
        opened[name] = device
    return [opened[name] for name in namespaces]


def wire_bytes(frame: bytes) -> int:
    """Bytes on the wire: a large frame is sent in several, each with headers."""
    size = len(frame) - HEADER
    return size + max(0, -(-size // ON_WIRE) - 1) * (ON_WIRE - SEGMENT)


def forward(devices: list[int], latency: float, rate: float) -> None:
    """Forward frames forever."""
    ports: dict[bytes, int] = {}  # address → device
    free = dict.fromkeys(devices, 0.0)  # when the link to a device has sent all earlier frames
    late: list[tuple[float, int, int, bytes]] = []  # when, index, device, frame
    index = count()
    while True:
        wait = max(0.0, late[0][0] - time.monotonic()) if late else None
        readable, _, _ = select.select(devices, [], [], wait)
        for source in readable:
            try:
                frame = os.read(source, LARGEST)
            except BlockingIOError:
                continue
            now = time.monotonic()
            receiver, sender = frame[HEADER : HEADER + 6], frame[HEADER + 6 : HEADER + 12]
            ports[sender] = source
            known = ports.get(receiver)
            for device in [known] if known is not None else devices:
                if device == source:
                    continue
                if rate:
                    free[device] = max(free[device], now) + 8 * wire_bytes(frame) / rate
                due = (free[device] if rate else now) + latency
                heapq.heappush(late, (due, next(index), device, frame))
        now = time.monotonic()
        while late and late[0][0] <= now:
            _, _, device, frame = heapq.heappop(late)
            try:
                os.write(device, frame)
            except OSError:  # the device is not up
                continue


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGTERM)
    opened = open_devices(sys.argv[3:])
    print("ready", flush=True)
    forward(opened, float(sys.argv[1]), float(sys.argv[2]))
