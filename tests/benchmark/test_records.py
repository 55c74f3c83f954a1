"""Records: when an entry passes a target, the page, and the files of a pull request."""

from pathlib import Path

import pytest
from scipy.stats import ttest_1samp

from powergossip.benchmark import command_line, records, submissions
from powergossip.benchmark.comparison import Line
from powergossip.benchmark.entries import Entry
from powergossip.benchmark.tasks import FULL, QUICK, TASKS
from powergossip.errors import BadInput
from tests.harness import launch
from tests.harness.benchmarking import result

IMAGES, TEXT = (TASKS[name] for name in records.TARGETS)


def test_the_chance_is_that_of_a_one_sided_t_test() -> None:
    """Smaller bits per byte are better."""
    for values in ([0.86, 0.88, 0.91], [2.81, 2.7, 2.75, 2.9], [0.1, 0.2], [0.86] * 3, [0.88] * 3):
        larger, smaller = (records.chance_of(values, 0.87, task) for task in (IMAGES, TEXT))
        assert larger + smaller == pytest.approx(1)
        if len(set(values)) > 1:
            assert larger == pytest.approx(ttest_1samp(values, 0.87, alternative="greater").pvalue)
        else:
            assert larger == pytest.approx(float(values[0] < 0.87))


def test_a_record_is_the_first_evaluation_that_passes_with_its_merge() -> None:
    """Half of the runs' values comes after half of the megabytes."""
    for ends, megabytes in [((0.9, 0.905, 0.91), 11.5), ((1.8, 1.81, 1.82), 6.5)]:
        found = records.record(Line("a", IMAGES, 0.0, result(*ends, merge=1.5)))
        assert found is not None
        assert found.megabytes == megabytes
    for ends, diverged in [((0.871, 0.91, 0.99), []), ((0.9, 0.9, 0.9), [2])]:
        line = Line("a", IMAGES, 0.0, result(*ends, diverged=diverged))
        assert records.record(line) is None


def test_the_page_has_the_published_results() -> None:
    """`powergossip-benchmark submit NAME`, with the name of any entry, writes it."""
    text = (launch.ROOT / records.FILE).read_text()
    assert text == records.page(submissions.read_all([submissions.OF_LIBRARY]))


def test_the_files_of_a_pull_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other entries stay as they are. Results of other code are not replaced."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "clone" / "powergossip" / "benchmark" / "submissions"
    folder.mkdir(parents=True)

    def save(name: str, source: str, mb: float, at: Path) -> bytes:
        found = result(0.9, 0.905, 0.91, tried=[{"setting": {}, "score": 0.5}], mb=mb)
        for tier in (QUICK, FULL):
            path, _ = submissions.save(Entry(name, source, {}), tier, {IMAGES.name: found}, at)
        return path.read_bytes()

    other = save("other", "", 8.0, folder)
    saved = save("mine", "code", 4.0, command_line.OUTPUT)
    command_line.main(["submit", "mine", "--output", "clone"])
    said = capsys.readouterr().out
    assert "fashion_mnist_sorted, 88 %: 1st of 2, for 4 MB\ntext_same, 2.8 bits" in said
    assert f"mine.json, clone/{records.FILE}\nmine.json has 1 of 9 tasks in quick, 1 of 9" in said
    assert (folder / "mine.json").read_bytes() == saved
    assert (folder / "other.json").read_bytes() == other
    page = (tmp_path / "clone" / records.FILE).read_text()
    command_line.main(["submit", "mine", "--output", "clone"])
    assert "mine.json\n" in capsys.readouterr().out.splitlines(keepends=True)[0]
    assert page.index("| 1 | **4** | mine |") < page.index("| 2 | **8** | other |")

    save("mine", "new code", 2.0, command_line.OUTPUT)
    with pytest.raises(BadInput, match=r"mine\.json has results of other code; use another NAME"):
        command_line.main(["submit", "mine", "--output", "clone"])
    assert (folder / "mine.json").read_bytes() == saved
    assert (tmp_path / "clone" / records.FILE).read_text() == page
