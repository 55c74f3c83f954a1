"""Training on the virtual clock: the normal path without delays, resuming, rows, survivors."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import train
from powergossip import tasks
from powergossip.network import processes
from powergossip.network.collectives import all_reduce_cost
from powergossip.runs.checkpoints import Checkpoints
from powergossip.training.asynchronous import OnVirtualClock
from powergossip.training.trainer import Trainer
from tests.harness.asynchronous import METHODS, OF_EDGES
from tests.harness.training import built, select, trained, value

ROUNDS: dict[str, Any] = {
    "optimizer": "power-gossip",
    "learning": "diloco",
    "local_steps": 2,
    "learning_options": {"gradient_correction": True},
    "gradient_clipping": 1.0,
}
# A ring of 4 averages too well for a second copy.
ACCELERATED: dict[str, Any] = {"optimizer": "dpsgd", "gossip": "a2cid2", "topology": "chain"}
LATE: dict[str, Any] = {
    "speeds": {1: 0.3},
    "jitter": 0.2,
    "latency": 0.1,
    "late": {"fraction": 0.2, "seconds": 3.0},
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "config", OmegaConf.structured(train.Config))


@pytest.mark.parametrize("method", [*METHODS, "rounds"])
def test_without_delays_training_is_that_of_all_workers(method):
    values = {**OF_EDGES, **METHODS.get(method, ROUNDS), "max_steps_per_epoch": 4}
    expected, rows = trained(**values)
    found, event_rows = trained(**values, scenario={})
    difference = (found.parameters.x - expected.parameters.x).abs()
    assert float(difference.mean()) < 1e-6  # AdamW divides by gradients that are rounding errors
    assert float(difference.max()) < 1e-3
    for name in ("accuracy", "cross_entropy"):
        for split in ("train", "test_avg"):
            a, b = (value(r, name, split=split) for r in (rows, event_rows))
            assert a == pytest.approx(b, abs=1e-3)
    assert set(event_rows["seconds"]) == {4.0}


@pytest.mark.long
@pytest.mark.parametrize("gossip", ["bounded", "asynchronous"])
def test_seconds_are_virtual_and_fast_workers_do_not_wait(gossip):
    slow = {**OF_EDGES, "scenario": {"speeds": {1: 0.25}}, "num_epochs": 2, "optimizer": "dpsgd"}
    _, waiting = trained(**slow)
    run, rows = trained(**slow, gossip=gossip, max_delay=100)
    assert isinstance(run.execution, OnVirtualClock)
    steps = [worker.steps for worker in run.execution.clock.workers.values()]
    assert steps[1] * 3 < steps[0] == steps[2]
    assert sum(steps) >= 4 * run.total_steps
    assert rows["seconds"].max() < 0.5 * waiting["seconds"].max()
    assert waiting["seconds"].max() > 4 * run.total_steps - 8


def test_workers_without_a_step_do_not_lower_the_loss():
    """Hardly any learning: from the first row on, the loss is about ln 10."""
    slow = {"gossip": "asynchronous", "scenario": {"speeds": {1: 0.1}}, "learning_rate": 1e-6}
    _, rows = trained(
        **{**OF_EDGES, **slow}, optimizer="dpsgd", num_epochs=1, max_steps_per_epoch=6
    )
    assert 2.2 < value(rows, "cross_entropy", split="train") < 2.4


def check_resumed(run: Trainer, values: dict[str, Any], steps: int, folder: Path) -> None:
    """A run that is saved after some steps and resumed has the bits of the whole one."""
    saved, first = Checkpoints(folder, processes()), built(**values)
    for step in range(steps):
        place = divmod(step + 1, first.steps_per_epoch)
        first.execution.train_step(*divmod(step, first.steps_per_epoch))
    now = copy.deepcopy(first.state_dict((*place, {})))
    saved.save(first.step, first.network.workers, now, {})
    resumed = built(**values)
    resumed.load_state_dict(saved.load(resumed.network.workers))
    resumed.train()
    assert torch.equal(resumed.parameters.x, run.parameters.x)
    assert resumed.network.bits.tolist() == run.network.bits.tolist()


@pytest.mark.long
@pytest.mark.parametrize(
    "method",
    [
        {**METHODS["power"], "gossip": "synchronous"},
        {**METHODS["sign"], "gossip": "bounded"},
        {**METHODS["duals"], "gossip": "asynchronous"},
        {**METHODS["momentum"], "gossip": "synchronous"},
        {**METHODS["tracking"], "gossip": "bounded"},
        {**ROUNDS, "gossip": "asynchronous"},
        ACCELERATED,
    ],
    ids=lambda method: "-".join(map(str, method.values())),
)
def test_a_run_resumes_in_the_middle_with_the_same_bits(method, tmp_path):
    values = {**OF_EDGES, **method, "scenario": LATE, "max_steps_per_epoch": 6}
    values["distributed_lr_warmup_factor"] = 4.0  # a learning rate of each step
    run, _ = trained(**values)
    check_resumed(run, values, 2, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("method", [METHODS["sign"], ACCELERATED])
def test_survivors_go_on_and_a_replacement_catches_up(method):
    scenario = {
        "deaths": [{"worker": 0, "at": 3.0}, {"worker": 2, "at": 4.5}],
        "joins": [{"worker": 2, "at": 9.5}],
        "detection": 0.4,
    }
    values = {**OF_EDGES, **method, "n_workers": 6, "num_epochs": 4}
    run, rows = trained(**values, scenario=scenario)
    alive = select(rows, "workers")["value"].tolist()
    assert alive[0] <= 5
    assert min(alive) == 4
    assert alive[-1] == 5
    merge = all_reduce_cost(5, 32 * run.parameters.x.shape[1])[0]
    assert value(select(rows, "merge_bits", epoch=4), "merge_bits") == merge
    tested = select(rows, "accuracy", split="test", epoch=4)
    assert tested["worker"].tolist() == [1, 2, 3, 4, 5]
    assert run.execution.view.workers == [1, 2, 3, 4, 5]
    assert value(select(rows, "accuracy", epoch=4), "accuracy", split="test_avg") > 0.3


class Recording:
    """A task that records the labels of each worker's batches."""

    def __init__(self, task: tasks.Task):
        self._task = task
        self.labels: dict[tuple[int, int], set[int]] = {}  # worker, epoch → labels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def batch(self, worker: int, epoch: int, *others: Any) -> Any:
        images, labels = self._task.batch(worker, epoch, *others)
        self.labels.setdefault((worker, epoch), set()).update(labels.tolist())
        return images, labels


