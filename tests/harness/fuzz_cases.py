"""Cases of the fuzz harness: a run of train.py, drawn from a seed, as a file in YAML.

A case has these keys:

    driver        # how it runs: see fuzz.DRIVERS
    train         # keys of train.py, with the contents of a scenario
    stop_after    # on the virtual clock: the step after which a signal stops the run
    processes     # in real processes: their number
    plan          # how they fail, and when killed machines are `back`, see tests/harness/failing.py
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import nn
from torch.utils.data import TensorDataset

from powergossip.algorithms import learning
from powergossip.algorithms.averaging import Kind
from powergossip.randomness import generator
from powergossip.tasks import Datasets

N_SAMPLES, N_FEATURES, N_LABELS = 73, 6, 4  # of the training data
N_MORE = 480  # samples of the training data in real processes


@dataclass(frozen=True)
class Case:
    """A run with a stop and a resume, see the module."""

    driver: str
    train: Mapping[str, Any]
    stop_after: int = 0
    processes: int = 1
    plan: Mapping[str, Any] = field(default_factory=dict)

    @property
    def due(self) -> list[int]:
        """The epochs that have an evaluation."""
        epochs, interval = self.train["num_epochs"], self.train["evaluation_interval"]
        return [e for e in range(1, epochs + 1) if e % interval == 0 or e == epochs]

    def write(self, file: Path) -> None:
        """Write the case to a file."""
        file.parent.mkdir(parents=True, exist_ok=True)
        given = {key: value for key, value in asdict(self).items() if value}
        file.write_text(yaml.safe_dump(given, sort_keys=False))


def read(file: Path) -> Case:
    """Read a case from a file."""
    return Case(**yaml.safe_load(file.read_text()))


class Fault(AssertionError):
    """An invariant that does not hold. The text names it."""


def require(holds: bool, invariant: str) -> None:
    if not holds:
        raise Fault(invariant)


def data(n_samples: int = N_SAMPLES) -> Datasets:
    """Few samples with four labels, and a small model with two matrices."""
    inputs = torch.randn(n_samples + 20, N_FEATURES, generator=torch.Generator().manual_seed(0))
    labels = (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()
    train, test = slice(0, n_samples), slice(n_samples, None)
    return Datasets(
        TensorDataset(inputs[train], labels[train]),
        TensorDataset(inputs[test], labels[test]),
        model=lambda: nn.Sequential(nn.Linear(N_FEATURES, 5), nn.Tanh(), nn.Linear(5, N_LABELS)),
    )


def more_data() -> Datasets:
    """The same with more samples."""
    return data(N_MORE)


class _Draws:
    """Random choices as plain values."""

    def __init__(self, seed: int):
        self.random = generator(seed, "fuzz")

    def one_of(self, *values: Any) -> Any:
        return values[int(self.random.integers(len(values)))]

    def chance(self, probability: float) -> bool:
        return bool(self.random.random() < probability)

    def number(self, low: float, high: float) -> float:
        return round(float(self.random.uniform(low, high)), 3)

    def integer(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return int(self.random.integers(low, high + 1))


def draw(seed: int, driver: str = "virtual") -> Case:
    """The case of a seed. A few are impossible, and rejected."""
    drawn = {"virtual": _virtual, "processes": _processes, "machines": _machines}
    return drawn[driver](_Draws(seed))


def _virtual(d: _Draws) -> Case:
    n, epochs, steps = d.integer(2, 9), d.integer(1, 4), d.integer(1, 4)
    values: dict[str, Any] = {
        "task": "tests.harness.fuzz_cases:data",
        "n_workers": n,
        "seed": d.integer(0, 999),
        "num_epochs": epochs,
        "max_steps_per_epoch": steps,
        "batch_size": d.integer(2, 4),
        "evaluation_interval": d.integer(1, 2),
        "log_verbosity": 0,
        "use_decentralized_data": d.chance(0.4),
        "reshuffle_data": d.chance(0.7),
        "data_of_lost": d.one_of("left", "redistributed"),
        "learning_rate": d.one_of(0.02, 0.1, 0.3),
        "weight_decay": d.one_of(0.0, 0.01),
        "gradient_clipping": d.one_of(None, 1.0),
        **_topology(d, n),
        **_method(d),
    }
    seconds = 1.3 * epochs * steps
    if values["optimizer"] == "push-sum" or values["learning"] == "relay-sgd":
        values["scenario"] = {"loss": _loss(d)}
        values["data_of_lost"] = "left"
    else:
        values.setdefault("gossip", d.one_of("synchronous", "bounded", "asynchronous"))
        if values["gossip"] == "bounded":
            values["max_delay"] = d.integer(0, 3)
        values["scenario"] = _scenario(d, n, seconds)
    return Case("virtual", values, d.integer(1, epochs * steps))


def _topology(d: _Draws, n: int) -> dict[str, Any]:
    names = ["ring", "chain", "star", "fully-connected", "binary-tree", "torus"]
    if n in (2, 4, 8):
        names.append("hypercube")
    if d.chance(0.03):
        names = ["exponential", "one-peer-exponential"]  # rejected
    return {"topology": d.one_of(*names)}


def _method(d: _Draws, of_exchanges: bool = False) -> dict[str, Any]:
    if d.chance(0.08) and not of_exchanges:
        one_way: dict[str, Any] = {
            "optimizer": "push-sum",
            "topology": "exponential",
            "learning": "dpsgd",
        }
        one_way["optimizer_running_sums"] = d.chance(0.5)
        relayed = {"optimizer": "dpsgd", "topology": "chain", "learning": "relay-sgd"}
        return d.one_of(one_way, relayed)
    if d.chance(0.1):
        accelerated = {"optimizer": "dpsgd", "learning": "dpsgd", "gossip": "a2cid2"}
        return accelerated | {"momentum": d.one_of(0.0, 0.9)}
    late = [name for name, kind in learning.LEARNING.items() if not kind.relays]
    values: dict[str, Any] = {
        "optimizer": d.one_of("dpsgd", "power-gossip", "choco"),
        "learning": d.one_of("dpsgd", *late),
        "momentum": d.one_of(0.0, 0.9),
        "local_optimizer": "adamw" if d.chance(0.2) else "sgd",
    }
    kind, known = learning.LEARNING[values["learning"]], learning.options(values["learning"])
    if not d.chance(0.05):  # others are rejected
        if not kind.kinds & {Kind.ANTISYMMETRIC}:
            values["optimizer"] = "choco"
        if not kind.kinds & {Kind.BIASED_COPIES} and values["optimizer"] == "choco":
            values["optimizer"] = "dpsgd"
    if kind.directs():
        values["local_optimizer"] = "sgd"
        values["momentum"] = 0.9 if "momentum" in known else 0.0
    if "local_steps" in known:
        values["local_steps"] = d.integer(1, 3)
    if "gradient_correction" in known:
        values["learning_options"] = {"gradient_correction": d.chance(0.5)}
    elif "overlapping" in known:
        values["overlapping"] = d.one_of(None, True, False)
    if values["optimizer"] == "power-gossip":
        values |= {
            "optimizer_rank": d.integer(1, 2),
            "optimizer_num_iterations": d.integer(1, 3),
            "optimizer_warm_start": d.chance(0.8),
        }
    if values["optimizer"] == "choco":
        values["optimizer_compressor"] = d.one_of(
            "top-k", "random-k", "sign-and-norm", "qsgd", "random-block"
        )
        values["optimizer_diffusion_rate"] = d.one_of(0.1, 0.3)
        values["optimizer_copy_rate"] = d.one_of(None, None, 0.5)
    return values


def _scenario(d: _Draws, n: int, seconds: float) -> dict[str, Any]:
    values: dict[str, Any] = {}
    grid = d.chance(0.4)  # many events at the same time

    def time(low: float, high: float) -> float:
        drawn = d.number(low, high)
        return round(2 * drawn) / 2 if grid else drawn

    if d.chance(0.5):
        chosen = [w for w in range(n) if d.chance(0.3)]
        values["speeds"] = {w: d.one_of(0.2, 0.5, 2.0) for w in chosen}
    if d.chance(0.4):
        values["jitter"] = d.number(0.0, 0.6)
    if d.chance(0.4):
        values["latency"] = time(0.0, 2.0)
    if d.chance(0.2):
        values["link_rate"] = d.one_of(1e3, 1e5)
    if d.chance(0.4):
        values["late"] = {
            "fraction": d.number(0.0, 0.6),
            "seconds": time(0.0, 4.0),
            "ends": d.one_of("one", "both"),
        }
    if d.chance(0.3):
        values["loss"] = _loss(d)
    if d.chance(0.6):
        values |= _churn(d, n, seconds, time)
    return values


def _loss(d: _Draws) -> dict[str, Any]:
    return {"fraction": d.number(0.0, 0.4), "ends": d.one_of("one", "both")}


def _churn(d: _Draws, n: int, seconds: float, time: Any) -> dict[str, Any]:
    """Deaths and joins. One worker is always there, or in few cases nobody is left."""
    found: dict[str, Any] = {"deaths": [], "joins": []}
    if d.chance(0.8):
        found["detection"] = time(0.0, 3.0)
    stays = -1 if d.chance(0.02) else d.integer(0, n - 1)
    for worker in range(n):
        if worker == stays:
            continue
        key, at = d.one_of("deaths", "deaths", "joins"), 0.0
        while d.chance(0.4):
            at = time(at + 0.5, max(at + 0.5, seconds))
            found[key].append({"worker": worker, "at": at})
            key = "joins" if key == "deaths" else "deaths"
    order: np.ndarray = d.random.permutation(len(found["deaths"]))
    found["deaths"] = [found["deaths"][index] for index in order]
    return found


# --- Real processes ---

ERRORS = ("ERROR", "EXIT")  # ends of a process that are no signals
_TIMEOUTS = (2.5, 20.0)  # values of worker_timeout, in seconds


def _processes(d: _Draws) -> Case:
    size, hosted = d.one_of(2, 3, 3, 4, 4, 5, 6), d.one_of(1, 1, 1, 2)
    n, epochs, batch = size * hosted, d.integer(2, 4), d.integer(2, 8)
    steps = min(d.integer(3, 12), N_MORE // (n * batch))
    survives = d.chance(0.88)
    values: dict[str, Any] = {
        "task": "tests.harness.fuzz_cases:more_data",
        "n_workers": n,
        "seed": d.integer(0, 999),
        "num_epochs": epochs,
        "max_steps_per_epoch": steps,
        "batch_size": batch,
        "evaluation_interval": d.integer(1, 2),
        "checkpoint_interval": d.integer(1, 2),
        "use_decentralized_data": d.chance(0.4),
        "reshuffle_data": d.chance(0.7),
        "learning_rate": d.one_of(0.02, 0.1),
        "batched_gradients": "off",
        "gossip": d.one_of("synchronous", "synchronous", "bounded", "asynchronous"),
        **_topology(d, n),
        **_method(d, of_exchanges=True),
    }
    if values["gossip"] == "bounded":
        values["max_delay"] = d.integer(0, 3)
    if survives:
        values["on_worker_loss"] = "continue"
        values["worker_timeout"] = d.one_of(*_TIMEOUTS)
        values["data_of_lost"] = d.one_of("left", "redistributed")
    plan: dict[str, Any] = {"events": _failures(d, size, epochs * steps, epochs, values)}
    if d.chance(0.8):
        plan["report"] = False  # it takes longer than the rest
    if d.chance(0.4):
        plan["pace"] = {str(p): d.number(0.0, 0.03) for p in range(size) if d.chance(0.5)}
    if d.chance(0.12):
        plan["files"] = {str(d.integer(0, size - 1)): 1000 * d.integer(1, 40)}
    if d.chance(0.2):
        plan = _publishing(d, values, size)
    return Case("processes", values, processes=size, plan=plan)


_CALLS = 60  # moments of process 0 while a checkpoint is saved, at least


def _publishing(d: _Draws, values: dict[str, Any], size: int) -> dict[str, Any]:
    """Processes end or stop at system calls while they save a checkpoint."""
    values |= {"on_worker_loss": "continue", "worker_timeout": _TIMEOUTS[0]}
    values["checkpoint_interval"] = 1
    most = values["num_epochs"] * _CALLS - 1
    events: list[dict[str, Any]] = []
    for process in range(d.integer(1, size - 1)):
        event = {"process": process, "point": "call", "count": d.integer(0, most)}
        if d.chance(0.5):
            events.append(event | {"signal": "SIGKILL"})
        else:
            seconds = d.one_of(0.5, _TIMEOUTS[0] + d.number(1.0, 2.0))
            events.append(event | {"signal": "SIGSTOP", "seconds": seconds})
    # The others are still training when a process that was stopped returns.
    steps = values["num_epochs"] * values["max_steps_per_epoch"]
    pace = {str(process): round(8 / steps, 3) for process in range(size)}
    return {"events": events, "report": False, "pace": pace}


def _failures(
    d: _Draws, size: int, steps: int, epochs: int, values: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Events of tests/harness/failing.py, of which at least one process survives."""

    def moment(process: int, signal: str) -> dict[str, Any]:
        count = {
            "step": d.one_of(d.integer(0, steps - 1), d.integer(0, steps - 1), steps - 1),
            "message": d.integer(0, 6 * steps),
            "evaluate": d.integer(1, epochs),
            "save": d.integer(1, epochs),
            "publish": d.integer(1, epochs),
            "row": d.integer(1, 8 * epochs),
            "begin": 0,
            "load": 1,
            "made": 0,
            "end": 1,
            "figure": 1,
        }
        points = ["step"] * 6 + ["message"] * 4 + ["evaluate", "save", "save", "publish", "row"]
        points += ["load", "made", "end", "figure"]
        points += ["begin"] if d.chance(0.3) else []
        point = d.one_of(*points)
        after = d.number(0.001, 0.05) if d.chance(0.3) and signal not in ERRORS else 0.0
        event = {"process": process, "point": point, "count": count[point]}
        return event | {"after": after, "signal": signal}

    order = [int(process) for process in d.random.permutation(size)]
    if d.chance(0.3):
        order.sort()  # process 0 first
    kills = min(size - 1, d.one_of(0, 0, 1, 1, 1, 2, 2, 4))
    ends = ("SIGKILL", *(ERRORS if values.get("on_worker_loss", "end") != "end" else ()))
    found = [moment(process, d.one_of(*ends)) for process in order[:kills]]
    if d.chance(0.25):
        timeout = values.get("worker_timeout", 20.0)
        seconds = timeout + d.number(1.0, 2.0) if timeout < 5 and d.chance(0.5) else None
        seconds = seconds or d.number(0.1, 1.5)
        found.append(moment(order[-1], "SIGSTOP") | {"seconds": seconds})
    if d.chance(0.3):  # longer than most timeouts
        event = moment(d.one_of(*order), "SLOW")
        point = d.one_of("load", "step", "evaluate", "save", "end", "figure")
        found.append(event | {"point": point, "count": 1, "after": 0.0, "seconds": d.number(2, 5)})
    if d.chance(0.25):
        event = {"process": d.one_of(*order), "point": "step", "count": d.integer(0, steps - 1)}
        event |= {"after": d.one_of(0.0, 0.002, 0.02), "launcher": d.chance(0.4)}
        found.append(event | {"signal": d.one_of("SIGTERM", "SIGTERM", "SIGINT", "SIGUSR1")})
        if d.chance(0.5):  # while the checkpoint of this signal is written
            before = event["count"] * epochs // steps // values["checkpoint_interval"]
            at_save = {"process": order[0], "point": "save", "count": before + 1}
            found.append(at_save | {"signal": "SIGKILL"})
    return found


