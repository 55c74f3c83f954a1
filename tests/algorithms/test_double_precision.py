"""Laws of x in float64, for every row of the registries: double precision all the way."""

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from powergossip import algorithms, topologies
from powergossip.algorithms import AVERAGING
from powergossip.algorithms.aggregation import AGGREGATIONS
from powergossip.algorithms.ddp_hooks import HOOKS
from powergossip.algorithms.learning import LEARNING
from powergossip.errors import BadInput
from powergossip.network import Network, Processes, processes
from powergossip.optimizers import GossipOptimizer
from powergossip.parameters import Layout
from powergossip.training.config_checks import checked
from powergossip.training.trainer import Trainer
from tests.harness.averaging import ALONE, EVERY, SHAPES, label, start, steps, variance
from tests.harness.training import configured
from tests.harness.user_loop import METHODS

N = 4
ENCODED = ("choco", "deepsqueeze", "moniqua")  # messages of bytes, the same for any dtype of x
# Their error is that of the compressor, which does not vanish.
NOISY = ("deepsqueeze", "moniqua")


def ring(dtype: torch.dtype = torch.float64) -> Network:
    return Network(topologies.make("ring", N), ALONE, dtype=dtype)


@pytest.fixture
def default_restored() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.long
@pytest.mark.parametrize(("name", "options"), EVERY, ids=label)
def test_the_mean_is_kept_to_double_precision(name: str, options: dict[str, Any]) -> None:
    """Workers agree better than in single precision, where 1e-15 to 1e-13 of the variance remain.
    Elements that are not encoded have 64 bits."""
    layout, network, single = Layout(SHAPES), ring(), ring(torch.float32)
    x = start(N, layout).double()
    before, first = x.mean(0), variance(x)
    averaging = algorithms.make(name, network, layout, **options)
    steps(network, averaging, x, 2)
    steps(single, algorithms.make(name, single, layout, **options), start(N, layout), 2)
    if "bits" not in options:  # with them, the first messages only have 64 bits
        assert (network.bits == (1 if name in ENCODED else 2) * single.bits).all()
    for _ in range(1 if name in NOISY else 10):
        steps(network, averaging, x, 50)
        if variance(x) <= 1e-17 * first:
            break
    torch.testing.assert_close(x.mean(0), before, atol=1e-13, rtol=0)
    assert name in NOISY or variance(x) <= 1e-17 * first


@pytest.mark.usefixtures("default_restored")
@pytest.mark.parametrize(("name", "options"), EVERY, ids=label)
def test_the_default_dtype_of_torch_has_no_effect(name: str, options: dict[str, Any]) -> None:
    layout, found = Layout(SHAPES), []
    x = torch.randn(N, layout.size, dtype=torch.float32)
    for default in (torch.float64, torch.bfloat16, torch.float32):
        torch.set_default_dtype(default)
        network = ring(torch.float32)
        averaging = algorithms.make(name, network, layout, **options)
        found.append(steps(network, averaging, x.clone(), 3))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[2])


@pytest.mark.long
@pytest.mark.usefixtures("default_restored")
@pytest.mark.parametrize("name", [*AVERAGING, *AGGREGATIONS])
def test_nor_has_it_an_effect_on_models_and_data_of_the_library(name: str) -> None:
    found, other = [], (torch.float64, torch.bfloat16)[len(name) % 2]
    for default in (torch.float32, other):
        torch.set_default_dtype(default)
        run = Trainer(checked(configured(optimizer=name), ALONE), ALONE)
        run.execution.train_step(0, 0)
        found.append(run.parameters.x)
        assert torch.get_default_dtype() == default
    assert torch.equal(*found)


# --- train.py ---

MODULE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Module):
    def __init__(self, dtype="float64"):
        super().__init__()
        layers = nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 10)
        self.layers = nn.Sequential(nn.Flatten(), *layers).to(getattr(torch, dtype))

    def forward(self, x):
        return self.layers(x.to(self.layers[1].weight))

class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(64, 10, dtype=torch.complex64))

    def forward(self, x):
        return (x.flatten(1).to(self.w.dtype) @ self.w).abs()

class Mixed(Net):
    def __init__(self):
        super().__init__()
        self.layers[4].float()

class Table(Net):
    def __init__(self):
        super().__init__("float32")
        self.register_buffer("table", torch.zeros(3, dtype=torch.float64))

def lazy():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))

def strict():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10, dtype=torch.float64))

def doubles():
    x = torch.randn(40, 4, dtype=torch.float64)
    return TensorDataset(x, x.sum(1)), TensorDataset(x[:9], x[:9].sum(1))

def line(dtype="float32"):
    return nn.Linear(4, 1, dtype=getattr(torch, dtype))
