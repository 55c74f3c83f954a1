"""powergossip-benchmark: what is the same for all entries, the results, and their comparison."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import train
from powergossip import algorithms, compressors, topologies
from powergossip.algorithms import AVERAGING
from powergossip.algorithms.learning import DEFAULT
from powergossip.benchmark import (
    command_line,
    comparison,
    data,
    entries,
    entry_runs,
    library,
    page,
    results,
    tasks,
)
from powergossip.benchmark.campaign import Campaign, score
from powergossip.benchmark.comparison import Line, pair
from powergossip.benchmark.tasks import QUICK, SEEDS, TASKS, TRIES, Values
from powergossip.errors import BadInput
from powergossip.network import ToAll
from powergossip.parameters import Layout
from powergossip.runner import runner
from powergossip.runner.jobs import Job
from powergossip.runner.runner import yaml_text
from powergossip.runs import figures, metrics
from powergossip.state_trees import sha256
from tests.harness import launch, small_data
from tests.harness.benchmarking import Half, entry_of, line, result, written
from tests.harness.launch import ROOT
from tests.harness.on_device import ring

# --- Entries --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ([], "no SETTINGS"),
        ([{"learning_rate": 0.1}], 'each with the key "optimizer"'),
        ([{"optimizer": "half", "seed": 7}], "the key seed is unknown or belongs"),
        ({"fashion": [{"optimizer": "half"}]}, 'SETTINGS has "fashion"; use consensus_random'),
        (
            {"consensus": [{"optimizer": "half", "learning_rate": 1}]},
            "learning_rate is unknown or belongs",
        ),
        ([{"optimizer": "half", "learning_rate": i} for i in range(9)], "has 9 settings; use 8"),
        ({"text": []}, "no setting of any task"),
        ([{"optimizer": "half", "learnig_rate": 1}], "the key learnig_rate is unknown"),
        ([{"optimizer": "half", 3: 1}], "the key 3 is unknown"),
        ([{"optimizer": "half", "learning_rate": float("1e999")}], "Out of range float"),
    ],
)
def test_what_an_entry_may_not_have(settings: object, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=sentence):
        entries.find(str(written(tmp_path, settings)))


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("raise SystemExit", "ends the program"),
        ("def wrong():\n    return 1 / 0\n\nwrong()", "mine.py, line 2: ZeroDivisionError"),
        ("import sys\nimport nonsense", "mine.py, line 2: ModuleNotFoundError: No module named"),
        ("[", r"mine.py, line 1: SyntaxError: '\[' was never closed \(mine.py, line 1\)"),
    ],
)
def test_what_a_file_may_not_do(code: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"{code}\nSETTINGS = [{{'optimizer': 'dpsgd'}}]")
    with pytest.raises(BadInput, match=sentence):
        entries.find(str(path))


def test_settings_of_all_tasks_are_those_of_consensus_without_learning(tmp_path: Path) -> None:
    """A learning rule has no messages of its own: its agreement would be the averaging rule's."""
    both = [{"optimizer": "half", "learning_rate": rate} for rate in (0.1, 0.2)]
    lists: Any = {"all": both, "text": both[1:], "text_topics": both[:1]}
    entry = entries.find(str(written(tmp_path, lists)))
    assert entry.settings["consensus_random"] == [{"optimizer": "half"}]
    assert entry.settings["fashion_mnist_late"] == both
    assert entry.settings["text_same"] == both[1:]
    assert entry.settings["text_topics"] == both[:1]
    plain, tracking = ({"optimizer": "dpsgd", "learning": name} for name in (DEFAULT, "k-gt"))
    for lists, expected in (([tracking], None), ([tracking, plain], [{"optimizer": "dpsgd"}])):
        entry = entries.find(str(written(tmp_path, lists)))
        assert entry.settings.get("consensus_random") == expected


def test_an_option_may_be_called_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(Half):
        def __init__(self, network: Any, layout: Any, *, name: str = "a") -> None:
            self.name = name

    monkeypatch.setitem(AVERAGING, "named", Named)
    found: Any = algorithms.make("named", ring(torch.device("cpu")), Layout([(2,)]), name="b")
    assert found.name == "b"


