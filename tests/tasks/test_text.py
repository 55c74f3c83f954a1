"""Laws of language modeling on documents: splits, tokens, bits per byte, topics, the cache."""

import gzip
import hashlib
import json
import os
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

import train as entry
from powergossip import tasks
from powergossip.errors import BadInput
from powergossip.network import processes
from powergossip.runs import figures, metrics
from powergossip.tasks import documents, token_files
from powergossip.tasks.language_models import LanguageModel, State
from powergossip.tasks.text import Text
from powergossip.tasks.token_files import TokenFile
from powergossip.tasks.tokenizers import END, BytePairs, Bytes, Tokenizer
from powergossip.training.config_checks import checked
from powergossip.training.trainer import Trainer
from tests.harness import launch
from tests.harness.helpers import DAMAGES, damage, files_below
from tests.harness.small_data import options, write_documents
from tests.harness.training import configured, select

SMALL = {"hidden_size": 8, "num_layers": 1, "num_heads": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "decentralized-deep-learning" / "Text"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of 24 documents."""
    write_documents(tmp_path / "texts")
    return tmp_path / "texts"


def make(folder: Path, length: int = 9, **changes: Any) -> Text:
    of_task = {"dataset": str(folder), "sequence_length": length, **SMALL}
    arguments: dict[str, Any] = {"n_workers": 2, "batch_size": 4, "seed": 1}
    arguments |= {"task_options": of_task | changes.pop("task_options", {})} | changes
    task = tasks.make("Text", **arguments)
    assert isinstance(task, Text)
    return task


# Documents and their splits.


def test_each_document_is_in_one_split_and_copies_are_in_the_same(texts: Path) -> None:
    """Copies that differ in white space are copies. Empty documents are in no split."""
    for i, path in enumerate(sorted(texts.rglob("*.txt"))):
        content = path.read_text()
        (path.parent / f"{path.stem}.copy").write_text("\n\n".join(content.split()) + "\n" * i)
    (texts / "empty.txt").write_text(" \n")
    found = documents.find(str(texts), None)
    splits = found.splits(0.25)
    of_document = {name: split for split, names in splits.items() for name in names}
    assert len(of_document) == sum(map(len, splits.values())) == 48
    for name, split in of_document.items():
        assert of_document[name.replace(".txt", ".copy")] == split
    # Of 24 different ones, 5 % for testing, and a quarter of the others.
    assert {split: len(names) for split, names in splits.items()} == {
        "train": 34,
        "valid": 12,
        "test": 2,
    }
    assert found.splits(0.25) == splits
    assert found.splits(0.0)["test"] == splits["test"]
    assert "valid" not in found.splits(0.0)


def test_documents_of_a_pattern_and_of_data_dir(texts: Path, tmp_path: Path) -> None:
    (texts / ".hidden.txt").write_text("hidden")
    (texts / "folder.txt").mkdir()
    (texts / "dangling.txt").symlink_to("absent")
    everything = documents.find(str(texts), None)
    assert len(everything.names) == 24
    assert {everything.topic(name) for name in everything.names} == {"", "a", "b", "c"}
    assert documents.find("texts", tmp_path) == documents.Documents(
        "texts", texts, everything.names
    )
    below = documents.find("texts/*/*.txt", tmp_path)
    assert (below.root, len(below.names)) == (texts, 18)
    assert documents.find("texts/a", tmp_path).topic("0.txt") == ""


def test_the_library_of_python_is_without_its_tests_and_linux_doc_may_be_compressed(
    tmp_path: Path,
) -> None:
    for name in ("os.py", "json/decoder.py", "test/a.py", "json/tests/b.py", "site-packages/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert documents.find("python", tmp_path).names == ("json/decoder.py", "os.py")
    (tmp_path / "json" / "a.rst.txt.gz").write_bytes(gzip.compress(b"pages"))
    (tmp_path / "index.rst.txt").write_text("index")
    found = documents.find("linux-doc", tmp_path)
    assert [found.read(name) for name in found.names] == [b"index", b"pages"]


# Tokens.


def byte_pairs() -> Tokenizer:
    pytest.importorskip("tokenizers")
    return BytePairs(BytePairs.trained(["an old man and an old pan\n", "über 語 éa"], 280))


@pytest.mark.parametrize("tokenizer", [Bytes, byte_pairs])
def test_tokenizers_lose_nothing_and_count_bytes(tokenizer: Any) -> None:
    made = tokenizer()

    @settings(suppress_health_check=[HealthCheck.differing_executors])
    @given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
    def law(text: str) -> None:
        found = made.encode(text.encode())
        assert END not in found
        assert made.byte_counts[found].sum() == len(text.encode())
        assert made.decode(found.tolist()) == text

    law()
    assert made.byte_counts[END] == 0
    assert made.decode([*made.encode(b"a"), END, *made.encode(b"b")]) == "a\n\nb"


def read(file: TokenFile, first: int, last: int) -> list[str]:
    """The documents between two tokens END."""
    assert file.tokens[first] == file.tokens[last] == END
    inside = file.tokens[first + 1 : last]
    parts = np.split(inside, np.flatnonzero(inside == END))
    return [file.tokenizer.decode(part[part != END].tolist()) for part in parts]


@pytest.fixture(params=["bytes", "bpe-300"])
def tokenizer(request: pytest.FixtureRequest) -> str:
    if request.param != "bytes":
        pytest.importorskip("tokenizers")
    return str(request.param)


def test_files_of_tokens_have_all_documents_by_split_and_topic(texts: Path, tokenizer: str) -> None:
    found = documents.find(str(texts), None)
    file = token_files.load(found, tokenizer, options(task="Text", validation_ratio=0.3))
    for split, names in found.splits(0.3).items():
        topics = [piece.topic for piece in file.pieces[split]]
        assert topics == sorted(set(topics))
        for piece in file.pieces[split]:
            expected = [(texts / n).read_text() for n in names if found.topic(n) == piece.topic]
            assert read(file, piece.first, piece.last) == expected
    assert len(file.tokenizer.byte_counts) == (256 if tokenizer == "bytes" else 300)
    assert isinstance(file.tokens, np.memmap)
    assert file.tokens.dtype == (np.uint8 if tokenizer == "bytes" else np.uint16)
    assert file.sha256 == hashlib.sha256(file.tokens.tobytes()).hexdigest()


# Samples and their partition.


def test_an_epoch_has_each_token_once(texts: Path) -> None:
    """Up to the ends of topics, shorter than a sequence, and the last batch of an epoch."""
    task = make(texts, n_workers=1, batch_size=1)
    file = token_files.load(documents.find(str(texts), None), "bytes", options(task="Text"))
    batches = [task.batch(0, 0, step) for step in range(task.steps_per_epoch)]
    assert all(torch.equal(w[:, 1:], t[:, :-1]) and bool(f) for w, t, f in batches)
    found = Counter(torch.cat([t.flatten() for _, t, _ in batches]).tolist())
    expected: Counter[int] = Counter()
    for piece in file.pieces["train"]:
        n = (piece.last - piece.first) // 9 * 9
        expected.update(file.tokens[piece.first + 1 :][:n].tolist())
    assert found == expected


def words(task: Text, worker: int, epoch: int = 0) -> Tensor:
    steps = range(task.steps_per_epoch)
    return torch.cat([task.batch(worker, epoch, step)[0].flatten() for step in steps])


def test_a_column_of_topics_gives_each_worker_its_own(texts: Path) -> None:
    """Three workers, four topics: the two smallest are at one worker. Sorted data are contiguous in
    topics. A worker that is lost leaves its sequences to the others."""
    (texts / "a" / "long.txt").write_text("abc " * 4000)
    task = make(texts, n_workers=3, batch_size=1, column="topic")
    counts = task.label_counts()
    assert counts is not None
    assert ((counts > 0).sum(0) == 1).all()
    assert (counts > 0).sum(1).sort().values.tolist() == [1, 1, 2]
    letters = [set(b"xyz"), set(b"abc"), set(b"def"), set("éß語".encode())]
    for worker in range(3):
        own = set().union(*(letters[i] for i in counts[worker].nonzero().flatten().tolist()))
        assert set(words(task, worker).tolist()) <= own | {END, ord(" "), ord("\n")}
    counts = make(texts, n_workers=4, batch_size=1, decentralized=True).label_counts()
    assert counts is not None
    topics = [topic for row in counts for topic in row.nonzero().flatten().tolist()]
    assert topics == sorted(topics)
    kept = make(texts, n_workers=3, batch_size=2, reshuffle=False)
    alone = kept.batch(0, 0, 0, frozenset({1, 2}))[0]
    assert alone.shape == (2, 9)
    assert not torch.equal(alone, kept.batch(0, 0, 0)[0])


# Loss and evaluation.


class Constant(LanguageModel):
    """Each token has the same probabilities, whatever is before it."""

    def __init__(self, probabilities: Tensor) -> None:
        super().__init__()
        self.scores = torch.nn.Parameter(probabilities.log())

    def forward(self, words: Tensor, state: State) -> tuple[Tensor, State]:
        return self.scores.expand(*words.shape, -1), {}


class Successor(LanguageModel):
    """b follows a, c follows b, a follows c."""

    def forward(self, words: Tensor, state: State) -> tuple[Tensor, State]:
        successors = torch.where(words == ord("c"), ord("a"), words + 1)
        return 100.0 * functional.one_hot(successors, 256), {}


@pytest.mark.parametrize("most", [50, 10**9])
def test_bits_per_byte_are_the_code_length_of_the_evaluated_text(
    texts: Path, tokenizer: str, most: int
) -> None:
    task = make(texts, task_options={"tokenizer": tokenizer, "evaluation_tokens": most})
    file = token_files.load(documents.find(str(texts), None), tokenizer, options(task="Text"))
    p = torch.rand(len(file.tokenizer.byte_counts)).softmax(0)
    model = Constant(p)
    everything, _ = make(texts, task_options={"tokenizer": tokenizer}).streams("test")
    inputs, targets = task.streams("test")
    assert inputs.shape == targets.shape
    assert targets.numel() <= max(most, 9)  # from the whole split
    assert torch.equal(
        inputs, everything[torch.arange(len(inputs)) * len(everything) // len(inputs)]
    )
    n_bytes = file.tokenizer.byte_counts[targets.numpy()].sum()
    expected = -p[targets].double().log2().sum().item() / n_bytes
    for n in (1, 3, 100):
        parts = [task.evaluate(model, "test", (i, n)) for i in range(n)]
        count = sum(part["count"] for part in parts)
        assert count == targets.numel()
        found = sum(part["bits_per_byte"] for part in parts) / count
        assert found == pytest.approx(expected, rel=1e-6)
    assert tasks.main_metric(task, list(parts[0])) == tasks.MainMetric("bits_per_byte", False)
    if most == 10**9 and tokenizer == "bytes":  # all documents for testing, without the remainders
        (piece, *more) = file.pieces["test"]
        assert not more
        text = "".join(read(file, piece.first, piece.last)).encode()
        assert len(text) - 9 <= n_bytes <= len(text)


def test_a_gpt_in_bf16_is_that_in_float32_to_rounding(texts: Path) -> None:
    model = make(texts).model("GPT", seed=1)
    inputs = torch.randint(256, (4, 9))
    with torch.autocast("cpu", torch.bfloat16):
        scores, _ = model(inputs, {})
    assert scores.dtype == torch.bfloat16
    torch.testing.assert_close(scores.float(), model(inputs, {})[0], atol=0.02, rtol=0.05)


def test_a_sample_continues_its_prompt_and_depends_on_the_seed(texts: Path) -> None:
    def sample(**changes: Any) -> str | None:
        task = make(texts, task_options={"sample": "éa"}, **changes)
        return task.sample(task.model("GPT", seed=1))

    first = sample()
    assert first is not None
    assert first.startswith("éa")
    assert len(first) > 200
    assert sample() == first
    assert sample(seed=2) != first
    task = make(texts, task_options={"sample": "a"})
    assert task.sample(Successor()) == "a" + ("bca" * 134)[:400]
    assert make(texts).sample(Successor()) is None


# The cache.


def test_tokens_are_read_from_the_cache(
    texts: Path, cache: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: Any = {"task_options": {"tokenizer": tokenizer}}
    first = make(texts, **given)
    with monkeypatch.context() as patch:
        patch.setattr(documents.Documents, "read", None)
        assert make(texts, n_workers=3, **given).facts == first.facts
    assert len(list(cache.iterdir())) == 2
    (texts / "a" / "0.txt").write_text("abc" * 50)
    assert make(texts, **given).facts != first.facts
    assert "valid" in make(texts, validation_ratio=0.3, **given).samples


PROGRAM = """
import os, signal, sys
from powergossip import tasks
from powergossip.tasks.tokenizers import Bytes
folder, last = sys.argv[1], int(sys.argv[2])
encode, calls = Bytes.encode, []
def encoded(self, content):
    calls.append(1)
    if len(calls) == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(self, content)
Bytes.encode = encoded
found = tasks.make("Text", n_workers=1, batch_size=1, seed=1,
                   task_options={"dataset": folder, "sequence_length": 9})
print(found.facts["tokens_sha256"])
"""


def test_a_killed_process_and_concurrent_ones_leave_whole_files(
    texts: Path, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(last: int) -> tuple[int, str]:
        ended = launch.python(tmp_path / "program.py", texts, str(last))
        return ended.returncode, ended.stdout.strip()

    assert run(last=20)[0] != 0
    assert not list(cache.glob("[!.]*"))
    with ThreadPoolExecutor() as threads:
        found = set(threads.map(run, [0, 0, 0]))
    assert found == {(0, make(texts).facts["tokens_sha256"])}
    assert len(list(cache.glob("[!.]*"))) == 2


def test_damaged_files_of_the_cache_are_made_again(
    tokenizer: str, texts: Path, cache: Path
) -> None:
    options = {"tokenizer": tokenizer}
    first = make(texts, task_options=options)
    whole = files_below(cache)
    for name in [name for name, content in whole.items() if content is not None]:
        for kind in DAMAGES:
            damage(cache / name, kind)
            assert make(texts, task_options=options).facts == first.facts
            assert files_below(cache) == whole


def test_folders_of_killed_processes_are_removed(texts: Path, cache: Path) -> None:
    """Those that did not change for a day. Others may be of processes that still write."""
    for name, age in (("old", 10**5), ("new", 0)):
        place = cache / f".incomplete-{name}"
        place.mkdir(parents=True)
        (place / "tokens.bin").write_text("")
        for path, since in ((place / "tokens.bin", 10**5), (place, age)):
            os.utime(path, (time.time() - since, time.time() - since))
    make(texts)
    assert [path.name for path in cache.glob(".*")] == [".incomplete-new"]


# Bad input.


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"task_options": {"dataset": "absent"}}, "task_options.dataset=absent"),
        ({"task_options": {"dataset": ""}}, "task_options.dataset="),
        ({"task_options": {"tokenizer": "words"}}, "task_options.tokenizer=words"),
        ({"task_options": {"tokenizer": "bpe-256"}}, "task_options.tokenizer=bpe-256"),
        ({"task_options": {"evaluation_tokens": 0}}, "task_options.evaluation_tokens=0"),
        ({"length": 500}, r"task_options.sequence_length=500: use \d+ or less; .* split test"),
        ({"length": 3000}, r"task_options.sequence_length=3000: use \d+ or less, .* document"),
        ({"column": "label"}, "decentralized_data_column=label: use topic"),
        ({"column": "topic", "n_workers": 5}, "n_workers=5: use 4"),
        ({"validation_ratio": 0.99}, "validation_ratio=0.99"),
    ],
)
def test_values_that_do_not_fit_are_rejected(texts: Path, changes: Any, key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}"):
        make(texts, **changes)


def test_texts_that_are_none_are_rejected(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in (b"\xff\xfe", b"a\0b"):
        (texts / "b" / "binary").write_bytes(content)
        with pytest.raises(ValueError, match=f"^{texts}/b/binary is no text in UTF-8: "):
            make(texts)
    (texts / "b" / "binary").unlink()
    for path in list(texts.rglob("*.txt"))[1:]:
        path.write_text("")
    with pytest.raises(ValueError, match=f"^task_options.dataset={texts}: use 2 or more different"):
        make(texts)
    monkeypatch.setattr(documents, "LINUX_DOC", texts / "absent")
    with pytest.raises(ValueError, match=r"^task_options.dataset=linux-doc: .*linux-doc-6.1"):
        make(texts, task_options={"dataset": "linux-doc"})


def test_byte_pairs_that_cannot_be_made_and_a_cache_that_cannot_be_written_are_rejected(
    texts: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(ValueError, match=r"^task_options.tokenizer=bpe-300 needs .* bytes$"):
            make(texts, task_options={"tokenizer": "bpe-300"})
    with monkeypatch.context() as patch:
        (tmp_path / "file").write_text("")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        with pytest.raises(ValueError, match=r"cannot be written: .*XDG_CACHE_HOME"):
            make(texts)
    pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match=r"^task_options.tokenizer=bpe-90000: use bpe-\d+ or less"):
        make(texts, task_options={"tokenizer": "bpe-90000"})
    assert not [*cache.iterdir()]


@pytest.mark.parallel([2])
def test_processes_with_different_documents_are_rejected(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process has a folder and a cache of its own."""
    monkeypatch.chdir(texts.parent)
    who = processes()
    if who.rank == 1:
        path = texts / "a" / "0.txt"
        path.write_text(path.read_text()[::-1])
    of_task = {"dataset": f"./{texts.name}", "sequence_length": 9, **SMALL}
    config = configured(task="Text", task_architecture="GPT", n_workers=2, task_options=of_task)
    with pytest.raises(BadInput, match=r"^the facts tokens_sha256 .* in process 1"):
        Trainer(checked(config, who), who)


# A run.


@pytest.mark.usefixtures("fresh")
def test_a_run_has_bits_per_byte_tokens_per_second_and_a_sample(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("powergossip.runs.progress.INTERVAL", 0.0)
    monkeypatch.setattr(figures, "figure", lambda *_, **__: None)
    options = f"dataset: {texts}, sequence_length: 9, hidden_size: 8, num_layers: 1, sample: ab"
    given = ["task=Text", f"task_options={{{options}}}", "n_workers=2", "num_epochs=1"]
    given += ["max_steps_per_epoch=3", "evaluate_average_model=false"]
    folder = tmp_path / "run"
    entry.main([*given, "--output-dir", str(folder)])
    printed = capsys.readouterr()
    assert "tokens/s" in printed.err
    text = (folder / "sample.txt").read_text()
    assert text.startswith("ab")
    task = make(texts, seed=entry.config.seed, task_options={"sample": "ab", "num_heads": 4})
    assert text != task.sample(task.model("GPT", entry.config.seed)), "not the initial model"
    assert all(character.isprintable() or character in "\n\t" for character in text)
    assert text in printed.out
    rows = metrics.load(folder)
    assert sorted(select(rows, "bits_per_byte", split="test")["worker"]) == [0, 1]
    info = json.loads((folder / "info.json").read_text())
    assert len(info["tokens_sha256"]) == 64
    assert info["metric"] == {"name": "bits_per_byte", "larger_is_better": False}
    entry.main(["evaluate_only=true", "--output-dir", str(folder), *given[:-1]])
    assert text in capsys.readouterr().out
    (changed, *_) = sorted(texts.rglob("*.*"))
    changed.write_text(changed.read_text().upper())
    for key in ("evaluate_only=true", "resume=true"):
        with pytest.raises(BadInput, match="the documents have changed"):
            entry.main([key, "--output-dir", str(folder), *given[:-1]])
        assert json.loads((folder / "info.json").read_text()) == info
