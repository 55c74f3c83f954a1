"""Steps on a GPU, without one: no tensors of two devices meet, and no step waits for a value.

A step that waits leaves the GPU idle, and cannot be captured as a CUDA graph. See
tests/harness/fake_device.py.
"""

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from powergossip import algorithms, compressors
from powergossip.algorithms import aggregation, learning
from powergossip.network import Network
from powergossip.prediction.fake_network import FakeProcesses
from tests.harness.averaging import ALONE, EVERY, graph, steps
from tests.harness.fake_device import CUDA, Waits, fake_device
from tests.harness.laws import BIAS_RATE, is_accepted, law_of
from tests.harness.on_device import WORKERS, described, layout
from tests.harness.quadratics import Quadratics, rule_of, train

# Those that wait, once a step.
WAITING = {
    "push-sum running_sums=True": "an element beyond the integers of its sums is rejected",
    "sparta keep_ratio=0.3": "positions that are drawn twice are drawn again",
    "ef-sgd random-k": "the same",
    "signsgd": "a worker with a NaN sends an empty message",
}


def check(name: str, steps_on_device: Any) -> None:
    with fake_device():
        if name not in WAITING:
            steps_on_device()
            return
        with pytest.raises(Waits):
            steps_on_device()


def network(topology: str = "ring", **more: Any) -> Network:
    return Network(graph(topology, WORKERS), ALONE, CUDA, **more)


# DeepSqueeze with one compressor: CHOCO has them all.
CASES = [case for case in EVERY if case[0] != "deepsqueeze" or case[1].get("compressor") == "top-k"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options"), [pytest.param(*case, id=described(*case)) for case in CASES]
)
def test_averaging(name: str, options: dict[str, Any]) -> None:
    def on_device() -> None:
        own = network("tail")  # with workers of few neighbors and of many
        rule = algorithms.make(name, own, layout(), **options)
        x = torch.zeros(WORKERS, layout().size, device=CUDA)
        steps(own, rule, x, 1)
        rule.load_state_dict(rule.state_dict())
        steps(own, rule, x, 1)
        assert x.device.type == "cuda"

    check(described(name, options), on_device)


def of_nccl(monkeypatch: pytest.MonkeyPatch, in_order: bool = True) -> tuple[Network, Mock]:
    """A network of a process for each worker, with a channel on the GPU, and calls for its stream.

    Args:
        in_order: Whether the channel's messages are ordered with kernels, as NCCL's.
    """
    processes, stream = FakeProcesses(WORKERS), Mock()
    monkeypatch.setattr(processes.noise, "stream_ordered", in_order)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    return Network(graph("ring", WORKERS), processes, CUDA), stream


# One case of each rule: messages of different options take the same way.
OF_RULES = {name: (name, options) for name, options in reversed(CASES)}


@pytest.mark.parametrize("name", OF_RULES)
@pytest.mark.parametrize("in_order", [True, False])
def test_the_stream_is_waited_for_where_messages_are_not_in_its_order(
    name: str, in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_device() -> None:
        own, stream = of_nccl(monkeypatch, in_order)
        rule = algorithms.make(name, own, layout(), **OF_RULES[name][1])
        x = torch.zeros(1, layout().size, device=CUDA)
        steps(own, rule, x, 1)
        assert stream.called is not in_order

    check(described(*OF_RULES[name]), on_device)


AGGREGATIONS: list[tuple[str, dict[str, str]]] = [
    *((name, {}) for name in aggregation.AGGREGATIONS if name != "ef-sgd"),
    *(("ef-sgd", {"compressor": compressor}) for compressor in compressors.COMPRESSORS),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "options"), AGGREGATIONS)
def test_compressed_gradients(name: str, options: dict[str, str]) -> None:
    def on_device() -> None:
        own = network()
        rule: Any = aggregation.make(name, own, layout(), **options)
        residual = torch.zeros(WORKERS, layout().size, device=CUDA)
        mean = torch.zeros_like(residual)
        for step in range(2):
            rule.at_epoch(float(step))
            rule.at_learning_rate(0.1)
            residual += torch.randn(*residual.shape, device=CUDA)
            own.run(rule.step(residual, mean))

    check(" ".join([name, *options.values()]), on_device)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "averaging"),
    [
        (name, averaging)
        for name in learning.LEARNING
        for averaging in ("plain", "top-k")  # without public copies and with
        if is_accepted(name, averaging)
    ],
)
def test_learning_rules(name: str, averaging: str) -> None:
    topology = "binary-tree" if learning.LEARNING[name].relays else "ring"
    law = law_of(name, averaging, {})

    def rule(problem: Quadratics, own: Any) -> learning.GossipRule:
        given = {"averaging_options": law.averaging_options, **law.options}
        return rule_of(name, averaging, problem, BIAS_RATE, own, **given)

    def on_device() -> None:
        problem = Quadratics(dtype=torch.float32)
        for key in ("a", "b", "x", "grad"):
            setattr(problem, key, getattr(problem, key).to(CUDA))
        train(rule(problem, network(topology)), problem, 7)

    check(name, on_device)