def test_the_options_of_a_row_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an averaging rule and of a compressor, by the keys of train.py in each task."""
    monkeypatch.setitem(compressors.COMPRESSORS, "own", compressors.Identity)
    half: Values = {"optimizer": "half"}
    own: Values = {"optimizer": "choco", "optimizer_compressor": "own"}
    entries.find(str(written(tmp_path, [half])))
    for name in ("consensus_random", "text_same"):
        for good in ({**half, "optimizer_weight": 0.25}, own):
            entry_runs.check(TASKS[name], QUICK, good)
        for wrong in (half, own):
            with pytest.raises(BadInput, match=r"wait=.* has no such option"):
                entry_runs.check(TASKS[name], QUICK, {**wrong, "optimizer_wait": 1})


@pytest.mark.parametrize("each", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_settings_of_the_library_are_accepted(each: int) -> None:
    """Settings of a group differ in rates only, and its tasks in data."""
    names = ["consensus_random", "fashion_mnist_same", "fashion_mnist_late", "text_same"]
    for i, name in enumerate(library.ENTRIES):
        entry = entries.find(name)
        for task in [*names, *names][i % 4 : i % 4 + each]:
            if task in entry.settings:
                entry_runs.check(TASKS[task], QUICK, entry.settings[task][0])


# --- Runs -----------------------------------------------------------------------------------------

TINY: dict[str, Values] = {
    "consensus_random": {"steps": 40, "size": 8},
    "text_same": {
        "num_epochs": 2,
        "max_steps_per_epoch": 2,
        "batch_size": 1,
        "task_options": {
            "dataset": str(ROOT / "docs" / "*.md"),
            "sequence_length": 16,
            "hidden_size": 8,
            "num_layers": 1,
            "num_heads": 1,
            "evaluation_tokens": 512,
        },
    },
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, values in TINY.items():
        small = dataclasses.replace(TASKS[name], tiers=dict.fromkeys(tasks.TIERS, values))
        monkeypatch.setitem(TASKS, name, small)


def carried_out(campaign: Campaign) -> None:
    """Both stages, in this process."""
    for stage in campaign.experiment.stages:
        for run in stage(campaign.folder.results):
            folder = campaign.folder.of(run)
            keys = [f"{key}={yaml_text(value)}" for key, value in run.values.items()]
            entry_runs.main([*keys, "--output-dir", str(folder)])
            (folder / "done.json").touch()


def test_a_method_is_tuned_on_held_out_data_and_compared_on_test_data(
    tiny: None, tmp_path: Path
) -> None:
    settings = [
        {"optimizer": "half", "learning_rate": 1e-6},
        {"optimizer": "half", "learning_rate": 0.01, "optimizer_weight": 0.6},
    ]
    path = written(tmp_path, settings)
    entry, output = entries.find(str(path)), tmp_path / "output"
    campaign = Campaign(entry, str(path), QUICK, list(TINY), output)
    assert [task.name for task in campaign.tasks] == list(TINY)
    carried_out(campaign)

    of_text = TASKS["text_same"]
    tuned, final = campaign.tuning(of_text), campaign.final(of_text)
    assert tuned.values["settings"] == settings
    assert len({*tuned.values["seeds"], *final.values["seeds"]}) == 4
    assert final.values["settings"] == settings[1:]  # it learns, the other one does not
    for run, splits in [(tuned, {"valid_avg", "train"}), (final, {"test", "test_avg", "train"})]:
        for folder in campaign.folder.of(run).glob("*-*"):
            assert set(metrics.load(folder)["split"].dropna()) == splits

    found_of_all = campaign.results()
    found = found_of_all["text_same"]
    assert [run["seed"] for run in found["runs"]] == list(SEEDS)
    for of_task in found_of_all.values():
        assert len({run["evaluations"][-1]["mean"] for run in of_task["runs"]}) == len(SEEDS)
    assert [e["step"] for e in found["runs"][0]["evaluations"]] == [2, 4]
    assert found["tried"][0]["score"] < found["tried"][1]["score"]
    for larger, worst in [(False, max), (True, min)]:  # the run is over, and only read again
        of = dataclasses.replace(of_text.measure, larger_is_better=larger)
        folder = campaign.folder.of(final) / "0-1"
        rows = metrics.last_values(metrics.load(folder), of.name, split="test")
        task = dataclasses.replace(of_text, measure=of)
        again = entry_runs.learn(task, task.values_of(QUICK), settings[1], 1, True, folder)
        assert again["evaluations"][-1]["worst"] == worst(rows)
    assert len(found["data"]) == 64
    assert "optimizer_weight: 0.6" in (folder / "config.yaml").read_text()
    (bits,) = metrics.last_values(metrics.load(folder), "merge_bits")
    assert 8e6 * found["merge"] == pytest.approx(bits)
    assert found_of_all["consensus_random"]["setting"]["optimizer_weight"] == 0.6

    saved = results.save(entry, QUICK, found_of_all, output)
    content = results.read(saved)
    shown = page.text([content], QUICK, None, "mine")
    assert "text_same" in shown


def test_a_run_that_is_done_is_not_repeated(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, [{"optimizer": "half"}, {"optimizer": "dpsgd"}])
    campaign = Campaign(entries.find(str(path)), str(path), QUICK, ["consensus_random"], tmp_path)
    done: list[Any] = []
    agree = entry_runs.agree

    def counted(*arguments: Any) -> Any:
        done.append(arguments[2]["optimizer"])
        if done == ["half", "dpsgd"]:
            arguments[-1].mkdir()
            (arguments[-1] / tasks.RESULT).write_text("{")  # half of a file
            raise KeyboardInterrupt
        return agree(*arguments)

    monkeypatch.setattr(entry_runs, "agree", counted)
    with pytest.raises(KeyboardInterrupt):
        carried_out(campaign)
    carried_out(campaign)
    assert done[:3] == ["half", "dpsgd", "dpsgd"]
    assert len(done) == 3 + len(SEEDS)
    tuned = campaign.folder.of(campaign.tuning(TASKS["consensus_random"])) / tasks.RESULT
    tuned.write_text("{")
    with pytest.raises(BadInput, match="damaged; remove its folder"):
        campaign.results()
    equal = [{"diverged": False, "evaluations": [{"mean": -2.0}]}] * 2
    tuned.write_text(json.dumps({"runs": equal}))
    assert campaign.chosen(TASKS["consensus_random"]) == {"optimizer": "half"}  # the first one
    path.write_text(path.read_text() + "# changed\n")
    with pytest.raises(BadInput, match="has changed since"):
        carried_out(campaign)


def test_a_tier_tries_the_first_settings_of_a_version_of_a_task(tmp_path: Path) -> None:
    """Runs of another version are not taken."""
    many = [{"optimizer": "half", "learning_rate": 10.0**-i} for i in range(8)]
    path, task = written(tmp_path, many), TASKS["text_same"]
    entry, newer = entries.find(str(path)), dataclasses.replace(task, version=task.version + 1)
    for tier in tasks.TIERS:
        campaign = Campaign(entry, str(path), tier, ["text_same"], tmp_path)
        run = campaign.tuning(task)
        assert run.values["settings"] == many[: TRIES[tier]]
        assert campaign.tuning(newer).identity != run.identity


def test_a_setting_that_diverges_is_not_chosen() -> None:
    runs = [
        {"diverged": True, "evaluations": [{"mean": -9.0}]},
        {"diverged": False, "evaluations": []},
        {"diverged": False, "evaluations": [{"mean": -1.0}, {"mean": -2.0}]},
    ]
    task = TASKS["consensus_random"]
    assert [score(task, run) for run in runs] == [-math.inf, -math.inf, 2.0]
    diverging: Values = {"optimizer": "choco", "optimizer_diffusion_rate": 50.0}
    found = entry_runs.agree(task, task.values_of(QUICK), diverging, 1, True, Path())
    assert found["diverged"]


def test_training_that_diverges_before_its_first_evaluation_is_a_result(
    tiny: None, tmp_path: Path
) -> None:
    task = TASKS["text_same"]
    values = {**task.values_of(QUICK), "local_optimizer": "sgd", "gradient_clipping": None}
    setting: Values = {"optimizer": "dpsgd", "learning_rate": 1e30}
    for final in (False, True):
        run = entry_runs.learn(task, values, setting, 1, final, tmp_path / str(final))
        assert run["diverged"]
        assert run["evaluations"] == []
        assert {key: train.config[key] for key in values | setting} == values | setting
        assert score(task, run) == -math.inf


def test_the_megabytes_of_agreement_are_those_of_the_busiest_worker_step_by_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D-PSGD on a ring reaches 1e-3 after 14 steps of 80 kB, whatever the number of steps, and ends
    when workers agree."""
    task = TASKS["consensus_random"]
    for tier in tasks.TIERS:
        found = entry_runs.agree(
            task, task.values_of(tier), {"optimizer": "dpsgd"}, 1, True, Path()
        )
        of_run = Line("", task, -3.0, {"runs": [found]})
        reached = next(e for e in found["evaluations"] if e["mean"] <= -3)
        assert of_run.to_target("step") == [reached["step"]]
        assert of_run.to_target("MB")[0] == pytest.approx(0.08 * reached["step"])
        assert 14 <= reached["step"] <= 15
        last = found["evaluations"][-1]
        assert last["worst"] == math.log10(entry_runs.ROUNDING)
        assert last["step"] < 100
    seeds = []

    def star(n_workers: int, seed: int) -> topologies.Topology:
        """Worker 3 has all others as neighbors."""
        seeds.append(seed)
        graph = nx.empty_graph(n_workers)  # the order of nodes is that of workers
        graph.add_edges_from((3, i) for i in range(n_workers) if i != 3)
        return topologies.undirected("hub", graph)

    monkeypatch.setitem(topologies.TOPOLOGIES, "hub", star)
    values = {**task.values_of(QUICK), "steps": 4}
    setting = {"optimizer": "dpsgd", "topology": "hub"}
    run = entry_runs.agree(task, values, setting, 7, True, Path())
    assert run["evaluations"][-1]["MB"] == 4 * 7 * 4e-2
    assert set(seeds) == {7}


