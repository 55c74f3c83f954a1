"""Precision and compilation of the local step in train.py."""

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from powergossip.network import Processes, processes
from powergossip.training.config_checks import checked
from powergossip.training.resuming import check_same_run
from powergossip.training.trainer import Trainer
from tests.harness.launch import python
from tests.harness.training import configured, main

ALONE = Processes()


def trainer(who: Processes = ALONE, **changes: Any) -> Trainer:
    return Trainer(checked(configured(**changes), who), who)


def trained(steps: int, who: Processes = ALONE, **changes: Any) -> Trainer:
    run = trainer(who, **changes)
    for step in range(steps):
        run.execution.train_step(0, step)
    return run


METHODS = ["power-gossip", "choco", "powersgd"]  # dgc: bits depend on the selected elements
HOOKS = ["ddp-powersgd", "ddp-batched-powersgd"]


@pytest.mark.parametrize("optimizer", [*METHODS, *HOOKS])
def test_bf16_changes_gradients_but_no_bits(optimizer: str) -> None:
    """Parameters, gradients and messages stay float32."""
    n_workers = 1 if optimizer in HOOKS else 4
    full, half = (
        trained(8, optimizer=optimizer, n_workers=n_workers, precision=precision)
        for precision in ("fp32", "bf16")
    )
    assert half.parameters.x.dtype == half.parameters.grad.dtype == torch.float32
    assert half.network.bits.tolist() == full.network.bits.tolist()
    assert half.network.messages.tolist() == full.network.messages.tolist()
    distance = (half.parameters.x - full.parameters.x).norm() / full.parameters.x.norm()
    assert 1e-5 < distance < 0.1


def test_a_loss_in_bf16_is_that_of_autocast() -> None:
    """The loss itself is in float32."""
    run = trainer(precision="bf16")
    model, batch = run.parameters.models[0], run.task.batch(0, 0, 0)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = run.task.loss(model, batch)
    found = run.execution.gradient(0, 0)["cross_entropy"][0]
    assert found.dtype == torch.float32
    assert found == loss.detach()


@pytest.mark.parallel([2])
@pytest.mark.parametrize("optimizer", METHODS)
def test_bf16_is_the_same_in_every_layout(optimizer: str) -> None:
    who = processes()
    here = trained(6, who, precision="bf16", optimizer=optimizer)
    alone = trained(6, precision="bf16", optimizer=optimizer)
    workers = slice(here.network.workers.start, here.network.workers.stop)
    assert torch.equal(here.parameters.x, alone.parameters.x[workers])


@pytest.mark.parametrize("task", [{}, {"task": "LSTM", "task_architecture": "LSTM"}])
def test_a_resumed_run_in_bf16_is_the_same_to_the_bit(task: dict[str, Any], tmp_path: Path) -> None:
    """Also with the state of an LSTM, which is carried from batch to batch."""
    options = {"n_workers": 1, "precision": "bf16", "max_steps_per_epoch": 8, **task}
    straight = trained(3, **options)
    torch.save(straight.state_dict((0, 3, {})), tmp_path / "state.pt")
    resumed = trainer(**options)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt"))
    for step in range(3, 6):
        straight.execution.train_step(0, step)
        resumed.execution.train_step(0, step)
    assert torch.equal(straight.parameters.x, resumed.parameters.x)


WITHOUT_AVX512 = """
import torch
from powergossip.training.precision import autocast
lstm, x = torch.nn.LSTM(4, 4), torch.randn(3, 2, 4)
state = torch.get_rng_state()
with autocast("bf16", torch.device("cpu")):
    found, _ = lstm(x)
assert torch.equal(torch.get_rng_state(), state)
assert torch.backends.mkldnn.enabled
found.float().sum().backward()
torch.testing.assert_close(found.float(), lstm(x)[0], atol=0.02, rtol=0)
"""


def test_a_cpu_without_avx512_has_an_lstm_in_bf16(tmp_path: Path) -> None:
    """oneDNN, which reads the variable at its first use, has none there."""
    (tmp_path / "program.py").write_text(WITHOUT_AVX512)
    ended = python(tmp_path / "program.py", variables={"ONEDNN_MAX_CPU_ISA": "AVX2"})
    assert ended.returncode == 0, ended.stderr


def test_without_a_compiler_compilation_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"^torch_compile=true: use false, or install"):
        trainer(torch_compile=True)


@pytest.mark.parametrize("change", [{"precision": "bf16"}, {"torch_compile": True}])
def test_precision_and_compilation_belong_to_a_run(change: dict[str, Any], tmp_path: Path) -> None:
    """They stay when it is resumed, and are free in an evaluation."""
    now = checked(configured(**change), ALONE)
    saved = now.as_dict()
    check_same_run(tmp_path, saved, now)
    before = checked(configured(), ALONE)
    with pytest.raises(ValueError, match=next(iter(change))):
        check_same_run(tmp_path, saved, before)
    check_same_run(tmp_path, saved, checked(configured(evaluate_only=True), ALONE))


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.mark.slow
@needs_compiler
def test_compiled_models_train_alike() -> None:
    """Up to rounding as models that are not compiled, with the same names; and the same to the bit
    after a resume, in a process that has compiled nothing yet."""
    options: dict[str, Any] = {"n_workers": 2, "torch_compile": True}
    compiled = trained(3, **options)
    state = copy.deepcopy(compiled.state_dict((0, 3, {})))
    plain = trained(6, n_workers=2)
    for step in range(3, 6):
        compiled.execution.train_step(0, step)
    x, y = compiled.parameters.x, plain.parameters.x
    assert 0 < (x - y).norm() < 1e-4 * y.norm()
    assert compiled.network.bits.tolist() == plain.network.bits.tolist()
    names = list(plain.parameters.models[0].state_dict())
    assert list(compiled.parameters.models[0].state_dict()) == names
    assert compiled.parameters.names == plain.parameters.names

    torch.compiler.reset()
    resumed = trainer(**options)
    resumed.load_state_dict(state)
    for step in range(3, 6):
        resumed.execution.train_step(0, step)
    assert torch.equal(resumed.parameters.x, x)


@pytest.mark.slow
@needs_compiler
def test_evaluated_models_run_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shape of a batch would be compiled by itself. A step has one."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def compile_models(models: Sequence[nn.Module]) -> None:
        for model in models:
            model.compile(backend=backend, dynamic=False)

    monkeypatch.setattr("powergossip.training.compilation.compile_models", compile_models)
    arguments = ["n_workers=2", "task_architecture=MLP", "num_epochs=1", "max_steps_per_epoch=2"]
    arguments += ["torch_compile=true", "log_verbosity=0", "--output-dir", str(tmp_path)]
    rows = main(monkeypatch, *arguments)
    assert any(row.get("split") == "test" for row in rows)
    assert len(graphs) == 1


@pytest.mark.slow
@needs_compiler
@pytest.mark.parallel([2])
def test_compiled_models_are_the_same_in_every_layout() -> None:
    who = processes()
    here = trained(3, who, n_workers=2, torch_compile=True)
    alone = trained(3, n_workers=2, torch_compile=True)
    assert torch.equal(here.parameters.x[0], alone.parameters.x[who.rank])


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("optimizer", ["ddp-powersgd", "powersgd"])
def test_compiled_models_train_with_other_methods(optimizer: str) -> None:
    options: dict[str, Any] = {"n_workers": 1, "optimizer": optimizer}
    x = trained(6, torch_compile=True, precision="bf16", **options).parameters.x
    y = trained(6, precision="bf16", **options).parameters.x
    assert (x - y).norm() < 1e-2 * y.norm()
