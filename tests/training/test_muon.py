"""Muon: hidden matrices of all workers in batched products, AdamW for all other parameters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from powergossip.algorithms import learning
from powergossip.network import processes
from powergossip.parameters import Parameters
from powergossip.tasks.language_models import GPT, LSTM
from powergossip.tasks.models import ARCHITECTURES
from powergossip.training.config import Settings
from powergossip.training.config_checks import checked
from powergossip.training.local_optimizers import LocalOptimizer
from powergossip.training.muon import NEWTON_SCHULZ, hidden_matrices
from powergossip.training.trainer import Trainer
from tests.harness.training import after_steps, configured

WORKERS, STEPS = 3, 4
RATE, DECAY = 0.05, 0.1


class Model(nn.Module):
    """Hidden matrices of three shapes, one of them tall, one shape twice, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.up = nn.Linear(6, 40)
        self.middle = nn.ModuleList([nn.Linear(40, 40), nn.Linear(40, 40)])
        self.kernels = nn.Conv1d(40, 8, 3)
        self.head = nn.Linear(8, 9)


HIDDEN = ["up.weight", "middle.0.weight", "middle.1.weight", "kernels.weight"]


def settings(**changes: Any) -> Settings:
    given: dict[str, Any] = {
        "learning_rate": RATE,
        "weight_decay": DECAY,
        "local_optimizer": "muon",
    }
    return Settings(**given | changes)


def found(changes: dict[str, Any], gradients: list[Tensor]) -> tuple[Tensor, Parameters]:
    """x [worker, D] after a step of LocalOptimizer with each gradient [worker, D]."""
    torch.manual_seed(0)
    parameters = Parameters([Model() for _ in range(WORKERS)])
    local = LocalOptimizer(parameters, settings(**changes))
    for gradient in gradients:
        local.step(gradient.clone())
    return parameters.x, parameters


def expected(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], gradients: list[Tensor]
) -> Tensor:
    """The same by an optimizer `make` for each worker's hidden matrices, and AdamW for the rest."""
    torch.manual_seed(0)
    models = [Model() for _ in range(WORKERS)]
    parameters = Parameters(models)
    for worker, model in enumerate(models):
        views = dict(zip(parameters.names, model.parameters(), strict=True))
        # torch's Muon takes matrices alone.
        hidden = [nn.Parameter(views[name].detach().flatten(1)) for name in HIDDEN]
        others = [view for name, view in views.items() if name not in HIDDEN]
        adamw = torch.optim.AdamW(others, lr=RATE, weight_decay=DECAY)
        muon = make(hidden)
        for gradient in gradients:
            parts = dict(
                zip(parameters.names, parameters.layout.tensors(gradient[worker]), strict=True)
            )
            for matrix, name in zip(hidden, HIDDEN, strict=True):
                matrix.grad = parts[name].flatten(1).clone()
            for view, name in zip(others, (n for n in views if n not in HIDDEN), strict=True):
                view.grad = parts[name].clone()
            adamw.step()
            muon.step()
    return parameters.x


class Plain(torch.optim.Optimizer):
    """The equations of Muon, one matrix after the other, in the precision of the parameters."""

    def __init__(self, matrices: list[nn.Parameter], nesterov: bool):
        super().__init__(matrices, {})
        self.nesterov = nesterov

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for matrix in self.param_groups[0]["params"]:
            state = self.state[matrix]
            m = 0.95 * state.get("m", torch.zeros_like(matrix)) + 0.05 * matrix.grad
            state["m"] = m
            x = 0.95 * m + 0.05 * matrix.grad if self.nesterov else m
            x = x / x.norm()
            for a, b, c in [NEWTON_SCHULZ] * 5:
                gram = x @ x.T
                x = a * x + (b * gram + c * gram @ gram) @ x
            scale = 0.2 * max(matrix.shape) ** 0.5
            matrix.mul_(1 - RATE * DECAY).sub_(RATE * scale * x)


