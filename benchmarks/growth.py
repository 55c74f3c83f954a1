"""How the cost of a step grows: with workers, parameters, degree and processes.

    python -m benchmarks.growth                          all tables
    python -m benchmarks.growth what=[workers,degree]    some of them
    python -m benchmarks.growth quick=true               small sizes, a few seconds
    python -m benchmarks.growth output=docs/figures      also FOLDER/growth-NAME.svg and growth.json

    workers      a step of averaging, a 100 × 100 matrix, 8 … 100,000 workers in one process
    learning     a step of training, the MLP on 8 × 8 images, 8 … 4096 workers in one process
    parameters   a step of averaging, 8 workers in one process, 10⁴ … 10⁸ parameters in all of them
    degree       a step of averaging, 64 workers in one process, ring … fully connected
    processes    a step of averaging, ResNet-20, 1 … 16 processes, one worker each

Each table has milliseconds of a step, and the slope: the exponent p of ms ∝ sizeᵖ by a fit of
logarithms to the upper half of the sizes. In one process the work is proportional to each of the
sizes, so that 1 is expected. On C cores, P processes with a worker each have P/C times the work of
one, and a slope of 1 for P > C.

The memory of a worker is the growth of the resident set of a process that makes the steps, divided
by the workers. Beside it is the theory: the parameters, the state of the method, and the messages
that a worker receives, and sends unless they are its parameters, in bytes.
"""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks import steps
from benchmarks.timing import in_turns, peak_memory
from powergossip import algorithms, checks, prediction, topologies
from powergossip.formatting import plain
from powergossip.network import Network, processes
from powergossip.network.rows import Shared
from powergossip.parameters import Layout
from powergossip.runs import configuration, figures
from powergossip.tasks import TaskOptions, digits
from powergossip.tasks.images import ImageClassification, LabeledImages
from powergossip.topologies import Topology

KINDS = ("workers", "learning", "parameters", "degree", "processes")
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "PowerGossip": ("power-gossip", {}),
    "D-PSGD": ("dpsgd", {}),
    "CHOCO, sign": ("choco", {"compressor": "sign-and-norm"}),
}
SIZES: dict[str, Sequence[int]] = {
    "workers": [8 * 4**k for k in range(6)] + [16_384, 100_000],
    "learning": [8, 32, 128, 512, 1024, 4096],
    "parameters": [10**4, 10**5, 10**6, 10**7, 10**8],
    "degree": [2, 4, 8, 16, 32, 63],
    "processes": [1, 2, 4, 8, 16],
}
QUICK: dict[str, Sequence[int]] = {
    "workers": [8, 16],
    "learning": [2, 4],
    "parameters": [10**3, 10**4],
    "degree": [2, 4],
    "processes": [1],
}
ROUNDS = 5  # of measurements of a step
WORKERS = 8  # of the table of parameters
NODES = 64  # workers of the table of degrees, and of those whose state is counted
SIDE = 100  # of the matrix


@dataclass
class Growth:
    what: list[str] = field(default_factory=lambda: list(KINDS))  # the tables
    quick: bool = False  # small sizes
    seconds: float = 2.0  # of the steps of a line, approximately
    output: str | None = None  # folder for figures and growth.json


config = OmegaConf.structured(Growth)


@dataclass(frozen=True)
class Line:
    """Bytes of a worker, NaN where they are not measured."""

    algorithm: str
    size: int
    ms: float
    bytes: float = math.nan
    theory: float = math.nan


def main(arguments: list[str]) -> None:
    """Measure and print the tables."""
    configuration.read_command_line(config, arguments, __doc__ or "")
    for kind in config.what:
        checks.one_of("what", kind, KINDS)
    found: dict[str, list[Line]] = {}
    for kind in config.what:
        sizes = (QUICK if config.quick else SIZES)[kind]
        found[kind] = [line for size in sizes for line in MEASURES[kind](size, config.seconds)]
        print(f"{kind}\n\n{table(kind, found[kind])}\n", flush=True)
    if config.output is not None:
        write(found, Path(config.output))


