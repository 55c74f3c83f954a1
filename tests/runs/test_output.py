"""Laws of output folders, of files written in one piece, and of the best checkpoint."""

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from powergossip.atomic_files import Drafts
from powergossip.errors import BadInput, CannotWrite, Dropped
from powergossip.network import Processes
from powergossip.runs.checkpoints import Checkpoints
from powergossip.runs.files import FIGURE
from powergossip.runs.metrics import FILE
from powergossip.runs.output import COMPLETE, ENDING, Output
from powergossip.training import recorder
from tests.harness.checkpoints import entry_of
from tests.harness.helpers import files_below


@pytest.fixture
def config() -> Any:
    return {"overwrite": False, "tensorboard": False, "log_verbosity": 1, "n_workers": 1}


@pytest.mark.parametrize("content", ["{", "[1]", ""])
def test_a_damaged_info_file_is_named_and_written_again(
    tmp_path: Path, config: Any, content: str
) -> None:
    Output(str(tmp_path), config).close()
    (tmp_path / "info.json").write_text(content)
    with pytest.warns(UserWarning, match=re.escape(str(tmp_path / "info.json"))):
        Output(str(tmp_path), config, offset=0).close(COMPLETE)
    assert json.loads((tmp_path / "info.json").read_text()) == {ENDING: COMPLETE}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        *("config.yaml", "metrics.jsonl", "info.json", "figure.png", "sample.txt"),
        *("checkpoints/my-llm/model.bin", "checkpoints/index.json", "checkpoints/step-10/x.pt"),
        *("checkpoints/step-000010/part-0.pt", "checkpoints/step-000010/model.bin"),
    ],
)
def test_files_of_others_are_never_overwritten(
    name: str, overwrite: bool, tmp_path: Path, config: Any
) -> None:
    for other in (name, "wandb/offline-run-x/run-x.wandb", "notes.txt"):
        (tmp_path / other).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / other).write_text("seed: 1\n")
    before = files_below(tmp_path)
    with pytest.raises(ValueError, match=f"{name.split('/')[0]}.*use another --output-dir"):
        Output(str(tmp_path), config | {"overwrite": overwrite})
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("linked", [False, True])
def test_a_run_is_overwritten_and_nothing_else(linked: bool, tmp_path: Path, config: Any) -> None:
    folder, scratch = tmp_path / "run", tmp_path / "scratch"
    first = Output(str(folder), config)
    first.add_info({"a": 1})
    first.close()
    if linked:
        scratch.mkdir()
        (folder / "checkpoints").symlink_to(scratch)
    for step in range(3):
        Checkpoints(folder, Processes()).save(step, range(1), {"x": torch.zeros(1)}, {})
    shutil.copytree(
        folder / "checkpoints" / "step-000002", folder / "checkpoints" / "step-000002-2"
    )
    mine = ["wandb/offline-run-x/a", "checkpoints/my-llm/a", "checkpoints/step-1/a"]
    mine += ["checkpoints/step-000001/notes.txt", "checkpoints/step-000001-copy/part-0.pt"]
    for name in mine:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    Output(str(folder), config | {"overwrite": True}).close()
    assert (folder / "checkpoints").is_symlink() == linked
    found = files_below(folder)
    found |= {f"checkpoints/{name}": b for name, b in files_below(folder / "checkpoints").items()}
    files = {name for name, content in found.items() if content is not None}
    assert files == {*mine, "config.yaml", "metrics.jsonl"}


def test_a_resumed_run_keeps_its_information_and_the_rows_up_to_an_offset(
    tmp_path: Path, config: Any
) -> None:
    first = Output(str(tmp_path), config)
    first.add_info({"a": 1, "b": 2})
    first.write("error", {"value": 1.0}, {})
    offset = first.rows.offset()
    first.write("error", {"value": 2.0}, {})
    first.close("Interrupted")
    again = Output(str(tmp_path), config, offset=offset)
    again.add_info({"b": 3})  # without an ending, until it ends again
    again.close()
    assert json.loads((tmp_path / "info.json").read_text()) == {"a": 1, "b": 3}
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1


def test_a_folder_that_cannot_be_written_stays_as_it_was(tmp_path: Path, config: Any) -> None:
    Output(str(tmp_path), config).close()
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "config.yaml").mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match="output folder"):
        Output(str(tmp_path), config, offset=0)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("sync", [False, True])
def test_an_interrupted_write_leaves_the_old_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    file = tmp_path / "index.json"
    with Drafts(tmp_path, 0) as drafts:
        drafts.begin()
        drafts.replace(file.name, b"old", sync)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                drafts.replace(file.name, b"new", sync)
        assert file.read_text() == "old"
        drafts.replace(file.name, b"new", sync)
        assert file.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["index.json"]


