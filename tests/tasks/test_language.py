"""Laws of language modeling: how texts become words, streams and batches; what is carried."""

import copy
import math
import re
import sys
import types
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

import train as entry
from powergossip import tasks
from powergossip.network import Processes
from powergossip.randomness import generator
from powergossip.tasks import language, texts
from powergossip.tasks.language import LanguageModeling
from powergossip.tasks.language_models import LSTM, LanguageModel
from powergossip.tasks.task import Split, TaskOptions
from powergossip.training.config_checks import checked
from tests.harness import small_data


def options(**changes: Any) -> TaskOptions:
    return small_data.options(**({"task": "LSTM", "n_workers": 3, "batch_size": 4} | changes))


def corpus(n_train: int, n_test: int = 500, n_words: int = 20) -> texts.Corpus:
    """Texts of random words."""
    random = generator(0, "test")
    vocabulary = tuple(map(str, range(n_words)))
    train, test = (torch.from_numpy(random.integers(0, n_words, n)) for n in (n_train, n_test))
    return texts.Corpus(vocabulary, {"train": train, "test": test})


def numbered_task(
    n_train: int, length: int = 5, padding: int | None = None, **changes: Any
) -> LanguageModeling:
    """The i-th word of the training text is the number i."""
    words = {"train": torch.arange(n_train), "test": torch.arange(9)}
    corpus = texts.Corpus(("",), words, padding)  # type: ignore[arg-type]
    return LanguageModeling(corpus, length, options(**changes), {})


def small_task(length: int = 5, dropout: float = 0.3, **changes: Any) -> LanguageModeling:
    size = {"hidden_size": 8, "num_layers": 2, "dropout": dropout}
    return LanguageModeling(corpus(600), length, options(**changes), size)


ARCHITECTURES = ["LSTM", "GPT"]


def model_of(task: LanguageModeling, architecture: str) -> LanguageModel:
    model = task.model(architecture, seed=1)
    assert isinstance(model, LanguageModel)
    return model


