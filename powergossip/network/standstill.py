"""A line on the standard error while a process waits long for another one."""

import sys
import threading
import time
from collections.abc import Iterable

from powergossip.formatting import listed

INTERVAL = 30.0  # seconds until the first line. Each further one takes twice as long

_now: "waiting | None" = None
watcher: threading.Thread | None = None  # looks now and then whether the wait is the same


class waiting:
    """A block where process `own` waits for messages of others, or for what `text` says."""

    def __init__(self, own: int, others: Iterable[int], text: str = ""):
        self.own, self.others, self.text = own, others, text

    def __enter__(self) -> None:
        global _now, watcher
        _now = self
        if watcher is None:
            watcher = threading.Thread(target=_watch, daemon=True)
            watcher.start()

    def __exit__(self, *_: object) -> None:
        global _now
        _now = None


def _watch() -> None:
    seen: waiting | None = None
    since, due = 0.0, INTERVAL
    while True:
        time.sleep(INTERVAL / 10)
        now, seconds = _now, time.monotonic() - since
        if now is None or now is not seen:
            seen, since, due = now, time.monotonic(), INTERVAL
        elif seconds >= due:
            due *= 2
            words = listed(sorted(set(now.others) - {now.own}))
            text = now.text or f"no message from process {words} for {{seconds}} s"
            line = f"process {now.own}: {text.replace('{seconds}', str(round(seconds)))}"
            print(line, file=sys.stderr, flush=True)