def table(kind: str, lines: Sequence[Line]) -> str:
    """The lines of one kind as plain text, with the slope of each algorithm at its last size."""
    header = ["algorithm", _axis(kind), "ms a step", "slope", "bytes a worker", "theory"]
    rows = []
    for name in dict.fromkeys(line.algorithm for line in lines):
        own = [line for line in lines if line.algorithm == name]
        for line in own:
            last = line is own[-1] and len(own) > 1
            rows.append(
                [
                    name,
                    f"{line.size:,}",
                    f"{line.ms:.4g}",
                    f"{slope(own):.2f}" if last else "",
                    "" if math.isnan(line.bytes) else f"{line.bytes:,.0f}",
                    "" if math.isnan(line.theory) else f"{line.theory:,.0f}",
                ]
            )
    return plain([header, *rows])


def _axis(kind: str) -> str:
    return "workers" if kind == "learning" else kind


def slope(lines: Sequence[Line]) -> float:
    """p of ms ∝ sizeᵖ: least squares of logarithms over the upper half of the sizes."""
    upper = lines[(len(lines) - 1) // 2 :]
    xs, ys = [math.log(line.size) for line in upper], [math.log(line.ms) for line in upper]
    return linear_regression(xs, ys).slope


def write(found: dict[str, list[Line]], folder: Path) -> None:
    """A figure of each kind, and all lines in growth.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, lines in found.items():
        names = dict.fromkeys(line.algorithm for line in lines)
        panel = {
            name: (
                [float(line.size) for line in lines if line.algorithm == name],
                [line.ms for line in lines if line.algorithm == name],
            )
            for name in names
        }
        path = folder / f"growth-{kind}.svg"
        figures.curves({"": panel}, path, _axis(kind), "ms a step", log_x=True, log_y=True)
    content = {kind: [asdict(line) for line in lines] for kind, lines in found.items()}
    (folder / "growth.json").write_text(json.dumps(content, indent=1) + "\n")


# --- The measurements ----------------------------------------------------------------------------


def of_workers(n: int, seconds: float) -> list[Line]:
    return _in_new_processes("ring", n, [(SIDE, SIDE)], n, seconds)


def of_parameters(total: int, seconds: float) -> list[Line]:
    shapes = prediction.of_size(total // WORKERS)
    return _in_new_processes("ring", WORKERS, shapes, total, seconds)


def of_degree(degree: int, seconds: float) -> list[Line]:
    name = {2: "ring", NODES - 1: "fully-connected"}.get(degree, f"random-regular {degree}")
    return _in_new_processes(name, NODES, [(SIDE, SIDE)], degree, seconds)


def of_learning(n: int, seconds: float) -> list[Line]:
    """A step of training, of D-PSGD and of PowerGossip."""
    import train
    from powergossip.training.config_checks import checked
    from powergossip.training.trainer import Trainer

    lines = []
    for name in ("PowerGossip", "D-PSGD"):
        keys = [f"n_workers={n}", "task=benchmarks.growth:enough_digits", "batch_size=1",
                "task_architecture=MLP", "batched_gradients=on",
                f"optimizer={ALGORITHMS[name][0]}"]  # fmt: skip
        settings = OmegaConf.structured(train.Config)
        configuration.read_command_line(settings, keys, "")
        trainer = Trainer(checked(settings, processes()), processes())
        count = 0

        def step(trainer: Trainer = trainer) -> None:
            nonlocal count
            trainer.execution.rule.start()
            trainer.execution.gradient(0, count % trainer.steps_per_epoch)
            trainer.execution.rule.finish()
            count += 1

        lines.append(Line(name, n, _milliseconds(step, seconds)))
        trainer.close()
    return lines


def enough_digits(options: TaskOptions) -> ImageClassification:
    """The task Digits with each training image three times, for 4311 workers at most."""
    train, test = digits.load()
    images, labels = train.images.repeat(3, 1, 1, 1), train.labels.repeat(3)
    return ImageClassification(LabeledImages(images, labels), test, n_labels=10, options=options)


def of_processes(n: int, seconds: float) -> list[Line]:
    lines = []
    for name, (algorithm, options) in ALGORITHMS.items():
        given = " ".join(f"options.{key}={value}" for key, value in options.items())
        arguments = f"algorithm={algorithm} model=resnet20 seconds={seconds} {given}"
        launcher = ["mpirun", "-np", str(n), "--map-by", ":oversubscribe"] if n > 1 else []
        lines.append(
            Line(name, n, steps.measured("gossip_step", arguments, launcher)["ms_per_step"])
        )
    return lines


MEASURES: dict[str, Callable[[int, float], list[Line]]] = {
    "workers": of_workers,
    "learning": of_learning,
    "parameters": of_parameters,
    "degree": of_degree,
    "processes": of_processes,
}


def _in_new_processes(
    topology: str, n: int, shapes: Sequence[tuple[int, ...]], size: int, seconds: float
) -> list[Line]:
    """A line for each algorithm, each in its own process, whose memory is new."""
    lines = []
    for name in ALGORITHMS:
        task = json.dumps([name, topology, n, list(shapes), size, seconds])
        command = [sys.executable, "-m", "benchmarks.growth", "--one", task]
        ended = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, cwd=steps.ROOT, check=True
        )
        lines.append(Line(**json.loads(ended.stdout.splitlines()[-1])))
    return lines


def one(
    name: str, topology: str, n: int, shapes: list[list[int]], size: int, seconds: float
) -> Line:
    """Measure averaging in this process."""
    kind, _, degree = topology.partition(" ")
    graph = topologies.make(kind, n, options={"degree": int(degree)} if degree else None)
    layout = Layout(tuple(shape) for shape in shapes)
    _averaging(name, topologies.make("ring", 3), Layout([(3, 2)]))[0]()  # libraries are loaded
    before = peak_memory()
    step, network, averaging, x = _averaging(name, graph, layout)
    step()
    received = float(network.bits.mean()) / 8  # on these graphs as much as is sent
    ms = _milliseconds(step, seconds)
    memory = (peak_memory() - before) / n  # before state_dict(), which copies
    few = averaging if n <= NODES else _averaging(name, topologies.make(kind, NODES), layout)[2]
    leaves = tree_leaves(few.state_dict())
    state = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
    messages = next(averaging.step(x))
    message = messages[0] if isinstance(messages, tuple) else messages
    of_x = message.tensor.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    sent = 0 if of_x else message.tensor.nbytes / n
    received *= not isinstance(message, Shared)
    theory = 4 * layout.size + state / min(n, NODES) + received + sent
    return Line(name, size, ms, memory, theory)


def _averaging(
    name: str, graph: Topology, layout: Layout
) -> tuple[Callable[[], None], Network, algorithms.Averaging, Tensor]:
    """A step, and the network, the averaging rule and the parameters that take part."""
    algorithm, options = ALGORITHMS[name]
    x = torch.randn(graph.n_workers, layout.size, generator=torch.Generator().manual_seed(0))
    network = Network(graph)
    averaging = algorithms.make(algorithm, network, layout, **options)
    return lambda: network.run(averaging.step(x)), network, averaging, x


def _milliseconds(step: Callable[[], object], seconds: float) -> float:
    """The median time of a step."""
    times = in_turns({"step": step}, ROUNDS, seconds, processes(), torch.device("cpu"))
    return median(times["step"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        task: list[Any] = json.loads(sys.argv[2])
        print(json.dumps(asdict(one(*task))))
    else:
        configuration.run_entry_point(main)