def test_the_error_of_agreement_is_the_distance_to_the_mean_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of workers that agree on something else, relative to the start, and 1e-10 or more."""
    task = TASKS["consensus_random"]

    def after(jump: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        class Jump(Half):
            def step(self, x: Tensor) -> Any:
                yield ToAll(x)
                x.copy_(jump(x))

        monkeypatch.setitem(AVERAGING, "jump", Jump)
        values = {**task.values_of(QUICK), "steps": 2}
        return entry_runs.agree(task, values, {"optimizer": "jump"}, 1, True, Path())

    last = after(lambda x: x.double().mean(0).expand_as(x))["evaluations"][-1]
    assert (last["mean"], last["worst"]) == (-10, -10)
    assert after(torch.zeros_like)["evaluations"][-1]["mean"] == pytest.approx(-0.85, abs=0.01)
    last = after(lambda x: x.index_fill(0, torch.arange(7), 0.0))["evaluations"][-1]
    assert last["worst"] > last["mean"] + 0.3
    assert after(lambda x: math.nan * x)["diverged"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("assert x.dim() == 3", r"fails in .*mine.py, line 10: AssertionError: $"),
        ("import sys; sys.exit(0)", "fails in .*mine.py, line 10: SystemExit: 0$"),
        ("raise ValueError('no such rate\\nin two lines')", "line 10: ValueError: no such rate$"),
        ("x.copy_(x.mean(0).expand_as(x))", "learns of another one without a message"),
    ],
)
def test_a_setting_makes_trial_steps(
    line: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What trials find is in tests/training/test_trials.py. An error is one line, with its place in
    the file."""
    monkeypatch.setitem(AVERAGING, "half", None)
    path = written(tmp_path, [{"optimizer": "half"}])
    path.write_text(
        path.read_text().replace("received = yield", f"{line}\n        received = yield")
    )
    entry = entries.find(str(path))
    for task in ("consensus_random", "text_same"):
        with pytest.raises(BadInput, match=sentence):
            entry_runs.check(TASKS[task], QUICK, entry.settings[task][0])


