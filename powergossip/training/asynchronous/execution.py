"""Training by exchanges of edges, which may be late: the workers of a process."""

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from powergossip import checks
from powergossip.algorithms import rates
from powergossip.checks import BadValue
from powergossip.events import averaging, learning, order, scenario
from powergossip.events.members import Members, View, dead
from powergossip.events.order import read
from powergossip.events.replay import Replay
from powergossip.events.virtual_clock import VirtualClock
from powergossip.events.wall_clock import WallClock
from powergossip.events.worker import Policy, Worker
from powergossip.network import Losses, Network
from powergossip.network.resilient.messages import octets
from powergossip.network.resilient.workers import Links
from powergossip.parameters import Layout, Parameters
from powergossip.training.local_optimizers import LocalOptimizer
from powergossip.training.schedule import learning_rate
from powergossip.training.settings import errors_name_keys

ORDER = "order.jsonl"  # in the folder of a run
# See Gradients.of_worker
Gradient = Callable[[int, int, int, int, frozenset[int]], dict[str, Tensor]]


def event_driven(c: Any) -> bool:
    """Whether a configuration trains by exchanges of edges, and not by steps of all workers."""
    by_edges = c.scenario is not None or c.gossip != "synchronous" or survives(c)
    return by_edges and not one_way(c)


def survives(c: Any) -> bool:
    """Whether a run goes on without the processes that it loses."""
    return bool(c.on_worker_loss != "end")


def replaces(c: Any) -> bool:
    """Whether new processes take the place of those that a run loses."""
    return bool(c.on_worker_loss == "replace")


def one_way(c: Any) -> bool:
    """Whether the method's messages are no exchanges: then a scenario has losses only."""
    return bool(c.optimizer == "push-sum" or c.learning == "relay-sgd")


def losses_of(c: Any) -> Losses | None:
    """The lost messages of a method without exchanges. Raises BadValue for other scenarios."""
    if one_way(c) and survives(c):
        raise BadValue("on_worker_loss", c.on_worker_loss, f"end with {_name_of_one_way(c)}")
    if not one_way(c) or (c.scenario is None and c.gossip == "synchronous"):
        return None
    drawn = scenario.read(c.scenario or {}, c.n_workers, c.seed)
    method = _name_of_one_way(c)
    checks.check("gossip", c.gossip, c.gossip == "synchronous", f"synchronous with {method}")
    others = sorted(set(c.scenario) - {"loss"})
    checks.check("scenario", others, not others, f"loss alone with {method}")
    checks.check(
        "optimizer",
        c.optimizer,
        c.optimizer != "choco",
        "dpsgd with learning=relay-sgd where messages are lost; the copies of compressed messages "
        "would not agree again",
    )
    return Losses(drawn.lost, bool(c.get("optimizer_running_sums")))


def _name_of_one_way(c: Any) -> str:
    return "push-sum" if c.optimizer == "push-sum" else "relay-sgd"


def _order_of(process: int) -> str:
    return f"order-{process}.jsonl"


