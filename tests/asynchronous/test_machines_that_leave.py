"""Exchanges by edges between machines that meet with a ticket, leave and come back."""

import signal
from pathlib import Path

import pytest

from powergossip.network.resilient.worker_messages import LOST
from tests.harness import machines
from tests.harness.machines import Machine

SETTINGS = ["task_architecture=MLP", "max_steps_per_epoch=4", "batch_size=64"]
SETTINGS += ["batched_gradients=off", "optimizer=choco", "on_worker_loss=continue"]
SETTINGS += ["worker_timeout=5"]
NEW = ["new", "--workers", "3", *SETTINGS]


@pytest.mark.slow
def test_the_first_machine_comes_back_and_all_start_again_from_checkpoints(tmp_path: Path) -> None:
    """In the end, one of them is killed, and the others complete the run."""
    with machines.run(tmp_path, [*NEW, "num_epochs=100000", "gossip=asynchronous"]) as running:
        running[1].wait_for_workers(3)
        running[0].kill()
        running[1].wait_for_workers(2)
        running[0] = Machine(tmp_path / "0", running[0].name)
        for machine in running[1:]:
            machine.wait_for_workers(3)
        running[0].wait_for_workers(3)
        assert "it is in the run again" in running[0].output
        running[2].signal(signal.SIGTERM)
        assert [machine.end() for machine in running] == 3 * [128 + signal.SIGTERM]
        epoch, name = running[1].workers()[-1][0], running[1].name
    again = [name, "resume=true"]
    settings = [*SETTINGS, "gossip=asynchronous", f"num_epochs={epoch + 60}"]
    with machines.run(tmp_path, [*again, *settings], again) as running:
        while running[1].workers()[-1][0] <= epoch:
            running[1].wait_for_workers(3)
        running[2].kill()
        assert [machine.end() for machine in running[:2]] == [LOST, LOST]
        assert all(machine.workers()[-1] == (epoch + 60, 2) for machine in running[:2])
