"""Training on a GPU, without one: see tests/algorithms/test_without_waiting.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from omegaconf import OmegaConf

import train
from powergossip import parameters, randomness
from powergossip.errors import Diverged
from powergossip.runs import configuration
from powergossip.runs.metrics import Hooks
from powergossip.state_trees import map_tensors
from powergossip.tasks import digits
from powergossip.tasks.images import LabeledImages
from powergossip.tasks.loading import on_device
from powergossip.training import construction
from powergossip.training.config_checks import checked
from powergossip.training.ending import Agreement
from powergossip.training.trainer import Trainer
from tests.harness.averaging import ALONE
from tests.harness.fake_device import CUDA, Waits, fake_device

WORKERS = 4


@contextmanager
def trainer(*keys: str, ones: bool = False, hooks: Hooks | None = None) -> Iterator[Trainer]:
    """A trainer on the fake device, in a block with it."""
    config = OmegaConf.structured(train.Config)
    configuration.read_command_line(config, [f"n_workers={WORKERS}", *keys], "")
    settings, loaded = checked(config, ALONE), digits.load()
    statistics = loaded[0].statistics()
    with pytest.MonkeyPatch.context() as patch, fake_device(ones):
        patch.setattr(construction, "choose_device", lambda *_: CUDA)
        patch.setattr(digits, "load", lambda: loaded)
        patch.setattr(LabeledImages, "statistics", lambda _: statistics)
        patch.setattr(parameters, "check_parameters", lambda *_, **__: None)
        patch.setattr(randomness, "seed_torch", lambda *_: None)
        patch.setattr(torch.cuda, "Event", Mock)
        yield Trainer(settings, ALONE, hooks)


@pytest.mark.long
@pytest.mark.parametrize(
    "keys",
    [
        "optimizer=choco optimizer_compressor=sign-and-norm local_optimizer=adamw precision=bf16",
        "local_optimizer=muon learning=diloco local_steps=2 gradient_clipping=1.0",
        "optimizer=powersgd optimizer_num_batches_per_step=2 batched_gradients=on",
        "optimizer=dgc",
    ],
)
def test_no_step_waits(keys: str) -> None:
    with trainer(*keys.split()) as own:
        steps = partial(map, own.execution.train_step, [0] * 3, range(3))
        if keys == "optimizer=dgc":  # the length of a message is that of the elements it finds
            with pytest.raises(Waits):
                list(steps())
            return
        for metrics in steps():
            assert {m.device.type for m in metrics.values()} == {"cuda"}
        assert own.parameters.x.device.type == "cuda"


def test_a_batch_comes_from_pinned_memory() -> None:
    batch = Mock(device=torch.device("cpu"))
    found = on_device(batch, CUDA)
    assert found is batch.pin_memory().to.return_value
    batch.pin_memory().to.assert_called_once_with(CUDA, non_blocking=True)


@pytest.mark.long
def test_an_evaluation_and_the_state_of_a_run() -> None:
    rows: list[Any] = []
    hooks = Hooks(log_metric=lambda *row: rows.append(row))
    with trainer("local_optimizer=adamw", ones=True, hooks=hooks) as own:

        def devices() -> list[str]:
            found: list[str] = []

            def add(tensor: torch.Tensor) -> torch.Tensor:
                found.append(tensor.device.type)
                return tensor

            map_tensors(add, own.state_dict((1, 0, sums)))
            return found

        sums = own.execution.train_step(0, 0)
        own.evaluation(1, own.execution.step, sums)
        before = devices()
        own.load_state_dict(map_tensors(torch.Tensor.cpu, own.state_dict((1, 0, sums))))
        assert devices() == before
        own.execution.train_step(1, 0)
    assert "cuda" in before
    assert len(rows) > WORKERS


def test_a_loss_on_a_gpu_is_read_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by one of several processes, which then tells the others."""
    calls, arrived = Mock(), torch.zeros(2)
    calls.copy.return_value = arrived
    calls.synchronize = lambda: arrived.copy_(torch.tensor([1.0, torch.nan]))
    monkeypatch.setattr(torch.cuda, "Event", lambda: calls)
    on_gpu: Any = Mock(device=CUDA, to=calls.copy)
    several: Any = Mock(rank=0, size=2)
    for who in (ALONE, several):
        arrived.fill_(7.0)
        calls.reset_mock()
        agreement = Agreement(who)
        agreement.note_all([4, 5], "loss", on_gpu, step=8, epoch=2)
        assert [name for name, *_ in calls.mock_calls] == ["copy", "record"]  # in this order
        calls.copy.assert_called_once_with("cpu", non_blocking=True)
        if who is ALONE:
            with pytest.raises(Diverged, match=r"worker 5.*nan.*step 8"):
                agreement.after_step(9, None)
        else:
            agreement.after_step(9, None)
            (ends, _), *_ = several.start_max.call_args.args
            assert ends