def gradients(scale: float = 1.0) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    size = sum(p.numel() for p in Model().parameters())
    return [scale * torch.randn(WORKERS, size, generator=random) for _ in range(STEPS)]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_it_is_torchs_muon_to_the_rounding_of_bfloat16(nesterov: bool, scale: str) -> None:
    given = gradients()
    changes = {"nesterov": nesterov, "muon_scale": scale.replace("_", "-")}
    x, parameters = found(changes, given)
    start, _ = found(changes, [])

    def make(matrices: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon(
            matrices, lr=RATE, weight_decay=DECAY, nesterov=nesterov, adjust_lr_fn=scale
        )

    reference = expected(make, given)
    assert hidden_matrices(parameters.models[0]) == HIDDEN
    for span in parameters.layout.spans(range(len(parameters.names))):
        moved = (reference - start)[:, span].norm()
        assert moved > 0.1
        assert (x - reference)[:, span].norm() < 0.02 * moved


@pytest.mark.parametrize("nesterov", [True, False])
def test_in_single_precision_it_is_the_equations(nesterov: bool) -> None:
    given = gradients(1e-4)  # the length of a gradient does not matter
    changes = {"nesterov": nesterov, "muon_precision": "fp32"}
    x, _ = found(changes, given)
    reference = expected(lambda matrices: Plain(matrices, nesterov), given)
    torch.testing.assert_close(x, reference, rtol=1e-5, atol=1e-5)


def test_the_learning_rate_of_muon_is_that_of_adamw_times_its_own_factor() -> None:
    given = gradients()[:1]
    start, parameters = found({"weight_decay": 0.0}, [])
    moved = [
        found({"weight_decay": 0.0, "muon_rate": rate}, given)[0] - start for rate in (1.0, 3.0)
    ]
    for index, name in enumerate(parameters.names):
        (span,) = parameters.layout.spans([index])
        factor = 3 if name in HIDDEN else 1
        torch.testing.assert_close(moved[1][:, span], factor * moved[0][:, span])


@pytest.mark.parallel([2])
def test_processes_have_the_bits_of_one() -> None:
    """With layers of odd sizes, whose matrices would not be aligned in a batch of several."""
    changes = {"local_optimizer": "muon", "learning_rate": 0.003, "task_architecture": "CNN"}
    alone = after_steps(5, **changes)
    together = Trainer(checked(configured(**changes), processes()), processes())
    for step in range(5):
        together.execution.train_step(0, step)
    own = together.network.workers
    assert len(own) == 2
    assert torch.equal(together.parameters.x, alone.parameters.x[own.start : own.stop])


# --- Which parameters -----------------------------------------------------------------------------


def test_hidden_matrices_of_the_library() -> None:
    image = (3, 32, 32)
    for name, build in ARCHITECTURES.items():
        model = build(image, 10)
        every = [n for n, p in model.named_parameters() if p.ndim >= 2]
        assert hidden_matrices(model) == every[1:-1], name
    for language_model in (LSTM, GPT):
        model = language_model((11, 8), hidden_size=8, num_layers=2)
        every = [n for n, p in model.named_parameters() if p.ndim >= 2]
        outer = {n for n in every if n.split(".")[0] in ("encoder", "words")}
        assert outer
        assert hidden_matrices(model) == [n for n in every if n not in outer]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 9)
        self.head.weight = self.words.weight


def test_a_head_with_the_weights_of_the_embedding_is_the_last_layer() -> None:
    assert hidden_matrices(Tied()) == ["layers.0.weight", "layers.1.weight"]


def test_a_model_says_which_matrices_are_hidden() -> None:
    class Own(Tied):
        def __init__(self, *names: str) -> None:
            super().__init__()
            self.names = names

        def hidden_matrices(self) -> list[str]:
            return list(self.names)

    assert hidden_matrices(Own("layers.1.weight")) == ["layers.1.weight"]
    for name in ("layers.1.bias", "layers.2.weight", "frozen.weight", "head.weight"):
        with pytest.raises(ValueError, match=f'local_optimizer=muon: .*"{name}"'):
            hidden_matrices(Own(name))
    for model in (Own(), nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))):
        with pytest.raises(ValueError, match="local_optimizer=muon: use adamw"):
            hidden_matrices(model)

    class All(nn.Linear):
        def hidden_matrices(self) -> list[str]:
            return ["weight"]

    parameters = Parameters([All(5, 4, bias=False)])
    start = parameters.x.clone()
    LocalOptimizer(parameters, settings()).step(torch.ones_like(start))
    assert (parameters.x - start).norm() > 0.01


# --- With learning rules --------------------------------------------------------------------------


def test_rules_that_take_adamw_take_muon() -> None:
    for name, rule in learning.LEARNING.items():
        assert ("muon" in rule.optimizers) == ("adamw" in rule.optimizers), name
    with pytest.raises(ValueError, match="local_optimizer=muon: use sgd or adamw"):
        learning.rule("quasi-global-momentum", "muon")
