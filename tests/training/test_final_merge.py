"""Laws of final_merge: one model in all workers at the end of a run, and its cost."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from powergossip.network import processes
from powergossip.network.collectives import all_reduce_cost
from powergossip.runs.checkpoints import Checkpoints
from powergossip.training.final_merge import recalibrate
from tests.harness.training import built, select, trained, value

FEW: dict[str, Any] = {"max_steps_per_epoch": 3}
IN_FLIGHT: dict[str, Any] = {"learning": "diloco", "local_steps": 2, "overlapping": True}


@pytest.mark.parallel([1, 4])
@pytest.mark.parametrize("method", [{}, IN_FLIGHT, {"optimizer": "all-reduce"}])
def test_all_workers_end_with_the_mean_model_for_one_all_reduce(method: dict[str, Any]) -> None:
    """And for nothing if they have it already."""
    plain, before = trained(**FEW, **method)
    merged, after = trained(**FEW, **method, final_merge=True)
    x, both = (run.network.gather(run.parameters.x) for run in (plain, merged))
    assert torch.equal(both, both[:1].expand_as(both))
    torch.testing.assert_close(both[0], x.mean(0), rtol=1e-5, atol=1e-6)
    bits = 0 if "optimizer" in method else all_reduce_cost(4, 32 * x.shape[1])[0]
    assert (merged.network.bits - plain.network.bits == bits).all()
    if len(before):  # in the process that has the rows
        assert (value(before, "merge_bits"), value(after, "merge_bits")) == (bits, 0)
        of_mean = select(after, "accuracy", split="test_avg").iloc[0]
        assert of_mean["bits"] == merged.network.bits[0]
        assert set(select(after, "accuracy", split="test")["value"]) == {of_mean["value"]}


@pytest.mark.long
def test_running_statistics_are_those_of_the_mean_model() -> None:
    values = FEW | {"task_architecture": "ResNet20", "n_workers": 2, "batch_size": 100}
    plain, _ = trained(**values, mean_model_statistics="recalibrated")
    merged, _ = trained(**values, final_merge=True)
    x, buffers = merged.parameters.x, merged.parameters.buffers
    expected = plain.evaluation.mean_model.buffers[0].expand_as(buffers)
    torch.testing.assert_close(buffers, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(*buffers)
    sent = merged.network.bits - plain.network.bits
    assert (sent == 32 * (x.shape[1] + buffers.shape[1])).all()


def test_recalibration_changes_running_statistics_only() -> None:
    """They are the mean over the first batches of each worker."""
    model, task = nn.BatchNorm1d(3, momentum=0.3), Mock(steps_per_epoch=5)
    batches = torch.randn(3, 5, 8, 3)
    task.batch = lambda worker, epoch, step: batches[worker, step]
    task.loss = lambda model, batch: model(batch)
    assert recalibrate(task, model, [0, 2], 2)
    assert model.momentum == 0.3
    torch.testing.assert_close(model.running_mean, batches[[0, 2], :2].mean((0, 1, 2)))
    task.carry.assert_called_once_with(model, task.carried.return_value)


def test_a_run_killed_after_the_merge_resumes_as_the_same(tmp_path: Path) -> None:
    """Before its checkpoint. A further resume does nothing."""
    values = FEW | {"num_epochs": 2, "final_merge": True, "checkpoint_interval": 1}
    whole, rows = trained(**values)
    assert value(rows, "merge_bits", epoch=1) > value(rows, "merge_bits", epoch=2) == 0
    saved, killed = Checkpoints(tmp_path, processes()), built(**values)
    killed.evaluation = Mock(side_effect=[("", 0.5), KeyboardInterrupt])
    with pytest.raises(KeyboardInterrupt):
        killed.train(saved)
    for _ in range(2):
        run = built(**values, resume_from=tmp_path)
        run.train(saved)
        assert torch.equal(run.parameters.x, whole.parameters.x)
        assert (run.network.bits == whole.network.bits).all()
