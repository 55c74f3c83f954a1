"""Steps per second of each method and graph on a network that is described by options.

    powergossip-predict --rate 100mbit --latency 20ms --workers 64 --model ResNet20 --compute 50ms
    powergossip-predict --rate 1gbit --workers 64 --hosts 8 --model 25.6M --topology ring
    powergossip-predict --rate 10mbit --workers 16 --model LSTM --method power-gossip:rank=4
    powergossip-predict --rate 10mbit --workers 8 --model 124M --compute 2s
        --method all-reduce:local_steps=30
        --method power-gossip:rank=8,num_iterations=1,bits=4,local_steps=30

The table has, for each method and graph, the bytes and messages that a worker sends in a step, the
time of a step, steps per second, the fraction of a step that the worker waits for messages, and the
rounds of plain gossip until the distance between the workers has fallen tenfold. The last line
recommends a method and graph.

The bytes are counted by running a step of each method, and the CPU time of averaging is measured on
this machine, unless --no-measure is given. The time of a gradient is given by --compute. Nothing is
sent.

Not predicted: accuracy, the number of steps to a target, stragglers, and lost packets.
"""

import argparse
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from powergossip import checks, command_line, formatting, reading
from powergossip.errors import BadInput

if TYPE_CHECKING:
    from powergossip.parameters import Layout
    from powergossip.prediction.model import Cluster, Step
    from powergossip.prediction.traffic import PredictedMethod
    from powergossip.topologies import Topology

RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}  # bits per second
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}  # seconds
GRAPHS = ("ring", "torus", "exponential", "one-peer-exponential", "base-graph")
MOST_WORKERS = 100_000  # beyond them, graphs take minutes
SECONDS = 0.1  # of a measurement of averaging
# Options of --method for rounds of local steps, not for the algorithm
ROUNDS = ("local_steps", "overlapping")
TOLERANCE = 1.25  # times the fastest step: slower steps are not recommended
PER_MESSAGE, PER_BYTE = 130e-6, 0.8e-9  # CPU seconds of Open MPI over TCP, see docs/prediction.md


def rate(name: str, text: str) -> float:
    """Bits per second of a text such as 100mbit, or infinity for none. Raises BadValue."""
    if text == "none":
        return math.inf
    return _quantity(name, text, RATES, "none, or a rate such as 10mbit, 1.5gbit")


def duration(name: str, text: str) -> float:
    """Seconds of a text such as 20ms. Raises BadValue."""
    if text == "0":
        return 0.0
    return _quantity(name, text, TIMES, "0, or a time such as 20ms, 50us, 1.5s", zero=True)


def _quantity(
    name: str, text: str, units: Mapping[str, float], accepted: str, zero: bool = False
) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([a-z]+)", text.lower())
    if not found or found[2] not in units or (float(found[1]) == 0 and not zero):
        raise checks.BadValue(name, text, accepted)
    return float(found[1]) * units[found[2]]


@dataclass(frozen=True)
class Line:
    """A row of the table.

    Attributes:
        fidelity: Index of the method in the order of decreasing fidelity, or of an earlier one that
            is as good.
        graph: Name of the graph, "" without one.
        rounds: Number of rounds of gossip, see `consensus.rounds`.
    """

    method: str
    graph: str
    fidelity: int
    step: "Step"
    rounds: float

    @property
    def name(self) -> str:
        return f"{self.method} on {self.graph}" if self.graph else self.method

    @property
    def cells(self) -> list[str]:
        seconds, waiting = self.step.seconds, self.step.seconds - self.step.compute
        return [
            self.method,
            self.graph or "none",
            f"{self.step.sent / 1e3:.4g}",
            f"{self.step.messages:.4g}",
            _time(seconds),
            f"{1 / seconds:.3g}" if seconds else "inf",
            f"{waiting / seconds:.0%}" if seconds else "0%",
            f"{self.rounds:.3g}".replace("nan", "?"),
        ]