def test_consensus_has_the_seed_and_the_types_of_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, object]] = []

    class Mine(Half):
        def __init__(self, network: Any, layout: Any, *, seed: int = 0, rank: int = 1) -> None:
            found.append((seed, rank))

        def step(self, x: Tensor) -> Any:
            x.lerp_((yield ToAll(x)).mean(1), 0.5)

    monkeypatch.setitem(AVERAGING, "mine", Mine)
    task, setting = TASKS["consensus_random"], {"optimizer": "mine", "optimizer_rank": 3}
    for seed in (1, 2):
        values = {**task.values_of(QUICK), "steps": 1}
        entry_runs.agree(task, values, setting, seed, True, tmp_path)
    assert found == [(1, 3), (2, 3)]
    with pytest.raises(BadInput, match=r"rank=2\.5: use a whole number"):
        entry_runs.check(task, QUICK, {"optimizer": "mine", "optimizer_rank": 2.5})


def test_consensus_accepts_averaging_rules_only() -> None:
    with pytest.raises(BadInput, match=r"averaging rule .* is unknown; choose from all-reduce"):
        entry_runs.check(TASKS["consensus_random"], QUICK, {"optimizer": "powersgd"})


def test_low_rank_matrices_have_singular_values_1_over_k_squared() -> None:
    values: Values = {"matrices": "low-rank", "size": 20, "n_workers": 3}
    found = torch.linalg.svdvals(data.matrices(values, 1))
    assert (found - torch.arange(1, 21) ** -2.0).abs().max() < 1e-5


