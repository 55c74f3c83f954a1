"""The layout of workers over processes does not change what they learn."""

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import train
from powergossip import kernels
from powergossip.network import Processes, processes
from powergossip.training.config_checks import checked
from powergossip.training.trainer import Trainer

STEPS = 10  # enough for messages of all workers to arrive everywhere


# learning rule → other keys
LEARNING: dict[str, dict[str, Any]] = {
    "relay-sgd": {"optimizer": "dpsgd", "topology": "double-binary-tree"},
    "gradient-tracking": {"optimizer": "power-gossip"},
    "exact-diffusion": {"optimizer": "dpsgd"},
    # Compared in the middle of a round, with messages in flight
    "diloco": {
        "optimizer": "power-gossip",
        "optimizer_num_iterations": 4,
        "local_steps": 7,
        "overlapping": True,
    },
}


def trained(who: Processes, **values: Any) -> Trainer:
    """Eight workers after some steps on Digits."""
    config = OmegaConf.structured(train.Config)
    config.n_workers, config.weight_decay = 8, 1e-3
    # Large steps make training chaotic: at learning_rate=0.05 with momentum 0.9, rounding errors
    # (which differ between products of one and of eight workers) grow by half in every step.
    config.learning_rate, config.momentum = 0.02, 0.0
    config.merge_with(values)
    run = Trainer(checked(config, who), who)
    for t in range(STEPS):
        epoch, step = divmod(t, run.task.steps_per_epoch)
        run.execution.rule.start()
        run.execution.gradient(epoch, step)
        run.execution.rule.finish()
    return run


def check(**values: Any) -> None:
    """Bits and messages exactly, parameters to the bit: to 1e-5 relative without compiled loops of
    PowerGossip, on one thread a process."""
    assert torch.get_num_threads() == 1
    who = processes()
    apart = trained(who, **values)
    x = apart.network.gather(apart.parameters.x)
    counted = [
        apart.network.gather(torch.tensor(count)).tolist()
        for count in (apart.network.bits, apart.network.messages)
    ]
    complaint = None
    if who.rank == 0:
        together = trained(Processes(), **values)
        expected = together.parameters.x
        rounded = values["optimizer"] == "power-gossip" and kernels.compiled() is None
        allowed = 1e-5 if rounded else 0.0
        difference = ((x - expected).norm() / expected.norm()).item()
        if not difference <= allowed:
            complaint = f"parameters differ by {difference:.2g}, more than {allowed}"
        if counted != [together.network.bits.tolist(), together.network.messages.tolist()]:
            complaint = "bits or messages differ"
    assert who.broadcast(complaint) is None


@pytest.mark.parallel([4, 8])
@pytest.mark.parametrize("optimizer", ["power-gossip", "dpsgd", "all-reduce", "powersgd"])
def test_eight_workers_in_four_and_eight_processes_are_those_of_one(optimizer: str) -> None:
    """Methods that round to signs or levels are not continuous: a rounding error may flip a sign.
    All-reduce adds in pairs."""
    check(optimizer=optimizer)


@pytest.mark.parallel(4)
@pytest.mark.parametrize("learning", LEARNING)
def test_eight_workers_of_a_learning_rule_in_four_processes_are_those_of_one(learning: str) -> None:
    check(learning=learning, **LEARNING[learning])


@pytest.mark.parallel([2, 8])
@pytest.mark.parametrize("bits", [2, 8])
def test_eight_workers_with_messages_of_few_bits_are_those_of_one(bits: int) -> None:
    more = {"learning": "diloco", "local_steps": 3, "local_optimizer": "muon"}
    check(optimizer="all-reduce", optimizer_bits=bits, **more)