# Streams and batches.


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("n_train", "n_workers", "batch_size"), [(103, 3, 4), (1000, 7, 3), (48, 2, 4)]
)
def test_sequences_follow_each_other_in_contiguous_streams(
    n_train: int, n_workers: int, batch_size: int, drop_last: bool
) -> None:
    task = numbered_task(n_train, n_workers=n_workers, batch_size=batch_size, drop_last=drop_last)
    shortest = n_train // n_workers // batch_size
    full = 5 * ((shortest - 1) // 5)
    seen: list[Tensor] = []
    for worker in range(n_workers):
        steps = [task.batch(worker, 0, step) for step in range(task.steps_per_epoch)]
        words = torch.cat([words for words, _, _ in steps], 1)
        # The last sequence has all further words that all workers have, and at most one more.
        assert len(words) == batch_size
        if drop_last:
            assert words.shape[1] == full
        else:
            in_stream = (n_train * (worker + 1) // n_workers - n_train * worker // n_workers) // (
                batch_size
            )
            assert words.shape[1] == min(in_stream - 1, 5 * task.steps_per_epoch)
            assert words.shape[1] >= shortest - 1
        assert torch.equal(words, words[:, :1] + torch.arange(words.shape[1]))
        assert torch.equal(torch.cat([targets for _, targets, _ in steps], 1), words + 1)
        assert [bool(begins) for _, _, begins in steps] == [True] + [False] * (len(steps) - 1)
        first, last = n_train * worker // n_workers, n_train * (worker + 1) // n_workers
        assert words.min() == first
        assert words.max() + 1 < last  # the targets are the worker's own too
        seen.append(words.flatten())
    everything = torch.cat(seen)
    assert len(everything.unique()) == len(everything)


def test_streams_are_padded_so_that_no_word_is_left_out() -> None:
    """The 51 words of a worker are in 4 streams of 13, as in the published program."""
    task = numbered_task(102, padding=-7, n_workers=2, batch_size=4)
    assert task.steps_per_epoch == 3
    steps = [task.batch(1, 0, step) for step in range(3)]
    words, targets = (torch.cat([batch[i] for batch in steps], 1) for i in (0, 1))
    assert words.shape == targets.shape == (4, 12)
    streams = torch.cat([words, targets[:, -1:]], 1)
    assert torch.equal(streams.flatten(), torch.tensor([*range(51, 102), -7]))
    assert numbered_task(102, n_workers=2, batch_size=4).batch(1, 0, 2)[0].shape == (4, 1)


def test_sizes_that_do_not_fit_are_rejected_in_sequences() -> None:
    """72 words for each of two workers: 12 sequences of 5 words with one after each."""
    assert numbered_task(144, n_workers=2, batch_size=12).steps_per_epoch == 1
    with pytest.raises(
        ValueError,
        match=r"^batch_size=13: use batch_size ≤ 12 or n_workers ≤ 1; 24 sequences of 5 words for "
        r"2 workers",
    ):
        numbered_task(144, n_workers=2, batch_size=13)


@pytest.mark.parametrize("n_workers", [1, 2, 3])
def test_whatever_is_accepted_has_a_step(n_workers: int) -> None:
    for n_words, batch_size in product(range(6, 80, 3), (1, 2, 5)):
        try:
            task = numbered_task(n_words, n_workers=n_workers, batch_size=batch_size)
        except ValueError:
            assert n_words // n_workers // batch_size < 6
            continue
        assert task.steps_per_epoch >= 1
        for worker in range(n_workers):
            words, targets, _ = task.batch(worker, 0, task.steps_per_epoch - 1)
            assert words.shape == targets.shape
            assert words.numel() > 0
            assert task.batch(worker, 0, 0)[0].shape == (batch_size, 5)


# What is carried.


def test_a_state_is_carried_within_an_epoch() -> None:
    """It is one model's own, no part of its parameters, and has no graph."""
    task = small_task(dropout=0.0)
    model, other = model_of(task, "LSTM"), model_of(task, "LSTM")
    assert task.carried(model) == {}
    losses = [task.loss(model, task.batch(1, epoch, 0))[0].item() for epoch in (0, 1)]
    assert losses[0] == losses[1], "forgotten where an epoch begins"
    kept = task.carried(model)
    assert {name: value.shape for name, value in kept.items()} == {
        "hidden": (2, 4, 8),
        "cell": (2, 4, 8),
    }
    before = copy.deepcopy(kept)
    second, fresh = (task.loss(m, task.batch(1, 0, 1))[0] for m in (model, other))
    assert second.item() != fresh.item(), "without it, a run would not continue"
    for loss in (second, fresh):
        loss.backward()  # to the start of the sequence only, or it would fail
    assert task.carried(other).keys() == kept.keys()
    assert not any(value.requires_grad for value in task.carried(model).values())
    assert all(torch.equal(kept[name], before[name]) for name in before)
    assert not torch.equal(task.carried(model)["hidden"], before["hidden"])
    assert not list(model.buffers())
    assert set(model.state_dict()) == set(task.model("LSTM", 2).state_dict())


# Loss and evaluation.


@pytest.mark.parametrize("length", [3, 5, 100])
def test_an_evaluation_is_over_every_word_but_the_first(length: int) -> None:
    """In 64 streams. The state is carried through each, so that to an LSTM the length of sequences
    does not matter."""
    task = small_task(length, n_workers=1, batch_size=1)
    model = model_of(task, "LSTM").eval()
    text = corpus(600).splits["test"]
    expected: dict[str, float] = {"cross_entropy": 0.0, "accuracy": 0.0, "count": 499.0}
    for first in range(0, 499, 8):  # ⌈499 / 64⌉ in a stream
        words = text[first : first + 8 + 1]
        scores = model(words[None, :-1], {})[0][0].detach()
        chances = scores.softmax(1)[torch.arange(len(words) - 1), words[1:]]
        expected["cross_entropy"] -= chances.log().sum().item()
        expected["accuracy"] += (scores.argmax(1) == words[1:]).sum().item()
    assert task.evaluate(model) == pytest.approx(expected)


@pytest.mark.parametrize(("n_parts", "n_test"), [(5, 40), (100, 2)])
def test_parts_of_an_evaluation_add_up(n_parts: int, n_test: int) -> None:
    """Also of fewer words than parts, of which some have none."""
    task = LanguageModeling(corpus(600, n_test), 5, options(), {"hidden_size": 8})
    for architecture in ARCHITECTURES:
        model = model_of(task, architecture)
        sizes: list[int] = []
        model.register_forward_pre_hook(lambda _, inputs, sizes=sizes: sizes.append(len(inputs[0])))
        whole = task.evaluate(model)
        assert whole["count"] == n_test - 1
        parts = [task.evaluate(model, "test", (i, n_parts)) for i in range(n_parts)]
        for name, value in whole.items():
            assert sum(part[name] for part in parts) == pytest.approx(value)
        assert min(sizes) > 0  # which some libraries do not take
        assert task.evaluate(model, "train")["count"] == 599


def test_perplexity_is_derived_from_the_mean() -> None:
    task = small_task()
    assert task.derived({"cross_entropy": 1e4}) == {"perplexity": math.inf}
    assert math.isnan(task.derived({"cross_entropy": math.nan})["perplexity"])


# Words.


def test_a_vocabulary_is_of_the_words_seen_often_enough_in_training() -> None:
    train = ["b", "a", "b", "c", "b", "a", "d"]
    words = texts.indexed({"train": train, "test": ["a", "d", "e", "b"]}, min_count=2)
    assert words.vocabulary == ("b", "a", "<unk>")
    assert words.splits["train"].tolist() == [0, 1, 0, 2, 0, 1, 2]
    assert words.splits["test"].tolist() == [1, 2, 2, 0]
    everything = texts.indexed({"train": train, "test": ["a", "e"]}, min_count=1)
    assert everything.vocabulary == ("b", "a", "c", "d", "<unk>")
    few: dict[Split, list[str]] = {"train": ["a", "<unk>"], "test": ["b", "a"]}
    assert texts.indexed(few, 1).vocabulary == ("<unk>", "a")
    padded = texts.indexed(few, 1, padding=True)
    assert padded.vocabulary == ("<unk>", "a", "<pad>")
    assert padded.padding == 2


def test_tokens_of_plain_text_and_lines_of_words() -> None:
    """A line of words ends also where it is blank."""
    assert texts.split_lines(" a  b \n \nc d\n") == ["a", "b", "<eos>", "<eos>", "c", "d", "<eos>"]
    assert texts.split_lines("a\n") == texts.split_lines("a") == ["a", "<eos>"]
    assert texts.split_lines("") == []
    text = 'The "for_each" loop (x1 = 2.50)...\n\n  \n>>> Ça va?\n'
    assert texts.tokens(text) == [
        *("the", '"', "for_each", '"', "loop", "(", "x", "1", "=", "2", ".", "50", ")", "..."),
        "<eos>",
        *(">>>", "ça", "va", "?"),
        "<eos>",
    ]


# Topics.


SPLITS: list[dict[str, Any]] = [{"decentralized": True}, {"reshuffle": False}, {"seed": 2}]


@pytest.mark.long
def test_topics_load_alike() -> None:
    arguments: Any = {"n_workers": 4, "batch_size": 8, "seed": 1}
    task, again = (tasks.make("LSTM", **arguments) for _ in range(2))
    first = task.batch(0, 0, 0)
    for batch in (
        again.batch(0, 3, 0),  # in any epoch, and with every partition
        *(
            language.task(options(n_workers=4, batch_size=8, **split)).batch(0, 0, 0)
            for split in SPLITS
        ),
    ):
        assert all(torch.equal(a, b) for a, b in zip(first, batch, strict=True))
    with pytest.raises(ValueError, match=r"^decentralized_data_shuffled_ratio=0.1: use 0; "):
        language.task(options(decentralized=True, shuffled_ratio=0.1))
    assert first[0].shape == (8, 30)
    assert task.label_counts() is None


def test_topics_for_testing_are_not_trained_on() -> None:
    splits = texts.topics(options())
    train, test = splits["train"], splits["test"]
    assert 50_000 < len(train) < 500_000
    assert 0.03 < len(test) / (len(train) + len(test)) < 0.2
    trained, tested = (" ".join(words).split(" <eos> ") for words in (train, test))
    common = [line for line in set(trained) & set(tested) if len(line.split()) >= 10]
    # Whole paragraphs have only one place; a long line of another one is rarely the same.
    assert len(common) <= 0.01 * len(tested)
    names = ("assert", "class", "for", "types", "with")
    assert [name for name in names if texts.is_test_topic(name)] == ["class", "for", "with"]


# Files.

WIKI = {
    "wiki.train.tokens": " \n = Title = \n \n The cat , the <unk> . \n The end . \n",
    "wiki.valid.tokens": " \n The CAT can't . \n",
    "wiki.test.tokens": " \n The dog . \n",
}


def write_files(folder: Path, contents: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_text(content)


def make(folder: Path | None, dataset: str, **changes: Any) -> tasks.Task:
    arguments: dict[str, Any] = {"n_workers": 1, "batch_size": 1, "seed": 1, "download": False}
    choices = {"dataset": dataset, "sequence_length": 3, "hidden_size": 8} | changes
    return tasks.make("LSTM", data_dir=folder, **arguments, task_options=choices)


@pytest.mark.parametrize("inside", ["", "wikitext-2", "LSTM/wikitext-2"])
def test_files_of_words_are_read(tmp_path: Path, inside: str) -> None:
    """Words as they are, all of the training text's in the vocabulary."""
    write_files(tmp_path / inside, WIKI)
    task, n_train, n_test, n_words = make(tmp_path, "wikitext2"), 17, 5, 10
    for architecture in ARCHITECTURES:
        model = task.model(architecture, seed=1)
        assert next(model.parameters()).shape[0] == n_words
        assert task.evaluate(model)["count"] == n_test - 1
        assert task.evaluate(model, "train")["count"] == n_train - 1
    rarer = make(tmp_path, "wikitext2", min_count=2).model("LSTM", seed=1)
    assert next(rarer.parameters()).shape[0] < n_words


def words(folder: Path, dataset: str, **changes: Any) -> dict[Split, list[str]]:
    return texts.TEXTS[dataset](options(data_dir=folder), **changes)


def test_the_text_of_the_test_rows_is_chosen(tmp_path: Path) -> None:
    """The validation text is used where it is asked."""
    write_files(tmp_path / "LSTM" / "wikitext-2", WIKI)
    test, valid = ["<eos>", "The", "dog", ".", "<eos>"], ["The", "CAT", "can't", ".", "<eos>"]
    plain = words(tmp_path, "wikitext2")
    assert set(plain) == {"train", "test"}
    assert plain["test"] == test
    lower = words(tmp_path, "wikitext2", lower=True)
    assert {split: [word.lower() for word in plain[split]] for split in plain} == lower
    published = words(tmp_path, "wikitext2", evaluation="validation")
    assert set(published) == {"train", "test"}
    assert published["test"] == ["<eos>", *valid]
    both = words(tmp_path, "wikitext2", validation_text=True)
    assert (both["valid"], both["test"]) == (["<eos>", *valid], test)
    task = make(tmp_path, "wikitext2", validation_text=True)
    assert task.samples == {"train": 17, "valid": 6, "test": 5}
    assert task.evaluate(task.model("LSTM", 1), "valid")["count"] == 5
    chosen = {"dataset": "wikitext2", "sequence_length": 2, "validation_text": True}
    here: dict[str, Any] = {"data_dir": tmp_path, "n_workers": 1, "batch_size": 1}
    for ratio, more in ((0.2, {}), (0.0, {"evaluation": "validation"})):
        with pytest.raises(ValueError, match=r"^(validation_ratio|task_options.validation_text)="):
            language.task(options(**here, validation_ratio=ratio, task_options=chosen | more))


@pytest.fixture(params=["stand-in", "installed"])
def spacy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """spaCy, or a stand-in that knows what the texts of these tests contain."""
    if request.param == "installed":
        pytest.importorskip("spacy")
        return
    special: list[str] = []

    def tokenizer(line: str) -> list[types.SimpleNamespace]:
        assert not line.endswith("\n")
        pattern = "|".join(map(re.escape, special)) + r"|^ |n't|ca(?=n't)|\w+|[^\w\s]"
        return [types.SimpleNamespace(text=word) for word in re.findall(pattern, line)]

    def add_special_case(word: str, tokens: list[dict[str, str]]) -> None:
        assert tokens == [{"ORTH": word}]
        special.append(word)

    tokenizer.add_special_case = add_special_case  # type: ignore[attr-defined]
    stand_in: Any = types.ModuleType("spacy")
    stand_in.blank = lambda language: types.SimpleNamespace(tokenizer=tokenizer)
    symbols: Any = types.ModuleType("spacy.symbols")
    symbols.ORTH = "ORTH"
    monkeypatch.setitem(sys.modules, "spacy", stand_in)
    monkeypatch.setitem(sys.modules, "spacy.symbols", symbols)


@pytest.mark.usefixtures("spacy")
def test_words_of_spacy_are_those_of_the_published_program(tmp_path: Path) -> None:
    """A blank at the start of a line is a word. Lower case comes after tokenization."""
    write_files(tmp_path, WIKI)
    chosen = {"tokenizer": "spacy", "evaluation": "validation"}
    found = words(tmp_path, "wikitext2", lower=True, **chosen)
    assert found["test"] == [" ", "<eos>", " ", "the", "cat", "ca", "n't", ".", "<eos>"]
    assert found["train"][:7] == [" ", "<eos>", " ", "=", "title", "=", "<eos>"]
    assert found["train"][9:17] == [" ", "the", "cat", ",", "the", "<unk>", ".", "<eos>"]
    upper = words(tmp_path, "wikitext2", **chosen)
    assert upper["test"][3:5] == ["The", "CAT"]
    # The vocabulary of the published program also has the word of its padding.
    task = make(tmp_path, "wikitext2", lower=True, padding=True, **chosen)
    model = task.model("LSTM", seed=1)
    assert next(model.parameters()).shape[0] == len({*found["train"], "<unk>", "<pad>"})


def test_keys_without_effect_on_text_give_a_warning_unless_they_are_given() -> None:
    def settings(*explicit: str, **changes: Any) -> Any:
        config = OmegaConf.merge(OmegaConf.structured(entry.Config), {"task": "LSTM"}, changes)
        return checked(config, Processes(), explicit)  # type: ignore[arg-type]

    for key in ("use_decentralized_data", "reshuffle_data"):
        settings(key, **{key: False})
    with pytest.warns(UserWarning, match="task=LSTM has no such option: use_decentralized_data"):
        c = settings(use_decentralized_data=True)
    assert c.drop_last is False, "as for other text"
    settings(reshuffle_data=True)  # its default


def test_damaged_texts_and_a_missing_library_are_rejected_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path, WIKI)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "spacy", None)
        with pytest.raises(ValueError, match=r"^task_options.tokenizer=spacy needs .* blanks$"):
            make(tmp_path, "wikitext2", tokenizer="spacy")
    test = tmp_path / "wiki.test.tokens"
    for content, words in (
        (b"caf\xe9 \n", "wiki.test.tokens is damaged, or no text in UTF-8"),
        (b" \n", "wiki.test.tokens holds 1 words: use 2 or more$"),
    ):
        test.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            make(tmp_path, "wikitext2")
    test.unlink()
    with pytest.raises(ValueError, match=r"^data_dir=.*: use a folder with wiki.test.tokens$"):
        make(tmp_path, "wikitext2")