def test_images_are_the_first_ones_with_a_hash_of_all_that_are_used(tmp_path: Path) -> None:
    small_data.write_fashion_mnist(tmp_path)
    options = small_data.options(data_dir=tmp_path, batch_size=1)
    paths = data.files.find(dataclasses.replace(options, task="FashionMNIST"))
    train_split, test = data.files.load(*paths[:2]), data.files.load(*paths[2:])
    of_train, of_test = (train_split.images, train_split.labels), (test.images, test.labels)
    used = [*(part[:30] for part in of_train), *(part[:10] for part in of_test)]
    assert data.fashion_mnist(options, 30, 10).facts["data"] == sha256(*used)


def test_a_task_that_changes_has_another_version() -> None:
    """After a change of what makes a task's results, raise its version, and note both here."""
    of_all = [
        tasks.TUNING_SEED,
        SEEDS,
        entry_runs.HELD_OUT,
        entry_runs.DIVERGED,
        entry_runs.ROUNDING,
    ]
    found = {}
    for task in TASKS.values():
        text = json.dumps([*of_all, task.values, task.tiers], sort_keys=True)
        found[task.name] = (task.version, hashlib.sha256(text.encode()).hexdigest()[:8])
    assert found == {
        "consensus_random": (3, "d974447b"),
        "consensus_low_rank": (3, "b53b3af7"),
        "fashion_mnist_same": (2, "48d478cd"),
        "fashion_mnist_sorted": (2, "dec73b0b"),
        "fashion_mnist_dirichlet": (2, "9c6ae141"),
        "fashion_mnist_16": (2, "4f1a42a0"),
        "fashion_mnist_late": (2, "3228f90f"),
        "text_same": (2, "f17ae819"),
        "text_topics": (2, "08944547"),
    }


# --- Comparison -----------------------------------------------------------------------------------


def test_the_costs_of_a_target_lie_between_two_evaluations() -> None:
    found = line(0.8, 1.0, 0.9)
    assert found.target == 0.8
    assert found.to_target("MB") == pytest.approx([10.0, 8.0, 5 + 5 * 0.35 / 0.45])
    assert line(0.7).to_target("MB") == [math.inf]
    merged = line(0.8, merge=0.5)
    assert (merged.megabytes, merged.to_target("MB")) == ([10.5], [10.5])
    assert line(1.8).to_target("MB") == [5.0]  # at the first evaluation
    assert line(1.0).to_target("seconds") == pytest.approx([1.6])
    lost = line(1.0)
    for mean in (0.7, 0.9):  # lost, and reached again
        lost.runs[0]["evaluations"].append({"mean": mean, "MB": 20.0})
    assert lost.to_target("MB") == pytest.approx([8.0])
    less = dataclasses.replace(line(8.0), task=TASKS["text_same"], target=6.0)
    assert less.is_bound
    less.runs[0]["evaluations"].reverse()  # 8 bits per byte after 10 MB, 4 after 5
    assert not less.is_bound
    assert less.to_target("MB") == pytest.approx([7.5])
    assert less.quality == -4.0


