"""A machine of a run across the internet that tests attack. It answers lines of its input."""

import json
import os
import sys

from powergossip.errors import PeerLost
from powergossip.network.internet import node as nodes

SECRET, KEY = b"s" * 32, b"k" * 32
LONGEST = 100  # bytes of a message


def memory() -> float:
    """Megabytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    nodes.HANDSHAKE, nodes.QUIET = 3.0, 0.0
    node = nodes.Node(SECRET, KEY, 0)
    print(json.dumps([node.port, node.key.hex()]), flush=True)
    for line in sys.stdin:
        name, *words = line.split()
        answer: object = None
        if name == "memory":
            answer = [
                memory(),
                len(os.listdir("/proc/self/task")),
                len(os.listdir("/proc/self/fd")),
            ]
        else:  # send back a message of this machine and tag
            key, tag = bytes.fromhex(words[0]), int(words[1])
            try:
                link = node.wait(node.link(key))
                octets = node.wait(link.receive_any(tag, LONGEST), 20)
                node.wait(link.send(tag, octets), 20)
                answer = octets.hex()
            except (PeerLost, TimeoutError) as error:
                answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
