"""Runs of train.py on a device, and with a checkpoint of another device."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import train
from tests.harness import training
from tests.harness.checkpoints import end_of
from tests.harness.on_device import difference

pytestmark = pytest.mark.gpu

OFF = 0.05  # fraction of parameters that may differ: an element that is rounded or selected
# otherwise changes all gradients after it. A state that is lost changes nearly all parameters
ARGUMENTS = [
    *("task=Digits", "task_architecture=CNN", "batch_size=4", "max_steps_per_epoch=4"),
    *("n_workers=4", "log_verbosity=0", "seed=1"),
]


@pytest.fixture(autouse=True)
def precise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions without TF32, and no figures."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(train, "log_metric", lambda name, values, tags: None)


def trained(monkeypatch: pytest.MonkeyPatch, folder: Path, epochs: int, *given: str) -> Tensor:
    """x [worker, D] after some epochs. A run in the folder is resumed."""
    resume = f"resume={str(folder.exists()).lower()}"
    words = [*ARGUMENTS, *given, f"num_epochs={epochs}", resume]
    training.main(monkeypatch, "--output-dir", str(folder), *words)
    x: Tensor = end_of(folder)["x"]
    return x


@pytest.mark.parametrize("method", ["power-gossip", "choco", "dgc"])
def test_runs_that_change_the_device_are_those_of_the_cpu(
    method: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two epochs is on the second device."""
    run = partial(trained, monkeypatch)
    expected = run(tmp_path / "expected", 2, f"optimizer={method}", "device=cpu")
    for index, devices in enumerate([(device, "cpu"), ("cpu", device), (device, device)]):
        for epochs, place in enumerate(devices, start=1):
            x = run(tmp_path / str(index), epochs, f"optimizer={method}", f"device={place}")
        assert difference(x, expected).off <= OFF, devices


@pytest.mark.parametrize("batched", ["off", "on"])
@pytest.mark.parametrize("model", ["ResNet20", "GPT"])
def test_a_step_is_that_of_the_cpu(
    model: str, batched: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters of ResNet-20's batch norm begin after a vector of 10 elements, in the middle
    of 16 bytes. One step: with batch norm, further ones multiply differences of rounding."""
    given = ["max_steps_per_epoch=1", f"batched_gradients={batched}"]
    given += [f"task_architecture={model}"]
    if model == "GPT":
        given += ["task=Text", "task_options={sequence_length: 24, hidden_size: 32, num_layers: 2}"]
    x = [
        trained(monkeypatch, tmp_path / str(place), 1, *given, f"device={place}")
        for place in ("cpu", device)
    ]
    assert difference(x[1], x[0]).largest <= 0.05