def test_only_results_of_the_same_data_and_version_are_compared() -> None:
    """Those of other versions do not decide which data are the usual ones."""
    old = [entry_of(name, result(1.0, 1.0, 1.0, version=0, data="e")) for name in ("old", "older")]
    all_of_them = [
        entry_of("a", result(0.8, 0.8, 0.8)),
        entry_of("b", result(0.9, 0.9, 0.9)),
        entry_of("other data", result(1.0, 1.0, 1.0, data="e")),
        entry_of("diverged", result(1.0, 1.0, 1.0, diverged=[3])),
        *old,
    ]
    found, others = comparison.lines(TASKS["fashion_mnist_same"], QUICK, all_of_them)
    assert [line.name for line in found] == ["b", "a", "diverged"]
    assert [line.resolution for line in found] == [1e-3] * 3  # of 1,000 test images
    assert others == ["other data", "old", "older"]
    assert comparison.lines(TASKS["fashion_mnist_same"], QUICK, old) == ([], ["old", "older"])
    assert "another version: old, older" in page.text(old, QUICK, None, None)
    of_matrices = [  # whose last bits differ between processors
        entry_of(name, result(-3.0, data=name, version=3), "consensus_random") for name in "ab"
    ]
    assert len(comparison.lines(TASKS["consensus_random"], QUICK, of_matrices)[0]) == 2
    shown = page.table(found)
    assert shown[3][1] == "1 of 3 diverged"
    assert [row[3] for row in shown] == [
        "better · noise · worse",
        "2 · 0 · 0",
        "1 · 0 · 1",
        "0 · 0 · 2",
    ]


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [([1], [1, 2], "noise"), ([1, 2, 3], [2], "noise"), ([1], [], "worse"), ([], [1], "better")],
)
def test_a_pair_that_diverges_is_noise(first: list[int], second: list[int], verdict: str) -> None:
    """However many of its runs do."""
    own, other = (line(0.5, 0.5, 0.5, diverged=diverged) for diverged in (first, second))
    assert pair(own, other).verdict == verdict


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=3, max_size=3))
def test_pairs_are_antisymmetric(values: list[tuple[float, float]]) -> None:
    first, second = (line(*column) for column in zip(*values, strict=True))
    one, other = pair(first, second), pair(second, first)
    assert one.difference == pytest.approx(-other.difference)
    assert one.margin == pytest.approx(other.margin)
    opposite = {"better": "worse", "worse": "better", "noise": "noise"}
    assert other.verdict == opposite[one.verdict]


def test_a_difference_within_its_interval_is_noise() -> None:
    shifted = line(0.79, 0.81, 0.83)
    assert pair(line(0.80, 0.82, 0.84), shifted).verdict == "better"
    shifted.found["runs"].reverse()  # pairs are those of equal seeds
    assert pair(line(0.80, 0.82, 0.84), shifted).verdict == "better"
    for run in shifted.found["runs"]:
        run["seed"] += 10
    assert pair(line(0.80, 0.82, 0.84), shifted).verdict == "noise"
    assert pair(line(0.80, 0.82, 0.84), line(0.83, 0.81, 0.79)).verdict == "noise"
    equal = (
        dataclasses.replace(line(0.801, 0.821, 0.841), resolution=0.0011),
        line(0.80, 0.82, 0.84),
    )
    assert pair(*equal).verdict == "noise"  # one of 1,000 test images
    assert pair(dataclasses.replace(equal[0], resolution=0.0), equal[1]).verdict == "better"
    # t(0.975, 2) = 4.303: differences of 1, 2 and 3 are 2 ± 2.48, those of 2, 3 and 4 are 3 ± 2.48
    of = pair(line(0.01, 0.02, 0.03), line(0.0, 0.0, 0.0))
    assert of.margin == pytest.approx(0.01 * 4.302653 / math.sqrt(3), rel=1e-5)
    assert of.verdict == "noise"
    assert pair(line(0.02, 0.03, 0.04), line(0.0, 0.0, 0.0)).verdict == "better"
    assert pair(line(0.5, 0.5, 0.5), line(0.9, 0.9, 0.9, diverged=[2])).verdict == "better"
    text = TASKS["text_same"]
    small, large = (
        dataclasses.replace(line(*v), task=text) for v in ((2.0, 2.1, 2.2), (3.0, 3.1, 3.2))
    )
    assert pair(small, large).verdict == "better"


