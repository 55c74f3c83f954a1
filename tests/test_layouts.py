"""The layout of workers over processes does not change what they learn."""

import pytest
import torch
from omegaconf import OmegaConf

import train
from powergossip import kernels
from powergossip.network import Processes, processes
from powergossip.training.settings import checked
from powergossip.training.trainer import Trainer

STEPS = 50


def trained(who: Processes, optimizer: str) -> Trainer:
    """Eight workers after 50 steps on Digits."""
    config = OmegaConf.structured(train.Config)
    config.n_workers, config.optimizer, config.weight_decay = 8, optimizer, 1e-3
    # Large steps make training chaotic: at learning_rate=0.05 with momentum 0.9, rounding errors
    # (which differ between products of one and of eight workers) grow by half in every step.
    config.learning_rate, config.momentum = 0.02, 0.0
    run = Trainer(checked(config, who), who)
    for t in range(STEPS):
        epoch, step = divmod(t, run.task.steps_per_epoch)
        run.rule.start()
        run.gradient(epoch, step)
        run.rule.finish()
    return run


@pytest.mark.parallel([4, 8])
@pytest.mark.parametrize("optimizer", ["power-gossip", "dpsgd", "all-reduce", "powersgd"])
def test_eight_workers_in_four_and_eight_processes_are_those_of_one(optimizer: str) -> None:
    """Bits and messages exactly, parameters to 1e-5 relative, on one thread a process.

    All-reduce, which adds in pairs, and D-PSGD agree to the bit, and so does PowerGossip by
    compiled loops. (Methods that round to signs or
    levels are not continuous: a rounding error may flip a sign. PowerSGD's directions follow the
    residual, of which rounding is a larger fraction: 1e-4.)
    """
    assert torch.get_num_threads() == 1
    who = processes()
    apart = trained(who, optimizer)
    x = apart.network.gather(apart.parameters.x)
    counted = [
        apart.network.gather(torch.tensor(count)).tolist()
        for count in (apart.network.bits, apart.network.messages)
    ]
    complaint = None
    if who.rank == 0:
        together = trained(Processes(), optimizer)
        expected = together.parameters.x
        power_gossip = 1e-5 if kernels.compiled() is None else 0.0
        allowed = {
            "all-reduce": 0.0,
            "dpsgd": 0.0,
            "powersgd": 1e-4,
            "power-gossip": power_gossip,
        }[optimizer]
        difference = ((x - expected).norm() / expected.norm()).item()
        if not difference <= allowed:
            complaint = f"parameters differ by {difference:.2g}, more than {allowed}"
        if counted != [together.network.bits.tolist(), together.network.messages.tolist()]:
            complaint = "bits or messages differ"
    assert who.broadcast(complaint) is None
