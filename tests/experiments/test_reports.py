"""Every experiment from rows to its report. Rows are those of real runs, with other numbers."""

import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments import EXPERIMENTS, different_data, study
from experiments.study import RELAY, TUNING_SEED, Outcome
from powergossip import algorithms, topologies
from powergossip.algorithms.learning import check
from powergossip.network import Network
from powergossip.parameters import Layout
from powergossip.runner.runner import Experiment, Run
from powergossip.runs import figures
from tests.harness.training import trained

Rows = Callable[[Run], pd.DataFrame]
COUNTED = ["bits", "messages", "seconds", "instances"]
MEASURES = ["accuracy", "perplexity", "bits_per_byte"]
# Of experiments that share their code with others, and one that takes long
REPEATED = (
    "fashion_mnist",
    "topics_lstm",
    "different_data_",
    "cifar10_resnet20",
    "wikitext2_lstm",
)


@pytest.fixture(scope="module")
def template() -> pd.DataFrame:
    """The last rows of a run with evaluations on held-out data, deaths and spectra."""
    _, rows = trained(
        n_workers=4,
        num_epochs=1,
        validation_ratio=0.1,
        scenario={"deaths": {"fraction": 0.5, "from": 1.0, "until": 2.0}},
        spectrum_logging_epochs=[1],
        spectrum_logging_params=["hidden1.weight"],
        spectrum_logging_worker_pairs=[[0, 1]],
    )
    messages = rows[rows["phase"] == "averaging"].assign(phase="communication")
    measured = rows[rows["name"] == "accuracy"]
    other = [measured.assign(name=name) for name in ("perplexity", "bits_per_byte")]
    found = pd.concat([rows, messages, *other], ignore_index=True)
    return found[found["split"].isin(["valid_avg", "test", "test_avg"]) | found["split"].isna()]


def made_up(template: pd.DataFrame, opposed: bool = False, diverging: float = 0.02) -> Rows:
    """Rows of any run, in all epochs. Its quality is random, and a fraction diverges. If opposed,
    test data disagree with held-out ones."""

    @cache
    def common(epochs: int, steps: int, spectra: tuple[tuple[str, str], ...]) -> pd.DataFrame:
        """Those of a kind of runs, whose measures are 1."""
        spectrum = template[template["name"] == "spectrum"]
        named = [spectrum.assign(parameter=p, workers=workers) for p, workers in spectra]
        own = pd.concat([template, *named], ignore_index=True)
        own.loc[own["name"].isin(MEASURES), "value"] = 1.0
        own.loc[own["phase"] == "gradient", "instances"] = steps
        own["bits"] = 32.0 * steps * 50_000
        grown = [own.assign(epoch=e, **e * own[COUNTED]) for e in range(1, epochs + 1)]
        for e, rows in enumerate(grown, 1):
            rows.loc[rows["name"] == "phase_seconds", "value"] *= e
        shown = grown if spectra else grown[:-1][:8] + grown[-1:]
        return pd.concat(shown, ignore_index=True)

    def rows(run: Run) -> pd.DataFrame:
        if run.entry == "gossip_run":
            errors = [(a, 0.5**step, step) for a in run.values["algorithm"] for step in range(30)]
            found = pd.DataFrame(errors, columns=["algorithm", "value", "epoch"])
            return found.assign(name="error", bits=8e3 * found["epoch"])
        drawn, values = random.Random(run.identity), run.values
        if drawn.random() < diverging and not run.links:
            return template[:1].assign(epoch=0, name="workers")
        pairs = values.get("spectrum_logging_worker_pairs", ())
        names = values.get("spectrum_logging_params", ())
        spectra = tuple((name, f"{i}-{j}") for name in names for i, j in pairs)
        own = common(values["num_epochs"], values.get("max_steps_per_epoch") or 10, spectra)
        quality = 0.5 + 0.4 * drawn.random()
        measured, tested = own["name"].isin(MEASURES), own["split"].isin(["test", "test_avg"])
        shown = np.where(tested & opposed, 1.4 - quality, quality)
        return own.assign(value=np.where(measured, shown, own["value"]))

    return cache_by_identity(rows)


def cache_by_identity(rows: Rows) -> Rows:
    kept: dict[str, pd.DataFrame] = {}

    def found(run: Run) -> pd.DataFrame:
        if run.identity not in kept:
            kept[run.identity] = rows(run)
        return kept[run.identity]

    return found


def identities(experiment: Experiment, rows: Rows) -> list[list[str]]:
    return [[run.identity for run in stage(rows)] for stage in experiment.stages]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name.startswith(REPEATED) else [])
        for name in EXPERIMENTS
    ],
)
def test_a_report_has_its_tables_and_settings_are_chosen_without_test_data(
    name: str, template: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, rows = EXPERIMENTS[name], made_up(template)
    assert identities(experiment, rows) == identities(experiment, made_up(template, opposed=True))
    for stage in experiment.stages[:-1]:
        for run in stage(rows):
            assert (run.values["seed"], run.values["evaluate_test_data"]) == (TUNING_SEED, False)
    drawn: list[str] = []
    for kind in ("curves", "scatter", "consensus_figure"):
        monkeypatch.setattr(figures, kind, lambda rows, path, *_, **__: drawn.append(path.name))
    text = experiment.report(rows, tmp_path)
    assert set(re.findall(r"\]\((\S+\.svg)\)", text)) <= set(drawn)
    tables = re.findall(r"\]\((\S+\.csv)\)", text)
    assert sorted(tables) == sorted(file.name for file in tmp_path.glob("*.csv"))
    for table in tables:
        assert len((tmp_path / table).read_text().splitlines()) >= 2


def test_runs_that_diverged_are_in_the_table(template: pd.DataFrame, tmp_path: Path) -> None:
    """Before their first evaluation."""
    rows = made_up(template, diverging=0)

    def results(run: Run) -> pd.DataFrame:
        learns = run.labels["method"] == "D-PSGD"
        return rows(run) if learns else template[:1].assign(epoch=0, name="workers")

    for name in ("message_loss", "churn"):
        EXPERIMENTS[name].report(results, tmp_path)
        _, learned, *others = (tmp_path / "table.csv").read_text().splitlines()
        assert len(others) >= 3
        assert "diverged" not in learned
        assert all("diverged," in line and "±" not in line for line in others)


@pytest.mark.parametrize("case", different_data.MORE, ids=", ".join)
def test_methods_for_different_data_are_accepted_pairs(case: study.Case) -> None:
    values = different_data.MORE[case]
    network = Network(topologies.make(values.get("topology", "ring"), 8))
    options = {
        key.removeprefix("optimizer_"): value
        for key, value in values.items()
        if key.startswith("optimizer_")
    }
    averaging = algorithms.make(values["optimizer"], network, Layout([(2, 2)]), **options)
    check(case[1], network, values["optimizer"], averaging)


@pytest.mark.parametrize("topology", ["chain", "binary-tree", "double-binary-tree"])
def test_bits_of_relays_are_the_mean_of_all_workers(topology: str) -> None:
    """Rows have those of worker 0. A worker sends as much as it has edges in the trees."""
    trees = topologies.make(topology, 8).trees or ()
    edges = [sum(worker in edge for tree in trees for edge in tree) for worker in range(8)]
    run = Run("train", {"learning": RELAY, "topology": topology, "n_workers": 8}, {})
    rows = pd.DataFrame({"bits": [0, 100 * edges[0]]})
    assert Outcome([run], [rows]).bits == pytest.approx(100 * sum(edges) / 8)
    assert len(set(edges)) > 1