@pytest.mark.parametrize(
    ("means", "diverged", "shown"),
    [
        ((1.8, 1.8, 1.8), [], "≤ 5"),
        ((1.0, 1.0, 1.0), [], "8"),
        ((1.0, 1.0, 1.0), [2], ""),
        ((1.8, 1.0, 1.0), [], "≤ 7"),
        ((1.8, 0.7, 1.0), [], "never"),
    ],
)
def test_a_target_before_the_first_evaluation_is_an_upper_bound(
    means: tuple[float, ...], diverged: list[int], shown: str
) -> None:
    header, row, _ = page.table([line(*means, diverged=diverged), line(1.0, name="other")])
    assert row[header.index("MB to 80")] == shown


def test_units_and_spread_of_a_table() -> None:
    """Percent and megabytes; deviations with n − 1."""
    shown = page.table([line(0.8, 0.9, 1.0), line(0.7, 0.7, 0.7, name="b")])
    row = dict(zip(shown[0], shown[1], strict=True))
    assert row["accuracy, %"] == "90.00 ± 10.00"
    assert row["worst worker"] == "20.00 ± 0.00"
    assert row["MB sent"] == "10"


@pytest.mark.filterwarnings("error")  # matplotlib warns of a figure that is too small
def test_a_figure_has_space_for_many_entries(tmp_path: Path) -> None:
    lines = [line(0.5, name=f"an entry with the long name {i}") for i in range(50)]
    assert page.draw(lines, tmp_path / "figure.svg")


def test_files_that_are_no_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands name them, and `show` and `list` go on without them. So do they with a copy under
    another name, which would replace the results of its entry."""
    path = tmp_path / "x.json"
    for name, sentence in ((3, "is no file of results"), ("d-psgd", "use d-psgd.json as its name")):
        path.write_text(json.dumps({"name": name, "source": "", "tiers": {}}))
        with pytest.raises(BadInput, match=sentence):
            results.read(path)
    for command in ("show", "list"):
        command_line.main([command, "--folder", str(tmp_path)])
        shown = capsys.readouterr()
        assert "d-psgd" in shown.out
        assert "left out" in shown.err


def test_results_in_two_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tasks are added, damaged files left out, and those of other code replaced."""
    folders = [tmp_path / "library", tmp_path / "own"]
    entry = entries.Entry("a", "source", {})
    for folder, name in zip(folders, ("fashion_mnist_same", "text_same"), strict=True):
        results.save(entry, QUICK, {name: result(0.5, 0.5, 0.5)}, folder)
    (folders[1] / "b.json").write_text("{")
    (found,) = results.read_all(folders)
    assert list(found["tiers"][QUICK]) == ["fashion_mnist_same", "text_same"]
    assert "left out" in capsys.readouterr().out
    for tier, name in [("full", "text_same"), (QUICK, "text_topics"), (QUICK, "text_same")]:
        results.save(entry, tier, {name: result(0.7654321)}, folders[1])
    tiers = results.read(folders[1] / "a.json")["tiers"]
    assert {tier: list(of) for tier, of in tiers.items()} == {
        QUICK: ["text_same", "text_topics"],
        "full": ["text_same"],
    }
    (run,) = tiers[QUICK]["text_same"]["runs"]  # the last one
    assert run["evaluations"][-1]["mean"] == 0.765432
    other = entries.Entry("a", "other source", {})
    results.save(other, QUICK, {"text_same": result(0.1)}, folders[1])
    (found,) = results.read_all(folders)
    assert found["source"] == "other source"
    assert list(found["tiers"][QUICK]) == ["text_same"]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=8))
def test_no_point_beats_one_of_the_front(points: list[tuple[int, int]]) -> None:
    kept = figures.front({str(i): (float(c), float(q)) for i, (q, c) in enumerate(points)})
    for i, (q, c) in enumerate(points):
        beaten = any(
            (p >= q and d <= c) and (p > q or d < c) for j, (p, d) in enumerate(points) if j != i
        )
        if beaten:
            assert str(i) not in kept
        else:  # or one of its equals
            assert (q, c) in [points[int(name)] for name in kept]


# --- The program ----------------------------------------------------------------------------------


