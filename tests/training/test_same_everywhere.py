"""Facts that must be equal in all processes: one sentence in all of them, before the first step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

import gossip_run
import train
from powergossip.errors import BadInput
from powergossip.network import processes
from powergossip.runs import configuration

RANK = MPI.COMM_WORLD.rank
PROGRAMS = (train, gossip_run)


def rejected(action: Callable[[], object]) -> str:
    """The sentence with which all processes reject an action of theirs."""
    with pytest.raises(BadInput) as error:
        action()
    (sentence,) = {*processes().everywhere(str(error.value))}
    return sentence


@pytest.mark.parallel([2])
def test_a_key_that_differs_is_named_with_both_values() -> None:
    comm = processes()
    for program in PROGRAMS:
        default = configuration.plain(program.config)
        for key, value in default.items():
            shared = configuration.shared({**default, key: "other"} if RANK else default)
            if key in configuration.OF_PROCESS:
                comm.check_same(shared)
            else:
                found = rejected(lambda: comm.check_same(shared))  # noqa: B023
                assert f"{key}={value} in process 0 and {key}=other in process 1:" in found
    assert {*train.config} >= configuration.OF_PROCESS


@pytest.mark.parallel([2])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_driver_or_command_line_that_differs_is_rejected_before_anything_is_written(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = configuration.structured(program.Config)
    monkeypatch.setattr(program, "config", config)
    folder = f"run-{RANK}"
    assert "--output-dir=run-0 in" in rejected(lambda: program.main(["--output-dir", folder]))
    (tmp_path / "some.yaml").write_text(f"seed: {RANK}")
    assert "seed=0 in" in rejected(lambda: program.main(["--config", "some.yaml"]))
    (tmp_path / "some.yaml").unlink()
    config["seed"] = 3 + RANK
    assert "seed=3 in" in rejected(program.main)
    config["seed"] = 3
    version = f"1-{RANK}"
    monkeypatch.setattr(configuration, "version", lambda: version)
    assert "version=1-0 in process 0 and version=1-1" in rejected(program.main)
    assert list(tmp_path.iterdir()) == []