class EventTraining:
    """The workers of this process, whose exchanges with their neighbors may be late.

    config    # checked, as plain values
    options   # of the averaging rule
    gradient  # (worker, epoch, step in it, step, lost) → metrics; adds to parameters.grad
    links     # to other processes. None: all workers are in this process, on the virtual clock
    measure   # measure("communication") is the context in which they are waited for

    clock            # VirtualClock, Replay, or WallClock
    steps_per_epoch  # of each worker

    Every worker has its own count of steps, its own local optimizer, and the learning rate of its
    own progress. A worker that has taken more than the steps of num_epochs goes on in further
    epochs of its data. With data_of_lost=redistributed, an epoch has the samples of the workers
    that its worker knew to be lost when the epoch began. Raises ValueError for methods without an
    edge form.
    """

    def __init__(
        self,
        config: Any,
        options: Mapping[str, Any],
        network: Network,
        parameters: Parameters,
        gradient: Gradient,
        steps_per_epoch: int,
        links: Links | None = None,
        measure: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ):
        self._config, self._network, self._parameters = config, network, parameters
        self._gradient, self.steps_per_epoch = gradient, steps_per_epoch
        self._options = resolved(config, options, network)
        self._members = Members(network.topology)
        self._policy = Policy(config.gossip, delay_of(config))
        self._locals: dict[int, LocalOptimizer] = {}
        self._lost: dict[int, frozenset[int]] = {}  # in the present epoch of a worker
        self._exchanges: averaging.Exchanges | None = None
        self._sums: dict[str, list[list[float]]] = {}  # name → [worker] → sum and count
        self._last: dict[str, Tensor] = {}  # name → [worker]
        self._rows = {worker: row for row, worker in enumerate(network.workers)}
        drawn = scenario.read(config.scenario or {}, config.n_workers, config.seed)
        given = parameters.x, self._make_worker, self._compute
        self.clock: VirtualClock | Replay | WallClock
        if links is not None:
            together = config.gossip == "synchronous"
            self.clock = WallClock(links, *given[1:], together, survives(config), measure)
        elif drawn.replay is not None:
            self.clock = Replay(read(Path(drawn.replay)), steps_per_epoch, *given)
        else:
            self.clock = VirtualClock(drawn, *given, record=config.record_order)
        self._order_file: Path | None = None

    @property
    def present(self) -> list[int]:
        """The workers alive that this process hosts."""
        return self.clock.alive

    def record_order(self, folder: Path) -> None:
        """Write the order of events to this folder. To be called before the first step."""
        self._order_file = folder / ORDER
        self._order_file.unlink(missing_ok=True)
        if isinstance(self.clock, WallClock):
            own = self.clock.order_file = folder / _order_of(self.clock.links.process)
            own.unlink(missing_ok=True)

    def merge_order(self) -> None:
        """Merge the order of events that each process has written, in one of them."""
        if self._order_file is not None and isinstance(self.clock, WallClock):
            links = self.clock.links
            folder = self._order_file.parent
            files = [folder / _order_of(process) for process in range(links.n_ever)]
            if not self._order_file.exists():  # or else by a process that was lost
                parts = [order.read(file) for file in files if file.exists()]
                lost = set(links.homes) - set(self.everybody())
                order.write_whole(self._order_file, order.merged(parts, lost))
            for file in files:
                file.unlink(missing_ok=True)

    def everybody(self) -> list[int]:
        """The workers alive in all processes."""
        clock = self.clock
        return clock.everybody if isinstance(clock, WallClock) else clock.alive

    def run(self, steps: int) -> dict[str, Tensor]:
        """Train until the workers alive have taken that number of steps on average.

        Returns `take_sums` at the end of an epoch, and nothing before.
        """
        self.clock.run(steps)
        self._write_order()
        return self.take_sums() if steps % self.steps_per_epoch == 0 else {}

    def end_epoch(self, epoch: int) -> None:
        """Note the end of an epoch, after its evaluation, in the order of events."""
        self.clock.end_epoch(epoch)
        self._write_order()

    def _write_order(self) -> None:
        if self._order_file is not None and isinstance(self.clock, VirtualClock):
            order.write(self._order_file, self.clock.order)
            self.clock.order.clear()

    def run_linked(self, steps: int, asked: Callable[[], bool]) -> bool:
        """The same with links: see WallClock.run."""
        assert isinstance(self.clock, WallClock)
        return self.clock.run(steps, asked)

    def steps_between(self, first: int, end: int) -> int:
        """The steps of this process' workers after `first`, on average, fewer than to the end."""
        steps = [worker.steps for worker in self.clock.workers.values()]
        return max(0, min(sum(steps) // len(steps), end - 1) - first)

    # --- Replacements of lost workers ---

    def join(self, seconds: float) -> None:
        """Prepare a process that joins the others after this time. Then `begin_replacements`."""
        assert isinstance(self.clock, WallClock)
        self.clock.join(seconds)

    def begin_replacements(self, joined: Sequence[int]) -> dict[int, int]:
        """See WallClock.begin_replacements. Returns worker → steps."""
        assert isinstance(self.clock, WallClock)
        found = self.clock.begin_replacements(joined, self._members, self)
        processes = self._network.processes
        of_processes = processes.gather((found, self._present_means()))
        if found:  # metrics of a replacement that ends an epoch without a step
            means = next((means for _, means in of_processes if means), {})
            n = len(self._rows)
            self._last = {k: torch.full((n,), v, dtype=torch.float64) for k, v in means.items()}
        return {w: steps for of_process, _ in of_processes for w, steps in of_process.items()}

    def _present_means(self) -> dict[str, float]:
        """The means of metrics so far, over the steps of all workers of this process."""
        found = {name: float(values.mean()) for name, values in self._last.items()}
        for name, pairs in self._sums.items():
            found[name] = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
        return found

    def of(self, worker: int) -> Tensor:
        """A worker's model, for a message: parameters and buffers as bytes."""
        row, p = self._rows[worker], self._parameters
        return torch.cat([octets(p.x[row]), octets(p.buffers[row])])

    def begin(self, worker: int, received: Sequence[Tensor]) -> None:
        """Let a worker begin with the mean of models, as `of` returns them."""
        row, start = self._rows[worker], 0
        for own in (self._parameters.x[row], self._parameters.buffers[row]):
            end = start + own.numel() * own.element_size()
            values = [data[start:end].clone().view(own.dtype) for data in received]
            own.copy_(torch.stack(values).mean(0))
            start = end

    def take_sums(self) -> dict[str, Tensor]:
        """Count the bits, and return the metrics of an epoch, each [worker].

        They are the means of a worker's batches since the last call, times the steps of an epoch.
        A worker without a step in the meantime has those of the last epoch.
        """
        self._network.bits[:] = self.clock.bits
        self._network.messages[:] = self.clock.messages
        for name, pairs in self._sums.items():
            # A worker without a step has its last value, or at first the mean of the others.
            mean = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
            before = self._last[name].tolist() if name in self._last else [mean] * len(pairs)
            means = [
                total / count if count else last
                for (total, count), last in zip(pairs, before, strict=True)
            ]
            self._last[name] = torch.tensor(means, dtype=torch.float64)
        self._sums = {}
        return {
            name: (values * self.steps_per_epoch).to(self._network.device)
            for name, values in self._last.items()
        }

    def of_present(self, metrics: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Metrics [worker] of the hosted workers that are alive."""
        if isinstance(self.clock, WallClock):
            return metrics
        return {name: values[self.present] for name, values in metrics.items()}

    def _make_worker(self, index: int, view: View, steps: int) -> Worker:
        self._begin_epoch(index, view)
        row = _Row(self._parameters, self._rows[index])
        rule = self._make_rule(row, index)
        if self._exchanges is None:
            self._exchanges = averaging.make(self._config.optimizer, rule.layout, **self._options)
        return Worker(index, self._members, self._exchanges, rule, self._policy, view, steps)

    def _make_rule(self, row: "_Row", index: int) -> learning.EdgeRule:
        c, own = self._config, self._config.learning == "quasi-global-momentum"
        parameters: Any = row
        local = LocalOptimizer(parameters, c, *((0.0, "sgd") if own else (None, None)))
        self._locals[index] = local
        more: dict[str, Any] = {}
        if own:
            more = {"momentum": c.momentum, "nesterov": c.nesterov and c.momentum > 0}
        elif c.learning == "exact-diffusion":
            more = {"dual_rate": dual_rate_of(c)}
        return learning.RULES[c.learning](
            row,
            local,
            overlapping=c.overlapping,
            weight_decay=local.coupled_decay,
            clip=c.gradient_clipping,
            **more,
        )

    def _compute(self, worker: int, steps: int) -> None:
        """The gradient of a worker's next step, and the learning rate of its update."""
        epoch, step = divmod(steps, self.steps_per_epoch)
        if step == 0:
            self._begin_epoch(worker, self.clock.workers[worker].view)
        progress = epoch + (step + 1) / self.steps_per_epoch
        self._locals[worker].rate = learning_rate(self._config, progress)
        row = self._rows[worker]
        self._parameters.grad[row].zero_()
        n, lost = len(self._rows), self._lost[worker]
        for name, value in self._gradient(worker, epoch, step, steps, lost).items():
            pair = self._sums.setdefault(name, [[0.0, 0] for _ in range(n)])[row]
            pair[0] += float(value)
            pair[1] += 1

    def _begin_epoch(self, worker: int, view: View) -> None:
        redistributed = self._config.data_of_lost == "redistributed"
        self._lost[worker] = dead(view) if redistributed else frozenset()

    def state_dict(self) -> dict[str, Any]:
        """Everything but x, as the bytes of files: events uint8 [1, bytes], or [worker, bytes]."""
        if isinstance(self.clock, WallClock):
            return {"events": self._rows_of_bytes(self.clock.state_dict())}
        state = {
            "clock": self.clock.state_dict(),
            "workers": {index: self._state_of(index) for index in self.clock.workers},
            "sums": self._sums,
            "last": self._last,
        }
        return {"events": _bytes(state)[None]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`, after x."""
        if "begin" in state:
            self._begin_anew(state)
            return
        device, files = self._network.device, state["events"]
        if isinstance(self.clock, WallClock):
            found = {w: from_bytes(files[row], device) for w, row in self._rows.items()}
            self.clock.load_state_dict({w: of_worker["clock"] for w, of_worker in found.items()})
            for index, of_worker in found.items():
                self._load(index, of_worker["worker"])
            self._sums = _joined([of_worker["sums"] for of_worker in found.values()])
            return
        whole = from_bytes(files[0], device)
        self.clock.load_state_dict(whole["clock"])
        for index, of_worker in whole["workers"].items():
            self._load(index, of_worker)
        self._sums, self._last = whole["sums"], whole["last"]

    def _begin_anew(self, state: Mapping[str, Any]) -> None:
        """Begin with new edges after a number of steps, see asynchronous/resuming.py."""
        assert isinstance(self.clock, WallClock)
        self.clock.begin_at(state["begin"])
        self.clock.bits, self.clock.messages = state["bits"], state["messages"]
        for index in self._rows:
            if index in state["locals"]:
                self._locals[index].load_state_dict(state["locals"][index])

    def _state_of(self, index: int) -> dict[str, Any]:
        """The state of a worker's own optimizer, and of an update that is still to come."""
        local = self._locals[index]
        gradient = self._parameters.grad[self._rows[index]]
        return {
            "local": local.state_dict(),
            "lost": sorted(self._lost[index]),
            "rate": local.rate,
            "grad": gradient.clone(),
        }

    def _load(self, index: int, state: Mapping[str, Any]) -> None:
        self._locals[index].load_state_dict(state["local"])
        self._lost[index] = frozenset(state.get("lost", ()))
        self._locals[index].rate = state["rate"]
        self._parameters.grad[self._rows[index]] = state["grad"]

    def _rows_of_bytes(self, of_clock: Mapping[int, Any]) -> Tensor:
        """A row for each worker, padded to the longest of all processes."""
        files = []
        for index, row in self._rows.items():
            sums = {name: pairs[row] for name, pairs in self._sums.items()}
            state = {"clock": of_clock[index], "worker": self._state_of(index), "sums": sums}
            files.append(_bytes(state))
        longest = max(self._network.processes.gather(max(map(len, files))))
        padded = torch.zeros(len(files), longest, dtype=torch.uint8)
        for row, file in zip(padded, files, strict=True):
            row[: len(file)] = file
        return padded


def _bytes(state: Any) -> Tensor:
    """A state as the bytes of a file, after their number: uint8 [bytes]."""
    file = io.BytesIO()
    torch.save(state, file)
    length = len(file.getvalue()).to_bytes(8, "little")
    return torch.frombuffer(bytearray(length + file.getvalue()), dtype=torch.uint8)


def from_bytes(data: Tensor, device: torch.device) -> Any:
    """The state of `_bytes`, whatever follows it."""
    octets = data.cpu().numpy().tobytes()
    length = int.from_bytes(octets[:8], "little")
    file = io.BytesIO(octets[8 : 8 + length])
    return torch.load(file, map_location=device, weights_only=True)


def _joined(sums: Sequence[Mapping[str, list[float]]]) -> dict[str, list[list[float]]]:
    """Sums by worker as sums by name. A worker without a step has none."""
    names = {name for of_worker in sums for name in of_worker}
    return {name: [of_worker.get(name, [0.0, 0]) for of_worker in sums] for name in names}


class _Row:
    """The row of a worker in the flat buffers: x, grad [1, D]."""

    def __init__(self, parameters: Parameters, index: int):
        own = slice(index, index + 1)
        self.x, self.grad = parameters.x[own], parameters.grad[own]
        self.layout, self.decay_spans = parameters.layout, parameters.decay_spans


def delay_of(c: Any) -> int:
    """The delay of exchanges in steps that the duals of exact diffusion take into account.

    Averaging need not. An edge has one exchange at a time, so that its exchanges become rarer as
    they take longer, and averaging is as stable as without delays.
    """
    return 0 if c.gossip == "synchronous" else int(c.max_delay)


def dual_rate_of(c: Any) -> float:
    """The dual rate of exact diffusion: smaller by default where exchanges are late.

    Raises BadValue for a given one that is not above 0, or above 1.
    """
    given = c.learning_options.get("dual_rate")
    if given is None:
        by_default = getattr(averaging.EXCHANGES[c.optimizer], "dual_rate", 1.0)
        return float(by_default / (1 + 2 * delay_of(c)))
    ok = checks.is_finite(given) and 0 < given <= 1
    checks.check("learning_options.dual_rate", given, ok, "a number above 0, at most 1")
    return float(given)


def resolved(c: Any, options: Mapping[str, Any], network: Network) -> dict[str, Any]:
    """The options of an averaging rule in edge form."""
    found = dict(options)
    if c.optimizer != "choco":
        found["diffusion_rate"] = float(rates.checked(network, found["diffusion_rate"]))
    return found


def _given(c: Any) -> str:
    """The key that asks for exchanges by edges."""
    if c.scenario is not None:
        return "a scenario"
    return f"on_worker_loss={c.on_worker_loss}" if survives(c) else f"gossip={c.gossip}"


def check(c: Any, options: Mapping[str, Any], network: Network) -> None:
    """Raise ValueError for a method, topology or scenario without exchanges by edges."""
    scenario.read(c.scenario or {}, c.n_workers, c.seed)
    if c.optimizer not in averaging.EXCHANGES:
        raise BadValue(
            "optimizer",
            c.optimizer,
            f"{', '.join(averaging.EXCHANGES)} with {_given(c)}",
        )
    known = c.learning in learning.RULES
    if not known or (c.learning == "quasi-global-momentum" and c.local_optimizer != "sgd"):
        raise BadValue(
            "learning",
            c.learning,
            f"{', '.join(learning.RULES)} with {_given(c)} "
            "(quasi-global-momentum with local_optimizer=sgd)",
        )
    with errors_name_keys(c.optimizer):
        averaging.make(c.optimizer, Layout([(2, 2)]), **resolved(c, options, network))
    Members(network.topology)
    dual_rate_of(c)