"""
CASES: dict[str, dict[str, Any]] = {
    **{name: {"optimizer": name} for name in [*AVERAGING, *AGGREGATIONS]},
    **{name: {"optimizer": name, "n_workers": 1} for name in HOOKS},
    "asynchronous": {"scenario": {"speeds": {1: 0.3}, "latency": 0.1}},
    "asynchronous choco": {"scenario": {"speeds": {1: 0.3}}, "optimizer": "choco"},
    "losses": {"scenario": {"loss": {"fraction": 0.2}}, "optimizer": "push-sum"},
    "batched": {"batched_gradients": "on"},
    "adamw": {"local_optimizer": "adamw", "gradient_clipping": 1.0, "weight_decay": 0.1},
    "compressed relays": {"learning": "relay-sgd", "optimizer": "choco", "topology": "chain"},
}
OVER = {"beer": "choco", "motef": "choco", "relay-sgd": "dpsgd"}
for _name, _rule in LEARNING.items():
    CASES[_name] = {"learning": _name, "optimizer": OVER.get(_name, "power-gossip")}
    CASES[_name] |= {"topology": "chain"} if _rule.relays else {}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "of_user.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("of_user", None)


def made(**changes: Any) -> Trainer:
    values = {"task_architecture": "of_user:Net", "batch_size": 64} | changes
    return Trainer(checked(configured(**values), Processes()), Processes())


def stepped(run: Trainer, first: int, last: int) -> Tensor:
    for t in range(first, last):
        run.execution.train_step(0, t)
    return run.parameters.x


@pytest.mark.long
@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("name", CASES)
def test_a_model_in_double_precision_is_trained_in_it(name: str) -> None:
    """Its state continues to the bit, and x follows the model in float32 up to its rounding."""
    run = made(**CASES[name])
    x = stepped(run, 0, 2)
    state = copy.deepcopy(run.state_dict((0, 2, {})))
    expected = stepped(run, 2, 4)
    resumed = made(**CASES[name])
    resumed.load_state_dict(state)
    assert torch.equal(stepped(resumed, 2, 4), expected)
    assert x.dtype == torch.float64
    assert (x != x.float()).any()
    assert all(p.dtype == torch.float64 for p in run.parameters.models[0].parameters())
    assert run.parameters.buffers.dtype == run.network.dtype == torch.float64


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"task_architecture": "of_user:Complex"},
            '"w" is torch.complex64; use a real .*64, 10, 2',
        ),
        ({"task_architecture": "of_user:lazy"}, '"1.weight" has no shape yet'),
        ({"task_architecture": "of_user:Mixed"}, '"layers.4.weight" is torch.float32; use .*64'),
        ({"task_architecture": "of_user:Table"}, 'buffer "table" is torch.float64; use .*32'),
        ({"task_options": {"dtype": "bfloat16"}}, "is torch.bfloat16; use .* precision=bf16"),
        ({"precision": "bf16"}, "precision=bf16: use fp32"),
        ({"task_architecture": "of_user:strict"}, "data in torch.float32, a model in .*64"),
        (
            {"task": "of_user:doubles", "task_architecture": "of_user:line", "batch_size": 4},
            "data in torch.float64, a model in torch.float32",
        ),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_other_dtypes_are_rejected_with_a_sentence(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(BadInput, match=text):
        made(**changes)


# --- Training loops ---


def gossiped(
    method: str, dtype: torch.dtype, count: int, **more: Any
) -> tuple[Tensor, Tensor, int]:
    """x [worker, D] before and after this number of steps without updates, and the bits sent."""
    who, layout = processes(), Layout(SHAPES)
    model = nn.ParameterList([torch.zeros(shape, dtype=dtype) for shape in SHAPES])
    optimizer = GossipOptimizer(torch.optim.SGD(model.parameters(), lr=0), method, **more)
    values = 0.1 * start(who.size, layout)[who.rank].to(dtype)  # within moniqua's bound
    with torch.no_grad():
        for parameter, value in zip(model, layout.tensors(values), strict=True):
            parameter.copy_(value)
            parameter.grad = torch.zeros_like(parameter)
    before = _everywhere(model)
    for _ in range(count):
        optimizer.step()
    assert all(parameter.dtype == dtype for parameter in model)
    return before, _everywhere(model), optimizer.bits


def _everywhere(model: nn.ParameterList) -> Tensor:
    own = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    return torch.stack(processes().gather(own))


@pytest.mark.parallel(4)
def test_gossip_optimizer_averages_in_double_precision() -> None:
    for name, method in METHODS.items():
        before, x, bits = gossiped(**method, dtype=torch.float64, count=8)
        if method["method"] != "push-sum":  # which keeps Σ_i w_i x_i
            torch.testing.assert_close(x.mean(0), before.mean(0), atol=1e-13, rtol=0)
        assert variance(x) < variance(before), name
        *_, single = gossiped(**method, dtype=torch.float32, count=8)
        factor = 1 if method["method"] in ENCODED else 2
        assert bits == factor * single or "bits" in method, name
    for name in LEARNING:
        if name in OVER:
            continue
        before, x, _ = gossiped("dpsgd", torch.float64, 3, learning=name)
        torch.testing.assert_close(x.mean(0), before.mean(0), atol=1e-13, rtol=0)
        assert variance(x) < variance(before), name


def test_all_parameters_are_in_double_precision_or_none() -> None:
    single, double = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3).double())
    for first, other in ((single, double), (double, single)):
        with pytest.raises(BadInput, match=r"parameter 1 is .*use torch.float64 for all"):
            GossipOptimizer(torch.optim.SGD([first, other], lr=0.1), "dpsgd")
