"""The experiment with a language model on slow links, from rows to the tables."""

import csv
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments import language_links
from experiments.language_links import ALONE, CHECKED, CHOSEN, PLACES
from powergossip.prediction import layout
from powergossip.runner.runner import Run

EVALUATION = 5.0  # seconds
STEP = {place: 0.1 * (1 + i) for i, place in enumerate(PLACES)}


def learned(method: str, epoch: int) -> float:
    """Bits per byte: those of later methods fall more slowly, to 3 in all epochs of the last."""
    return 6 - 3 * epoch / 8 * len(CHOSEN) / (1 + list(CHOSEN).index(method))


def results(run: Run) -> pd.DataFrame:
    """Rows as they would be if a step took `STEP`, and that of the second epoch much longer."""
    place, method = run.labels.get("place"), run.labels["method"]
    steps = run.values["max_steps_per_epoch"]
    whole = 0.5 if method == ALONE[0] else 1.0
    rows: list[dict[str, Any]] = []
    for epoch in range(1, run.values["num_epochs"] + 1):
        late = 9.0 if epoch > 1 and "run" not in run.labels else 0.0
        took = steps * epoch * STEP.get(place or "", 1.0) * whole
        at = {"epoch": epoch, "seconds": took + EVALUATION * epoch + late}
        value = learned(method if method in CHOSEN else "diloco, ring", epoch)
        rows += [
            at | {"name": "bits_per_byte", "split": "test_avg", "value": value},
            at | {"name": "phase_seconds", "phase": "gradient", "value": took},
            at | {"name": "phase_seconds", "phase": "evaluation", "value": EVALUATION * epoch},
        ]
    return pd.DataFrame(rows)


@pytest.mark.long
def test_from_rows_to_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    averaging = dict.fromkeys(CHOSEN, (0.0, 0.0))
    monkeypatch.setattr(language_links, "averaging_seconds", lambda *_: averaging)
    text = language_links.experiment().report(results, tmp_path)
    n = len(CHOSEN)
    files = (tmp_path / "steps.csv", tmp_path / "seconds.csv")
    steps, times = (list(csv.reader(file.open()))[1:] for file in files)
    assert "Seconds to 3.00 bits per byte" in text
    for i, (step, time) in enumerate(zip(steps, times, strict=True), 1):
        assert [cell.split(" (")[0] for cell in step[1:]] == ["100", "200", "300"]
        needed = 8 * 240 * i / n
        assert time[1] == f"{needed:.0f}"
        assert [float(cell) for cell in time[2:]] == pytest.approx(
            [needed * seconds for seconds in STEP.values()], abs=0.51
        )
    product = 8 * 240 * 0.1
    assert f"{product:.0f} s to the target, where steps × seconds of a step are" in text
    assert CHECKED[0] in (tmp_path / "figure.svg").read_text()


def test_predicted_steps_are_those_of_gradients_and_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    averaging = dict.fromkeys(CHOSEN, (0.0, 0.0))
    monkeypatch.setattr(language_links, "averaging_seconds", lambda *_: averaging)
    found = language_links.predict(tmp_path)
    gradient = 2 * language_links.PACE
    for place, (_, pace) in PLACES.items():
        of_place = {method: found[method, place] for method in CHOSEN}
        assert min(of_place.values()) >= max(pace["pace"]) * 2
        assert max(of_place, key=of_place.__getitem__) == language_links.ALL_REDUCE
    # Two of the 8 workers on a host: 2 × 6 messages with an eighth of 4 D bytes, twice.
    sent = 2 * 12 * 4 * layout("GPT").size / 8
    link = 8 * sent / (10e6 * 1448 / 1514)
    assert found[language_links.ALL_REDUCE, "10 Mbit/s"] == pytest.approx(gradient + link, rel=0.02)