HEADER = ["method", "graph", "kB sent", "messages", "step", "steps/s", "waiting", "rounds"]


def main(arguments: Sequence[str]) -> None:
    """Predict as on the command line. Raises BadInput before anything is measured."""
    try:
        _predict(_parse(arguments))
    except checks.BadValue as error:
        raise BadInput(f"{error.name} {error.value}: use {error.accepted}") from error


def _predict(options: argparse.Namespace) -> None:
    n = _whole("--workers", options.workers)
    checks.check("--workers", n, n <= MOST_WORKERS, f"at most {MOST_WORKERS:,}")
    hosts = n if options.hosts is None else _whole("--hosts", options.hosts)
    checks.check("--hosts", hosts, n % hosts == 0, f"a divisor of the {n} workers")
    bits, latency = rate("--rate", options.rate), duration("--latency", options.latency)
    gradient = duration("--compute", options.compute)

    from powergossip import topologies
    from powergossip.network import torch_kept
    from powergossip.prediction import model, shapes

    cluster = model.Cluster(hosts, bits, latency, PER_MESSAGE, PER_BYTE)
    layout, methods, graphs = shapes.layout(options.model), _methods(options.method), {}
    for name in options.topology or GRAPHS:
        try:
            graphs[name] = topologies.make(name, n)
        except ValueError as error:
            raise BadInput(f"--topology {name}: {error}") from error
    with torch_kept():
        lines = _lines(methods, graphs, layout, cluster, gradient, not options.no_measure)
    if not lines:
        raise BadInput("none of these methods works on these graphs; PowerGossip needs an "
                       "undirected graph such as ring")  # fmt: skip
    place = f"{n} workers on {hosts} hosts, links of {options.rate}, latency {options.latency}"
    described = f"{options.model}: {shapes.described(layout)}"
    table = formatting.plain([HEADER, *(line.cells for line in lines)])
    print(
        f"{described}. {place}, gradient {options.compute}.\n\n{table}\n\n{recommendation(lines)}"
    )
    print("Rounds are those of plain gossip. Compressed methods need more. Accuracy and the number "
          "of steps to a target are not predicted.")  # fmt: skip
    if not gradient:
        print("note: a gradient takes no time here; give --compute", file=sys.stderr)


def _lines(
    methods: "Mapping[str, PredictedMethod]",
    graphs: "Mapping[str, Topology]",
    layout: "Layout",
    cluster: "Cluster",
    gradient: float,  # seconds
    measured: bool,
) -> list[Line]:
    """A line for each method and each graph that it can use. Raises BadInput for bad options."""
    import torch

    from powergossip.prediction import model, traffic
    from powergossip.prediction.consensus import rounds

    torch.set_num_threads(1)  # a worker has one core
    of_graph, lines = cache(rounds), []
    order = [method.at_once for method in methods.values()]
    for label, method in methods.items():
        fidelity = order.index(method.at_once)
        try:
            sent = traffic.count(method, layout)
        except ValueError as error:
            raise BadInput(f"--method {label}: {error}") from error
        averaging = traffic.cpu_seconds(method, layout, SECONDS) if measured else (0.0, 0.0)
        compute = model.Compute(gradient, *averaging)
        if method.gossips:
            used = {name: graph for name, graph in graphs.items() if not method.rejects(graph)}
        else:  # the graph makes no difference
            used = {"": next(iter(graphs.values()))}
        for name, graph in used.items():
            step = model.step(sent, graph, cluster, compute, method.overlaps, method.local_steps)
            lines.append(
                Line(label, name, fidelity, step, of_graph(graph) if method.gossips else 1.0)
            )
    return lines


