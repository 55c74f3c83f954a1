"""A few seeds of the fuzz harness. `make fuzz` has as many as one likes."""

import sys
from pathlib import Path

import pytest

from tests.harness import fuzz
from tests.harness.fuzz_cases import Case, draw, read

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
        case, file = draw(seed, driver), tmp_path / f"{driver}-{seed}.yaml"
        case.write(file)
        assert read(file) == case
        _, fault = fuzz.outcome(case)
        if fault is not None:
            kept = fuzz.FOLDER / file.name
            case.write(kept)
            pytest.fail(f"{fault}\npython -m tests.harness.fuzz --case {kept}")


@pytest.mark.slow
@pytest.mark.parametrize("file", FAULTS, ids=lambda file: file.stem)
def test_earlier_faults_are_mended(file: Path) -> None:
    _, fault = fuzz.outcome(read(file))
    assert fault is None, f"{fault}\npython -m tests.harness.fuzz --case {file}"


def test_a_case_with_a_fault_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(case: Case) -> str:
        assert case != draw(4), "the fault"
        return "complete"

    monkeypatch.setattr(fuzz.launch, "end_fork_server", lambda: None)  # other tests use it
    monkeypatch.setitem(fuzz.DRIVERS, "virtual", failing)
    monkeypatch.setattr(
        sys,
        "argv",
        ["fuzz", "--seeds", "3:6", "--drivers", "virtual", "--folder", str(tmp_path / "new")],
    )
    with pytest.raises(SystemExit) as ended:
        fuzz.main()
    assert ended.value.code == 1
    file = tmp_path / "new" / "virtual-4.yaml"
    assert read(file) == draw(4)
    printed = capsys.readouterr().out
    assert str(file) in printed
    assert "the fault" in printed
    monkeypatch.setattr(sys, "argv", ["fuzz", "--case", str(file)])
    with pytest.raises(SystemExit) as ended:
        fuzz.main()
    assert ended.value.code == 1
