"""The measurements of the series of killed processes, from an order of events."""

from pathlib import Path

import pytest

from powergossip.events.event_log import Entry
from tests.harness import kill_series
from tests.harness.kill_series import CASES, death, kept, plan_of, stop, table


def steps(worker: int, times: list[float]) -> list[Entry]:
    return [Entry(time, "finish", worker, -1, -1) for time in times]


def test_the_time_lost_is_that_of_the_slowest_neighbor() -> None:
    every = [0.1 * k for k in range(10)]
    late = [0.1 * k for k in range(5)] + [0.9, 1.0, 1.1]  # 0.5 s in place of 0.1 s
    entries = steps(0, late) + steps(1, every[:5]) + steps(2, every) + steps(3, [0.0, 9.0])
    found = death(entries, victim=1, n=4, killed=[1])
    assert found is not None
    assert found["neighbors"] == 2
    assert found["lost"] == pytest.approx(0.4)
    assert death(entries, victim=1, n=4, killed=[0, 1])["lost"] == pytest.approx(0)  # type: ignore[index]
    assert death([], victim=1, n=4, killed=[1]) is None


def test_steps_of_others_during_a_stop_are_found() -> None:
    entries = steps(0, [0.0, 1.0, 11.0, 12.0])
    for worker in range(1, 8):
        entries += steps(worker, [float(k) for k in range(12)])
    found = stop(entries, 0, CASES["stop 10 s"])
    assert (found["stopped"], found["longest"], found["steps meanwhile"]) == (10.0, 1.0, 9)


def test_a_table_is_written_from_the_runs_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(series: kill_series.Series, seed: int) -> dict[str, object]:
        accuracy = 0.9 if series.kills else 0.95
        deaths = [{"lost": 0.1, "before": 2.0, "after": 1.0, "neighbors": 2}] * series.kills
        found = {"hang": False, "code": series.code, "accuracy": accuracy, "deaths": deaths}
        return found | {"rows complete": True, "overshoot": 0.0}

    monkeypatch.setattr(kill_series, "run", run)
    monkeypatch.setattr(kill_series.launch, "end_fork_server", lambda: None)  # other tests use it
    arguments = ["--seeds", "0:2", "--cases", "7 workers", "kill 1", "--folder", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["kill_series", *arguments])
    kill_series.main()
    assert set(kept(tmp_path, "kill 1")) == {0, 1}
    assert [line.split(" | ")[8:10] for line in table(tmp_path).splitlines()[2:]] == [
        ["", ""],
        ["-5.00", "-5.00"],
    ]
    monkeypatch.setattr(kill_series, "run", None)  # nothing is run again
    kill_series.main()


def test_victims_depend_on_the_seed() -> None:
    plans = [plan_of(CASES["kill 2"], seed)["events"] for seed in range(20)]
    assert all(len({event["process"] for event in events}) == 2 for events in plans)
    assert len({str(events) for events in plans}) == 20
    assert any(event["process"] == 0 for events in plans for event in events)