REDISTRIBUTED: dict[str, Any] = {
    **OF_EDGES,
    "optimizer": "dpsgd",
    "use_decentralized_data": True,
    "num_epochs": 4,
    "data_of_lost": "redistributed",
    # In the second of epochs with 5 steps.
    "scenario": {"jitter": 0.1, "deaths": [{"worker": 3, "at": 6.2}], "detection": 0.3},
}


@pytest.mark.parametrize("kept", ["left", "redistributed"])
def test_survivors_train_on_the_labels_of_the_dead(kept):
    given: Any = {"n_workers": 4, "batch_size": 64, "seed": 1, "decentralized": True}
    task = Recording(tasks.make("Digits", drop_last=True, **given))
    run = built(task=task, **(REDISTRIBUTED | {"data_of_lost": kept}))
    run.train()
    of_dead = task.labels[3, 0].difference(*(task.labels[i, 0] for i in range(3)))
    assert of_dead
    for worker in range(3):
        assert not task.labels[worker, 1] & of_dead
        assert (of_dead < task.labels[worker, 2]) == (kept == "redistributed")
    assert run.total_steps == 4 * 5


@pytest.mark.long
@pytest.mark.parametrize("joins", [[], [{"worker": 3, "at": 13.1}]])
def test_an_epoch_keeps_its_samples_when_a_run_resumes(joins, tmp_path):
    """At the checkpoint, an epoch has begun before the death, which is known by then."""
    values = {**REDISTRIBUTED, "gossip": "asynchronous"}
    values["scenario"] = values["scenario"] | {"joins": joins}
    run, _ = trained(**values)
    for steps in (8, 12):
        check_resumed(run, values, steps, tmp_path / str(steps))


@pytest.mark.parametrize(
    ("values", "rate"),
    [
        ({"scenario": {}}, 1.0),
        ({"gossip": "bounded", "max_delay": 3}, 1 / 7),
        ({"gossip": "bounded", "max_delay": 3, "optimizer": "power-gossip"}, 0.1 / 7),
        ({"gossip": "asynchronous", "learning_options": {"dual_rate": 0.3}}, 0.3),
    ],
)
def test_duals_grow_more_slowly_over_late_exchanges_and_power_gossip(values, rate):
    run = built(**{**OF_EDGES, **METHODS["duals"], **values})
    assert isinstance(run.execution, OnVirtualClock)
    rules: list[Any] = [worker.rule for worker in run.execution.clock.workers.values()]
    assert [rule.dual_rate for rule in rules] == pytest.approx([rate] * len(rules))


@pytest.mark.long
def test_the_second_copy_is_not_sent():
    late = {
        **OF_EDGES,
        "n_workers": 8,
        "optimizer": "dpsgd",
        "overlapping": False,
        "scenario": LATE,
    }
    plain, accelerated = (trained(**late, gossip=g)[0] for g in ("asynchronous", "a2cid2"))
    assert not torch.equal(plain.parameters.x, accelerated.parameters.x)
    assert plain.network.bits.tolist() == accelerated.network.bits.tolist()
    assert plain.network.messages.tolist() == accelerated.network.messages.tolist()