def recommendation(lines: Sequence[Line]) -> str:
    """A sentence with the recommended method and graph, and the reason.

    Among the combinations with a step of at most 1.25 times the fastest one, it has the fewest
    rounds of gossip. Among equals, it has the highest fidelity, then fewer messages, then the
    faster step.
    """

    def order(line: Line) -> tuple[float, int, float, float]:
        rounds = math.inf if math.isnan(line.rounds) else line.rounds
        return rounds, line.fidelity, line.step.messages, line.step.seconds

    fastest = min(lines, key=lambda line: line.step.seconds)
    near = (line for line in lines if line.step.seconds <= TOLERANCE * fastest.step.seconds)
    best = min(near, key=order)
    reason = "the fastest" if best is fastest else (
        f"at most {TOLERANCE:g} times the fastest, {fastest.name} with "
        f"{_time(fastest.step.seconds)}"
    )  # fmt: skip
    agreement = "workers agree after each step" if best.rounds == 1 else (
        f"the graph brings workers together tenfold in {best.rounds:.3g} rounds, the fewest "
        "among steps as fast"
    )  # fmt: skip
    return (
        f"Recommended: {best.name}, since its step of {_time(best.step.seconds)} is {reason}, and "
        f"{agreement}."
    )


def _time(seconds: float) -> str:
    return formatting.prefixed(1e6 * seconds, "s", ("u", "m", ""))


def _methods(given: Sequence[str]) -> "Mapping[str, PredictedMethod]":
    """{label: Method} of --method NAME:OPTION=VALUE,…, by default `METHODS`."""
    from powergossip import algorithms
    from powergossip.algorithms import aggregation
    from powergossip.prediction.traffic import METHODS, PredictedMethod

    found = {}
    for text in given or METHODS:
        if text in METHODS:
            found[text] = METHODS[text]
            continue
        name, _, rest = text.partition(":")
        checks.one_of("--method", name, [*algorithms.AVERAGING, *aggregation.AGGREGATIONS])
        options: dict[str, Any] = {}
        for pair in filter(None, rest.split(",")):
            key, equals, value = pair.partition("=")
            checks.check("--method", text, bool(equals), "NAME:OPTION=VALUE,OPTION=VALUE")
            checks.check("--method", text, key not in options, f"{key} once")
            try:
                options[key] = reading.value(value)
            except reading.Unreadable as error:
                raise BadInput(f"--method={text}: {value} is not YAML ({error})") from error
        rounds = {key: options.pop(key) for key in ROUNDS if key in options}
        try:
            found[text] = PredictedMethod(name, options, **rounds)
        except ValueError as error:
            raise BadInput(f"--method {text}: {error}") from error
    return found


def _whole(name: str, text: str) -> int:
    checks.check(name, text, bool(re.fullmatch("[1-9][0-9]{0,6}", text)), "a whole number above 0")
    return int(text)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of the command line. Raises BadInput; exits after --help."""
    parser = command_line.parser("powergossip-predict", __doc__ or "")
    add = parser.add_argument
    add("--rate", metavar="RATE", help="of the link of a host in each direction, such as 100mbit")
    add("--workers", metavar="N", help="number of workers")
    add("--model", metavar="MODEL", help="an architecture, a number of parameters, or shapes")
    add("--latency", default="0", metavar="TIME", help="from a host to another, such as 20ms (0)")
    add("--compute", default="0", metavar="TIME", help="CPU time of a worker's gradient (0)")
    add("--hosts", metavar="N", help="hosts of equal numbers of workers (one for each worker)")
    add("--method", action="append", default=[], metavar="METHOD",
        help="NAME:OPTION=VALUE,… like power-gossip:rank=2; repeatable (nine)")  # fmt: skip
    add("--topology", action="append", default=[], metavar="GRAPH",
        help=f"repeatable ({', '.join(GRAPHS)})")  # fmt: skip
    add("--no-measure", action="store_true", help="averaging takes no CPU time")
    options = command_line.parsed(parser, arguments)
    for name in ("rate", "workers", "model"):
        if getattr(options, name) is None:
            raise BadInput(f"--{name} is missing; --help lists the options")
    return options


def command() -> None:
    """Run as a program. Bad input is one sentence, exit code 2."""
    command_line.run(main)