def test_a_user_runs_a_method_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, {"consensus_random": [{"optimizer": "half", "optimizer_weight": 0.6}]})
    (tmp_path / "train.py").write_text("raise SystemExit('not this one')")
    ran = launch.python("-P", "-m", "powergossip.benchmark", "run", "mine.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "results: output/benchmark/mine.json" in ran.stdout
    assert ran.stdout.count("task=consensus_random") == 2  # tuning and comparison
    results = tmp_path / "output" / "benchmark" / "mine.json"
    first = results.read_text()
    command_line.main(["run", "mine.py"])
    assert "stage" not in capsys.readouterr().out
    assert results.read_text() == first, "circumstances are those of the runs"
    assert json.loads(first)["tiers"][QUICK]["consensus_random"]["made"]["date"]
    command_line.main(["show", "mine", "--output", "page"])
    assert "consensus_random" in capsys.readouterr().out
    assert "| mine ← |" in (tmp_path / "page" / "benchmark.md").read_text()


def test_a_task_that_fails_leaves_the_others_their_results(
    tiny: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the options of the command line."""
    jobs: list[Job] = []

    class Launcher:
        def check(self) -> None: ...

        def leave(self) -> None: ...

        def __call__(self, job: Job) -> int:
            jobs.append(job)
            job.log.write_text("$ command\nsomething\nerror: that is why\n")
            if "task=text_same" in job.command:
                return 1
            entry_runs.main(job.command[4:])
            return 0

    monkeypatch.setattr(runner, "LAUNCHERS", {"slurm": Launcher})
    held: list[int] = []
    in_turn = runner.in_turn

    def noted(*arguments: Any, **more: Any) -> list[bool]:
        held.append(arguments[-1])
        return in_turn(*arguments, **more)

    monkeypatch.setattr(runner, "in_turn", noted)
    place = tmp_path / "a: b #1"  # no YAML
    place.mkdir()
    path = written(place, [{"optimizer": "half"}])
    arguments = ["run", str(path), "--tier", "full", "--launcher", "slurm", "--folder", str(place)]
    arguments += ["--task", "text_same", "--task", "consensus_random"]
    with pytest.raises(SystemExit) as ended:
        command_line.main([*arguments, "--cores", "3"])
    assert ended.value.code == 1
    assert all("tier=full" in job.command for job in jobs)
    assert held == [3, 3]  # both stages
    said = capsys.readouterr()
    assert "log.txt: error: that is why" in said.out
    assert "log.txt" in said.err
    tiers = results.read(place / "mine.json")["tiers"]
    assert {tier: list(of) for tier, of in tiers.items()} == {"full": ["consensus_random"]}
    with pytest.raises(SystemExit):
        command_line.main(arguments)
    assert held == [3, 3, runner.JOBS]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["rum"], "choose from '?new'?, '?list'?, '?run'?, '?show"),
        (["new"], "new needs the name of a file"),
        (["new", "d-psgd.py"], "the name of an entry of the library"),
        (["new", "a b.py"], "use 1 to 60 letters"),
        (["run"], "run needs a file or the name of an entry"),
        (["run", "nobody"], 'method "nobody" is unknown'),
        (["run", "no.py"], "no.py cannot be read"),
        (["run", "d-psgd", "--task", "Cifar"], "--task"),
        (["run", "d-psgd", "--cores", "0"], "--cores"),
        (["run", "a2cid2", "--task", "text_same"], "a2cid2 has no settings of text_same"),
        (["show", "nobody"], 'no results of "nobody"'),
        (["list", "--output", "x"], "list has no option --output; use --folder, --tier"),
        (["show", "--cores", "2"], "show has no option --cores"),
        (["show", "mean-gradient", "--task", "consensus_random"], "no results of consensus_random"),
        (["list", "d-psgd"], "use show d-psgd"),
        (["show", "--output", "own.json"], "own.json: File exists"),
    ],
)
def test_bad_input(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.json").write_text("[1]")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=sentence):
        command_line.main(arguments)
    assert list(tmp_path.iterdir()) == [tmp_path / "own.json"]


def test_the_published_results_are_complete() -> None:
    found = results.read_all([results.OF_LIBRARY])
    for content in found:
        assert content["name"] in library.ENTRIES
        assert not content["source"]
        of_tasks = [
            (tier, *of) for tier in content["tiers"] for of in content["tiers"][tier].items()
        ]
        for tier, name, of_task in of_tasks:
            assert of_task["version"] == TASKS[name].version
            assert len(of_task["tried"]) <= TRIES[tier]
            assert [run["seed"] for run in of_task["runs"]] == list(SEEDS)
    assert comparison.LEVEL == 0.95