# --- Machines that meet with a ticket ---


def _machines(d: _Draws) -> Case:
    size, epochs = d.one_of(2, 3, 3), d.integer(2, 4)
    steps = d.integer(3, 8)
    values: dict[str, Any] = {
        "task": "tests.harness.fuzz_cases:more_data",
        "n_workers": size,
        "seed": d.integer(0, 999),
        "num_epochs": epochs,
        "max_steps_per_epoch": steps,
        "batch_size": d.integer(2, 8),
        "evaluation_interval": d.integer(1, 2),
        "checkpoint_interval": 1,
        "batched_gradients": "off",
        "gossip": d.one_of("synchronous", "synchronous", "bounded", "asynchronous"),
        "on_worker_loss": d.one_of("continue", "continue", "end"),
        "topology": d.one_of("ring", "chain", "star", "fully-connected"),
        **_method(d, of_exchanges=True),
    }
    if values["on_worker_loss"] == "continue":
        values["worker_timeout"] = d.one_of(5.0, 20.0)
    events = []
    for process in (
        int(p) for p in d.random.permutation(size)[: d.one_of(0, 1, 1, 1, 1, size - 1)]
    ):
        point = d.one_of("step", "step", "step", "message", "evaluate", "save", "load", "end")
        count = {"step": steps * epochs - 1, "message": 6 * steps, "evaluate": epochs}
        event = {"process": process, "point": point, "count": d.integer(1, count.get(point, 1))}
        if d.chance(0.75):
            event["signal"] = "SIGKILL"
            if d.chance(0.6):
                event["back"] = d.number(0.0, 3.0)
        else:
            event |= {"signal": "SIGSTOP", "seconds": d.one_of(0.5, 2.0, 7.0)}
        events.append(event)
    pace = {str(process): d.one_of(0.0, 0.1, 0.3) for process in range(size)}
    return Case(
        "machines", values, processes=size, plan={"events": events, "pace": pace, "report": False}
    )
