"""A few seeds of the fuzz harness. `make fuzz` has as many as one likes."""

from pathlib import Path

import pytest

from tests.harness import fuzz
from tests.harness.fuzz_cases import draw, read

FAULTS = sorted(Path(__file__).with_name("faults").glob("*.yaml"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("driver", "seeds"),
    [
        ("virtual", range(4)),
        pytest.param("virtual", range(4, 80), marks=pytest.mark.slow),
        pytest.param("processes", range(25), marks=pytest.mark.slow),
    ],
)
def test_random_scenarios_break_no_invariant(driver: str, seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        case, file = draw(seed, driver), tmp_path / "case.yaml"
        case.write(file)
        assert read(file) == case
        assert "fault" not in fuzz.carried_out(seed, driver)


@pytest.mark.slow
@pytest.mark.parametrize("file", FAULTS, ids=lambda file: file.stem)
def test_earlier_faults_are_mended(file: Path) -> None:
    _, fault = fuzz.outcome(read(file))
    assert fault is None, f"{fault}\npython -m tests.harness.fuzz --case {file}"
