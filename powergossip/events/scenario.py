"""Scenarios of the virtual clock: speeds, delays, lost messages, deaths and joins.

A scenario is a file in YAML. All keys are optional::

    seconds_per_step: 1.0              # of a worker with speed 1
    speeds: {3: 0.25}                  # worker → speed, 1 for the others
    jitter: 0.1                        # steps take e^(jitter · z) times as long, z standard normal
    latency: 0.01                      # seconds from sending a message to its arrival
    link_rate: 1.0e+9                  # bits per second; without it, size does not matter
    late: {fraction: 0.1, seconds: 4.0, ends: one}
    loss: {fraction: 0.01, ends: both}
    deaths: [{worker: 3, at: 20.0}]    # or {fraction: 0.25, from: 10.0, until: 50.0}
    detection: 0.5                     # seconds until its neighbors know that a worker is dead
    joins: [{worker: 3, at: 40.0}]     # a replacement, or a worker that is not there at the start

With `ends: one`, each of the two messages of an exchange is late or lost by itself. With `ends:
both`, the two are late or lost together. The fraction of all messages is the same with both. Where
a part is lost, its receiver skips the exchange.

Every draw depends on the seed, its purpose, the worker or edge, and a counter alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from powergossip import checks, reading
from powergossip.checks import BadValue
from powergossip.randomness import generator

ENDS = ("one", "both")
POLICIES = ("synchronous", "bounded", "asynchronous", "a2cid2")  # key gossip, see worker.Policy


@dataclass(frozen=True)
class Some:
    """Messages that are late, or lost.

    Attributes:
        fraction: Fraction of all messages.
        seconds: By how much they are late.
        ends: one, or both ends of an exchange.
    """

    fraction: float
    seconds: float
    ends: str


NONE = Some(0.0, 0.0, "both")


@dataclass(frozen=True)
class Happening:
    """The death or the join of a worker, at a time in virtual seconds."""

    worker: int
    at: float


@dataclass(frozen=True)
class Scenario:
    """A checked scenario for n_workers workers, see the module. `read` builds it."""

    n_workers: int
    seed: int
    seconds_per_step: float = 1.0
    speeds: Mapping[int, float] = field(default_factory=dict)
    jitter: float = 0.0
    latency: float = 0.0
    link_rate: float | None = None
    late: Some = NONE
    loss: Some = NONE
    deaths: Sequence[Happening] = ()
    detection: float = 0.0
    joins: Sequence[Happening] = ()

    @property
    def elastic(self) -> bool:
        """True if workers die or join."""
        return bool(self.deaths or self.joins)

    @property
    def absent(self) -> list[int]:
        """The workers that are not there at the start: they join before they die."""
        first = {j.worker: j.at for j in reversed(sorted(self.joins, key=lambda j: j.at))}
        died = {d.worker for d in self.deaths for at in [first.get(d.worker)] if at and d.at < at}
        return sorted(set(first) - died)

    def seconds(self, worker: int, step: int) -> float:
        """The length of a worker's step."""
        seconds = self.seconds_per_step / self.speeds.get(worker, 1.0)
        if self.jitter:
            draw = generator(self.seed, "step length", worker, step).standard_normal()
            seconds *= math.exp(self.jitter * draw)
        return seconds

    def delay(self, i: int, j: int, k: int, bits: int) -> float:
        """Seconds from i's sending of its part of exchange k to the arrival at j."""
        seconds = self.latency + (bits / self.link_rate if self.link_rate else 0.0)
        return seconds + self.late.seconds * self._is("late", self.late, i, j, k)

    def lost(self, i: int, j: int, k: int) -> bool:
        """True if i's part of exchange k is lost on its way to j."""
        return self._is("loss", self.loss, i, j, k)

    def _is(self, purpose: str, some: Some, i: int, j: int, k: int) -> bool:
        """True if i's part of exchange k for j is drawn."""
        if not some.fraction:
            return False
        ids = (i, j) if some.ends == "one" else (min(i, j), max(i, j))
        return bool(generator(self.seed, purpose, *ids, k).random() < some.fraction)


def load(path: str | Path) -> dict[str, Any]:
    """The contents of a scenario file. Raises BadValue unless it is a mapping in YAML."""
    try:
        found = reading.value(reading.text(Path(path)))
    except reading.Unreadable as error:
        raise BadValue("scenario", path, f"a file in YAML ({error})") from error
    if found is not None and not isinstance(found, Mapping):
        raise BadValue("scenario", path, "a file with keys and values")
    return dict(found or {})


class ExchangeKeys(Protocol):
    """The keys of a configuration that `resolve` reads."""

    gossip: str
    max_delay: int | None
    scenario: Any


def resolve(c: ExchangeKeys, n_processes: int, linked: bool) -> bool:
    """Replace a file in c.scenario by its contents, and give c.max_delay its value.

    Args:
        linked: True if processes can exchange by edges.

    Returns:
        True unless the keys have the values of synchronous steps without a scenario.

    Raises:
        ValueError: For bad values, and for several processes where one has to host all workers.
    """
    checks.one_of("gossip", c.gossip, POLICIES)
    if isinstance(c.scenario, str):
        c.scenario = load(c.scenario)
    if c.scenario is not None:
        c.scenario = _with_names(c.scenario)
    if c.gossip == "synchronous":
        checks.check("max_delay", c.max_delay, c.max_delay is None, "null with gossip=synchronous")
        if c.scenario is None:
            return False
    else:
        c.max_delay = 1 if c.max_delay is None else c.max_delay
        checks.not_negative("max_delay", c.max_delay)
    if n_processes > 1 and (c.scenario is not None or not linked):
        key = f"gossip={c.gossip}" if c.scenario is None else "scenario"
        how = "use one process, which hosts all workers on the virtual clock"
        if key != "scenario":
            how += ", or start several with mpirun"
        raise ValueError(f"{key}: {how}")
    return True


