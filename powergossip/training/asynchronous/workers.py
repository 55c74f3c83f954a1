"""The workers of this process, whose exchanges with their neighbors may be late."""

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from powergossip.algorithms import learning
from powergossip.algorithms.difference_code import DifferenceCode
from powergossip.events import averaging
from powergossip.events.members import Members, View, dead
from powergossip.events.worker import Policy, Worker
from powergossip.parameters import Layout, Parameters
from powergossip.training.late_message_checks import delay_of, late_options, resolved
from powergossip.training.local_optimizers import LocalOptimizer
from powergossip.training.methods import learning_rule, local_optimizer
from powergossip.training.schedule import learning_rate
from powergossip.training.stepping import Computation


class EdgeWorkers:
    """The workers of this process, for a clock that lets them live.

    Every worker has its own step count and local optimizer, and the learning rate that belongs to
    its progress. A worker that has taken more than the steps of num_epochs goes on in further
    epochs of its data. With data_of_lost=redistributed, an epoch has the samples of the workers
    that its worker knew to be lost when the epoch began.

    Args:
        options: Options of the averaging rule.

    Attributes:
        members: Members of the topology.
        rows: Row of the parameters of each worker.
        sums: Name → [worker] → sum and count of the metrics since `take_sums`.
        last: Name → [worker], the metrics of the last epoch.

    Raises:
        ValueError: For methods without an edge form.
    """

    def __init__(self, run: Computation, options: Mapping[str, Any]):
        config, network = self._config, self._network = run.config, run.network
        self._parameters, self._gradient = run.parameters, run.gradients.of_worker
        self.steps_per_epoch = run.steps_per_epoch
        self._options = resolved(config, options, network)
        self.members = Members(network.topology)
        self._policy = Policy(config.gossip, delay_of(config))
        self._made: dict[int, Worker] = {}  # the latest of each index
        self._locals: dict[int, LocalOptimizer] = {}
        self._lost: dict[int, frozenset[int]] = {}  # in the present epoch of a worker
        self._exchanges: averaging.Exchanges | None = None
        self.sums: dict[str, list[list[float]]] = {}
        self.last: dict[str, Tensor] = {}
        self.rows = {worker: row for row, worker in enumerate(network.workers)}

    # --- For a clock ---

    def make(self, index: int, view: View, steps: int) -> Worker:
        """A worker that begins after a number of steps, see events.clock.Make."""
        self._begin_epoch(index, view)
        rule = self._make_rule(index, steps)
        assert self._exchanges is not None
        made = Worker(index, self.members, self._exchanges, rule, self._policy, view, steps)
        self._made[index] = made
        return made

    def compute(self, worker: int, steps: int) -> None:
        """The gradient of a worker's next step, and the learning rate of its update.

        See events.clock.Compute.
        """
        epoch, step = divmod(steps, self.steps_per_epoch)
        if step == 0:
            self._begin_epoch(worker, self._made[worker].view)
        progress = epoch + (step + 1) / self.steps_per_epoch
        self._locals[worker].rate = learning_rate(self._config, progress)
        row = self.rows[worker]
        self._parameters.grad[row].zero_()
        n, lost = len(self.rows), self._lost[worker]
        for name, value in self._gradient(worker, epoch, step, steps, lost).items():
            pair = self.sums.setdefault(name, [[0.0, 0] for _ in range(n)])[row]
            pair[0] += float(value)
            pair[1] += 1

    def _make_rule(self, index: int, steps: int) -> learning.GossipRule:
        c = self._config
        row: Any = _Row(self._parameters, self.rows[index])
        accelerated = learning.POLICIES.get(c.gossip)
        local = self._locals[index] = local_optimizer(c, row)
        workers = learning.Workers(
            self._network, self._averaging, row, local, local.coupled_decay, c.gradient_clipping
        )
        if accelerated is not None:
            rate = self._options["diffusion_rate"]
            constants = learning.acceleration(self._network.topology, rate, delay_of(c))
            return accelerated(workers, acceleration=constants)
        rule = learning_rule(c, workers, **late_options(c))
        rule.begin_after(steps)
        return rule

    def _averaging(self, layout: Layout) -> averaging.Exchanges:
        if self._exchanges is None:
            processes = self._network.processes
            self._exchanges = averaging.make(
                self._config.optimizer, layout, processes, **self._options
            )
        return self._exchanges

    def _begin_epoch(self, worker: int, view: View) -> None:
        redistributed = self._config.data_of_lost == "redistributed"
        self._lost[worker] = dead(view) if redistributed else frozenset()

    # --- Metrics ---

    def take_sums(self) -> dict[str, Tensor]:
        """The metrics of an epoch, each [worker].

        They are the means of a worker's batches since the last call, times the steps of an epoch.
        A worker without a step in the meantime keeps its means of the last epoch.
        """
        self.last |= self.means()
        self.sums = {}
        return {
            name: (values * self.steps_per_epoch).to(self._network.device)
            for name, values in self.last.items()
        }

    def means(self) -> dict[str, Tensor]:
        """The means of the batches since `take_sums`, each [worker]."""
        found = {}
        for name, pairs in self.sums.items():
            # A worker without a step has its last value, or at first the mean of the others.
            mean = sum(total for total, _ in pairs) / max(1, sum(count for _, count in pairs))
            before = self.last[name].tolist() if name in self.last else [mean] * len(pairs)
            means = [
                total / count if count else last
                for (total, count), last in zip(pairs, before, strict=True)
            ]
            found[name] = torch.tensor(means, dtype=torch.float64)
        return found

    def begin_with(self, metrics: Mapping[str, float]) -> None:
        """The metrics of other workers, until these have taken a step."""
        n = len(self.rows)
        self.sums = {name: [[0.0, 0] for _ in range(n)] for name in metrics}
        self.last = {name: torch.full((n,), mean) for name, mean in metrics.items()}

    @property
    def codes(self) -> list[DifferenceCode]:
        """The codes of messages of few bits, which all edges of this process share."""
        common = self._exchanges.common if self._exchanges else {}
        gossip, _ = common.get("power", (None, None))
        return [code for codes in getattr(gossip, "codes", ()) for code in codes]

    # --- State ---

    def state_of(self, index: int) -> dict[str, Any]:
        """The state of a worker's own optimizer, and of an update that is still to come."""
        local = self._locals[index]
        gradient = self._parameters.grad[self.rows[index]]
        return {
            "local": local.state_dict(),
            "lost": sorted(self._lost[index]),
            "rate": local.rate,
            "grad": gradient.clone(),
        }

    def load(self, index: int, state: Mapping[str, Any]) -> None:
        self._locals[index].load_state_dict(state["local"])
        self._lost[index] = frozenset(state.get("lost", ()))
        self._locals[index].rate = state["rate"]
        self._parameters.grad[self.rows[index]] = state["grad"]

    def load_local(self, index: int, state: Mapping[str, Any]) -> None:
        """Restore the local optimizer of a worker alone."""
        self._locals[index].load_state_dict(state)


def as_bytes(state: Any) -> Tensor:
    """A state as the bytes of a file, after their number: uint8 [bytes]."""
    file = io.BytesIO()
    torch.save(state, file)
    length = len(file.getvalue()).to_bytes(8, "little")
    return torch.frombuffer(bytearray(length + file.getvalue()), dtype=torch.uint8)


def from_bytes(data: Tensor, device: torch.device) -> Any:
    """The state of `as_bytes`, whatever follows it."""
    octets = data.cpu().numpy().tobytes()
    length = int.from_bytes(octets[:8], "little")
    file = io.BytesIO(octets[8 : 8 + length])
    return torch.load(file, map_location=device, weights_only=True)


class _Row:
    """The row of a worker in the flat buffers: x, grad [1, D]."""

    def __init__(self, parameters: Parameters, index: int):
        own = slice(index, index + 1)
        self.x, self.grad = parameters.x[own], parameters.grad[own]
        self.layout, self.decay_spans = parameters.layout, parameters.decay_spans
        self.names, self.models = parameters.names, parameters.models