def test_a_process_changes_nothing_once_another_has_taken_over(tmp_path: Path) -> None:
    lost, next_one = Drafts(tmp_path, 0), Drafts(tmp_path, 1)
    lost.begin()
    lost.replace("file", b"old")
    next_one.take_over()
    next_one.replace("file", b"new")
    for change in (lambda: lost.replace("file", b"late"), lambda: lost.make_folder("late")):
        with pytest.raises(Dropped):
            change()
    with pytest.raises(Dropped):
        Drafts(tmp_path, 0).take_over()
    assert (tmp_path / "file").read_bytes() == b"new"
    assert not (tmp_path / "late").exists()


def test_checkpoints_have_folders_of_their_own_and_the_first_of_equal_scores_is_the_best(
    tmp_path: Path,
) -> None:
    """Also two of a step: a process killed while it writes leaves the first. If a user removes
    them, the next one is written."""
    kept, folders = Checkpoints(tmp_path, Processes()), set()
    for value, (step, score) in enumerate([(0, 0.1), (1, 0.5), (2, 0.5), (3, 0.3), (3, 0.2)]):
        kept.save(step, range(1), {"x": torch.full((1, 1), float(value))}, {}, score)
        folders.add(entry_of(tmp_path)["folder"])
    best, last = entry_of(tmp_path, "best"), entry_of(tmp_path)
    assert (best["step"], kept.load(range(1), "best")["x"].item()) == (1, 1.0)
    assert (last["step"], kept.load(range(1))["x"].item()) == (3, 4.0)
    assert len(folders) == 5
    shutil.rmtree(tmp_path / "checkpoints")
    kept.save(4, range(1), {"x": torch.zeros(1)}, {})
    assert entry_of(tmp_path)["step"] == 4


@pytest.mark.long
def test_a_figure_on_a_full_disk_is_a_sentence(tmp_path: Path) -> None:
    row = {"name": "accuracy", "value": 1.0, "epoch": 1, "bits": 0, "messages": 0, "seconds": 1.0}
    (tmp_path / FILE).write_text(json.dumps(row | {"split": "test_avg"}) + "\n")
    (tmp_path / FIGURE).symlink_to("/dev/full")
    with pytest.raises(CannotWrite, match=FIGURE):
        recorder.report(tmp_path, 0, "accuracy", False, 0)


def failing(number: int) -> Mock:
    return Mock(side_effect=OSError(number, os.strerror(number)))


@pytest.mark.parametrize("call", ["os.fsync", "pathlib.Path.replace", "pathlib.Path.rename"])
def test_a_disk_that_is_full_at_last_is_a_sentence_with_the_path(
    call: str, tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems report it at fsync or rename, without a path."""
    kept, state = Checkpoints(tmp_path, Processes()), {"x": torch.zeros(1)}
    output = Output(str(tmp_path), config)
    kept.save(1, range(1), state, {})
    with monkeypatch.context() as patch:
        patch.setattr(call, failing(errno.ENOSPC))
        with pytest.raises(
            BadInput, match=f"{tmp_path}.*No space left on device; make room"
        ) as found:
            kept.save(2, range(1), state, {})
        assert "Errno" not in str(found.value)
        if call != "pathlib.Path.rename":
            with pytest.raises(CannotWrite, match=f"{tmp_path}.*No space left on device"):
                output.add_info({})
    assert entry_of(tmp_path)["step"] == 1


@pytest.mark.parametrize("ending", [None, COMPLETE, "Interrupted"])
def test_a_failing_close_does_not_hide_another_exception(
    ending: str | None, tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Output(str(tmp_path), config)
    monkeypatch.setattr(output.rows, "close", failing(errno.ENOSPC))
    if ending == "Interrupted":
        output.close(ending)
    else:
        with pytest.raises(CannotWrite, match="No space left"):
            output.close(ending)
    assert not list(tmp_path.glob(".drafts*"))


def test_a_failing_disk_is_no_other_process(
    tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Output(str(tmp_path), config)
    with monkeypatch.context() as patch:
        for call in ("os.stat", "pathlib.Path.stat", "pathlib.Path.open", "os.fsync"):
            patch.setattr(call, failing(errno.EIO))
        with pytest.raises(CannotWrite, match="Input/output error"):
            output.add_info({})
    output.close()


def test_all_files_to_resume_from_are_on_the_disk(
    tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contents before a file is in its place, and names when a checkpoint is made."""
    synced, fsync, moved = set(), os.fsync, Path.replace

    def sync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def replace(path: Path, target: Path) -> Path:
        assert path.stat().st_ino in synced, target
        return moved(path, target)

    monkeypatch.setattr("os.fsync", sync)
    monkeypatch.setattr(Path, "replace", replace)
    folder = tmp_path / "run"
    output = Output(str(folder), config)
    output.add_info({"a": 1})
    output.write("error", {"value": 1.0}, {})
    facts = {"metrics_bytes": output.rows.offset()}
    Checkpoints(folder, Processes()).save(1, range(1), {"x": torch.zeros(1)}, facts)
    output.close()
    places = [folder, *folder.rglob("*")]
    assert len(places) == 8
    assert [place.name for place in places if place.stat().st_ino not in synced] == []