def _with_names(tree: Any) -> Any:
    """The same with strings for keys, as JSON has them."""
    if isinstance(tree, Mapping):
        return {str(key): _with_names(value) for key, value in tree.items()}
    is_list = isinstance(tree, Sequence) and not isinstance(tree, str)
    return [_with_names(value) for value in tree] if is_list else tree


def read(values: Mapping[str, Any], n_workers: int, seed: int) -> Scenario:
    """Build a scenario from the contents of a file. Raises BadValue, with a key of the file."""
    known = [name for name in Scenario.__dataclass_fields__ if name not in ("n_workers", "seed")]
    _check_keys("scenario", values, known)
    given = dict(values)
    for key in ("seconds_per_step", "link_rate"):
        if given.get(key) is not None:
            checks.positive(f"scenario.{key}", given[key])
    for key in ("jitter", "latency", "detection"):
        checks.between(f"scenario.{key}", given.get(key, 0.0), 0, 1e9)
    speeds = given.get("speeds") or {}
    if not isinstance(speeds, Mapping):
        raise BadValue("scenario.speeds", speeds, "a mapping of workers to speeds")
    for worker, speed in speeds.items():
        number = int(worker) if str(worker).isdigit() else worker
        _check_worker("scenario.speeds", number, n_workers)
        checks.positive(f"scenario.speeds.{worker}", speed)
    given["speeds"] = {int(worker): float(speed) for worker, speed in speeds.items()}
    given["late"] = _some("late", given.get("late") or {}, ("fraction", "seconds"), "one")
    given["loss"] = _some("loss", given.get("loss") or {}, ("fraction",), "both")
    given["deaths"] = _deaths(given.get("deaths") or [], n_workers, seed)
    given["joins"] = _happenings("joins", given.get("joins") or [], n_workers)
    scenario = Scenario(n_workers=n_workers, seed=seed, **given)
    _check_order(scenario)
    return scenario


def _some(key: str, values: Any, needed: Sequence[str], ends: str) -> Some:
    key = f"scenario.{key}"
    _check_keys(key, values, (*needed, "ends"))
    found = Some(**{"fraction": 0.0, "seconds": 0.0, "ends": ends, **values})
    checks.fraction(f"{key}.fraction", found.fraction)
    checks.between(f"{key}.seconds", found.seconds, 0, 1e9)
    checks.one_of(f"{key}.ends", found.ends, ENDS)
    if values and not set(needed) <= set(values):
        raise BadValue(key, dict(values), f"{' and '.join(needed)} with it")
    return found


def _deaths(values: Any, n_workers: int, seed: int) -> list[Happening]:
    """Those listed, or a fraction of the workers at random times."""
    if not isinstance(values, Mapping):
        return _happenings("deaths", values, n_workers)
    _check_keys("scenario.deaths", values, ("fraction", "from", "until"))
    fraction, first, last = (values.get(key, 0.0) for key in ("fraction", "from", "until"))
    checks.below_one("scenario.deaths.fraction", fraction)
    checks.between("scenario.deaths.from", first, 0, 1e12)
    checks.between("scenario.deaths.until", last, first, 1e12)
    draws = generator(seed, "deaths")
    workers = draws.permutation(n_workers)[: round(fraction * n_workers)]
    times = draws.uniform(first, last, len(workers))
    return [Happening(int(w), float(t)) for w, t in zip(workers, times, strict=True)]


def _happenings(key: str, values: Any, n_workers: int) -> list[Happening]:
    if isinstance(values, str | Mapping) or not isinstance(values, Sequence):
        raise BadValue(f"scenario.{key}", values, "a list of mappings with worker and at")
    found = []
    for entry in values:
        _check_keys(f"scenario.{key}", entry, ("worker", "at"))
        if len(entry) < 2:
            raise BadValue(f"scenario.{key}", dict(entry), "both worker and at")
        _check_worker(f"scenario.{key}", entry["worker"], n_workers)
        checks.between(f"scenario.{key}.at", entry["at"], 0, 1e12)
        found.append(Happening(**entry))
    return found


def _check_worker(key: str, worker: Any, n_workers: int) -> None:
    ok = isinstance(worker, int) and not isinstance(worker, bool) and 0 <= worker < n_workers
    checks.check(key, worker, ok, f"workers 0 to {n_workers - 1}")


def _check_keys(key: str, values: Any, known: Any) -> None:
    if not isinstance(values, Mapping):
        raise BadValue(key, values, f"a mapping with the keys {', '.join(known)}")
    for name in values:
        checks.check(key, name, name in known, f"the keys {', '.join(known)}")


def _check_order(scenario: Scenario) -> None:
    """Raise BadValue if a dead worker dies, a live one joins, or nobody survives."""
    absent = set(scenario.absent)
    alive = set(range(scenario.n_workers)) - absent
    changes = [(d.at, "deaths", d.worker) for d in scenario.deaths]
    changes += [(j.at, "joins", j.worker) for j in scenario.joins]
    for at, key, worker in sorted(changes):
        if (worker in alive) != (key == "deaths"):
            state = "alive" if key == "joins" else "not there"
            raise BadValue(f"scenario.{key}", worker, f"another time: at {at:g} it is {state}")
        alive ^= {worker}
        checks.check(f"scenario.{key}", worker, bool(alive), "fewer deaths: nobody is left")