# Options.


@pytest.mark.long
def test_options_set_the_sizes_of_models() -> None:
    """The default model of the short text is small."""

    def model(architecture: str, **task_options: Any) -> nn.Module:
        arguments: Any = {"n_workers": 1, "batch_size": 1, "seed": 1}
        task = tasks.make("LSTM", **arguments, task_options=task_options)
        return task.model(architecture, seed=1)

    n_words = []
    for given, expected in (
        ({}, (128, 1, 0.2)),
        ({"min_count": 3}, (128, 1, 0.2)),
        ({"min_count": 9, "hidden_size": 8, "num_layers": 2, "dropout": 0.25}, (8, 2, 0.25)),
    ):
        lstm = model("LSTM", **given)
        assert isinstance(lstm, LSTM)
        assert (lstm.rnn.hidden_size, lstm.rnn.num_layers, lstm.dropout.p) == expected
        n_words.append(len(lstm.encoder.weight))
    assert n_words[0] == n_words[1] > n_words[2], "rare words of topics are unknown"
    gpt = model("GPT", hidden_size=12, num_heads=3, num_layers=5)
    names = {name: tuple(value.shape) for name, value in gpt.named_parameters()}
    assert names["blocks.4.attended.weight"] == (12, 12)
    assert "blocks.5.attended.weight" not in names
