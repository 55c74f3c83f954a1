"""Laws of consensus runs: published errors, rows, batches, starting matrices, bad input.

Axes: worker, setting. Unless specified otherwise, matrices are 8 × 8 and a run takes 0.05 s.
"""

import json
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

import gossip_run
from gossip_run import ALGORITHMS, DATA
from powergossip import algorithms
from powergossip.algorithms import PlainGossip
from powergossip.consensus import config_checks, data, methods, sweep
from powergossip.consensus.methods import ConsensusMethod
from powergossip.consensus.sweep import MatrixBatch, Sweep
from powergossip.errors import BadInput
from powergossip.network import Network, processes
from powergossip.parameters import Layout
from powergossip.runs import metrics, summaries
from powergossip.runs.files import FIGURE
from powergossip.runs.metrics import Hooks
from tests.harness import launch

TINY: dict[str, Any] = {
    "n_workers": 8,
    "matrix_size": 8,
    "num_steps": 40,
    "theta_num_samples": 2,
    "moniqua_num_samples": 2,
    "log_verbosity": 0,
}
# A grid of three diffusion rates, also for algorithms that have one rate otherwise.
GRID: dict[str, Any] = {"hyperparameter_num_samples": 3, "hyperparameter_range_min": 0.02}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the configuration before each test."""
    monkeypatch.setattr(gossip_run, "config", OmegaConf.structured(gossip_run.Config))
    monkeypatch.setattr(gossip_run, "output_dir", None)


def built(batch_elements: int | None = None, **changes: Any) -> Sweep:
    """A sweep before its first step."""
    config: Any = OmegaConf.merge(OmegaConf.structured(gossip_run.Config), TINY, changes)
    return Sweep(config, processes(), batch_elements)


def gossiped(batch_elements: int | None = None, **changes: Any) -> pd.DataFrame:
    """The rows of a sweep in this process, without files."""
    rows: list[dict[str, Any]] = []

    def keep(name: str, values: Any, tags: Any) -> None:
        rows.append({"name": name, **values, **tags})

    built(batch_elements, **changes).run(Hooks(log_metric=keep))
    return pd.DataFrame(rows)


def errors(rows: pd.DataFrame) -> dict[int, float]:
    """step → error, of the rows of one setting."""
    chosen = rows[rows["name"] == "error"]
    assert chosen["epoch"].is_unique
    return dict(zip(chosen["epoch"], chosen["value"], strict=True))


def by_setting(rows: pd.DataFrame) -> dict[tuple[Any, Any], pd.DataFrame]:
    """The rows of each (diffusion rate, θ) of one algorithm; "" where it has no such grid."""
    none = pd.Series("", rows.index)
    tags = [rows.get(tag, none) for tag in ("diffusion_rate", "theta")]
    return {(rate, theta): group for (rate, theta), group in rows.groupby(tags, sort=False)}


def reproducible(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows without the elapsed time."""
    kept = rows.drop(columns="seconds")
    records = kept.astype(object).where(kept.notna(), None).to_dict("records")
    return [{str(column): value for column, value in row.items()} for row in records]


def test_the_progress_is_logged_once_a_second_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress: list[Mapping[str, Any]] = []
    monkeypatch.setattr("time.perf_counter", lambda: 5.0)
    built(algorithm="uncompressed", num_steps=20).run(Hooks(log_info=progress.append))
    assert progress == [{"state.progress": 0.0}, {"state.progress": 1.0}]


# The published experiment: seed 42, ring of 8, a 100 × 100 matrix of N(0, 1) for each worker.

PUBLISHED: dict[str, Any] = {"matrix_size": 100, "data_type": "random", "seed": 42}


def test_uncompressed_gossip_has_the_published_errors() -> None:
    found = errors(gossiped(**PUBLISHED, algorithm="uncompressed", num_steps=10))
    assert found[0] == pytest.approx(8713.375, abs=0.01)
    for step, published in {1: 2715.05, 5: 198.250, 10: 10.2585}.items():
        assert found[step] == pytest.approx(published, rel=1e-3)


def test_power_gossip_has_the_published_errors() -> None:
    """Approximately: the random starting directions are not the published ones."""
    found = errors(gossiped(**PUBLISHED, algorithm="power_gossip", num_steps=500))
    assert found[5] == pytest.approx(8334.7, rel=0.02)
    assert found[100] == pytest.approx(2713, rel=0.1)
    assert 90 < found[500] < 155


def test_the_best_rate_contracts_as_the_spectrum_says() -> None:
    """γ* = 6/(6 − √2), and (2 + √2)/(6 − √2) a step once only the slowest modes are left."""
    changes = {**PUBLISHED, "algorithm": "uncompressed", "diffusion_rate": "auto"}
    (setting,) = built(**changes).settings["uncompressed"]
    assert setting["diffusion_rate"] == pytest.approx(1.308391, abs=1e-6)
    found = errors(gossiped(**changes, num_steps=20))
    assert (found[20] / found[10]) ** (1 / 10) == pytest.approx(0.744521**2, abs=1e-3)


def test_the_limits_of_plain_gossip() -> None:
    """Finite time: a ring of 8 has 4 distinct eigenvalues. Chebyshev: 2ρᵗ/(1 + ρ²ᵗ) at most."""
    found = errors(gossiped(**PUBLISHED, algorithm="finite_time", num_steps=4))
    assert found[3] > 100
    assert found[4] < 1e-6
    found = errors(gossiped(**PUBLISHED, algorithm="chebyshev", num_steps=9))
    for step, error in found.items():
        rho = 0.446463**step
        bound = (2 * rho / (1 + rho**2)) ** 2 * found[0]
        assert 0.01 * bound < error < 1.0001 * bound


# The rows of a run.


def test_errors_are_logged_as_published_and_at_the_last_step() -> None:
    rows = gossiped(algorithm="fp_choco", num_steps=333, diffusion_rate=0.5)
    assert rows["epoch"].tolist() == [*range(10), *range(10, 100, 10), 100, 200, 300, 333]
    assert set(rows["name"]) == {"error"}
    assert set(rows["algorithm"]) == {"fp_choco"}
    assert set(rows["diffusion_rate"]) == {"0.5"}
    assert rows["seconds"].is_monotonic_increasing


def test_the_number_of_steps_of_each_algorithm() -> None:
    """A number is for all algorithms. Without one, those of plain gossip have 500 of 5000 steps."""

    def steps(value: Any) -> dict[str, int]:
        sweep = built(algorithm="all", num_steps=value)
        return {name: sweep.num_steps(name) for name in ALGORITHMS}

    early = {"uncompressed", "push_sum", "chebyshev", "finite_time"}
    assert steps(700) == dict.fromkeys(ALGORITHMS, 700)
    published = {name: 500 if name in early else 5000 for name in ALGORITHMS}
    assert steps(None) == published
    assert steps({"moniqua": 3, "others": 20}) == dict.fromkeys(ALGORITHMS, 20) | {"moniqua": 3}
    assert steps({"moniqua": 3}) == published | {"moniqua": 3}
    rows = gossiped(algorithm=["fp_choco", "chebyshev"], num_steps={"fp_choco": 3, "others": 4})
    assert rows.groupby("algorithm")["epoch"].max().to_dict() == {"fp_choco": 3, "chebyshev": 4}


def grid_of(name: str, **changes: Any) -> tuple[list[float], list[float]]:
    """The diffusion rates and the bounds θ of an algorithm, without duplicates."""
    small = {"n_workers": 8, "matrix_size": 8, "algorithm": name}
    config: Any = OmegaConf.merge(OmegaConf.structured(gossip_run.Config), small, changes)
    settings = Sweep(config, processes()).settings[name]
    rates, thetas = ([s.get(key, 0) for s in settings] for key in ("diffusion_rate", "theta"))
    assert len(settings) == len(set(rates)) * len(set(thetas)), "all combinations"
    return list(dict.fromkeys(rates)), list(dict.fromkeys(thetas))


WITHOUT_RATE = {"push_sum", "chebyshev", "finite_time"}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_grid_of_each_algorithm(name: str) -> None:
    """By default the published one: one rate where the published experiment has one. The published
    keys apply to every algorithm with a rate, whichever is specified. With one sample it is the
    smallest rate."""
    rates, thetas = grid_of(name)
    np.testing.assert_allclose(thetas, np.geomspace(0.1, 10, 20) if name == "moniqua" else [0])
    has_grid = any(part in name for part in ("choco", "squeeze", "moniqua"))
    np.testing.assert_allclose(rates, np.geomspace(1e-4, 1.308, 20) if has_grid else [1.308])
    if name in WITHOUT_RATE:
        return
    low, count = {"hyperparameter_range_min": 0.1}, {"hyperparameter_num_samples": 3}
    high = {"hyperparameter_range_max": 0.4}
    for keys, expected in (
        (low | count | high, [0.1, 0.2, 0.4]),
        (low | high, np.geomspace(0.1, 0.4, 20)),
        (count | high, np.geomspace(1e-4, 0.4, 3)),
        (low | {"hyperparameter_num_samples": 1}, [0.1]),
        (low | count | {"diffusion_rate": 0.7}, [0.7]),
    ):
        np.testing.assert_allclose(grid_of(name, **keys)[0], expected)


def test_moniqua_may_have_its_own_number_of_rates() -> None:
    """`moniqua_num_samples`, an addition to the published keys, is for several algorithms."""
    keys: Any = {"algorithm": ["moniqua", "sign_choco"], "hyperparameter_num_samples": 3}
    for own, expected in ((None, 3 * 2), (5, 5 * 2)):
        sweep = built(**keys, moniqua_num_samples=own)
        sizes = {name: len(found) for name, found in sweep.settings.items()}
        assert sizes == {"moniqua": expected, "sign_choco": 3}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_rows_are_tagged_with_the_point_of_the_grid(name: str) -> None:
    """Tags are strings. An algorithm with one setting that needs no grid has none."""
    few = {"num_steps": 1, "matrix_size": 4}
    rows = gossiped(algorithm=name, **few, **GRID)
    if name in WITHOUT_RATE:
        assert {"diffusion_rate", "theta"}.isdisjoint(rows.columns)
        return
    assert ("theta" in rows) == (name == "moniqua")
    settings = by_setting(rows)
    rates = {float(rate) for rate, _ in settings}
    assert len(settings) == (4 if name == "moniqua" else 3)
    assert min(rates) == pytest.approx(0.02)
    one = gossiped(algorithm=name, **few, diffusion_rate=0.5)
    assert ("diffusion_rate" in one) == ALGORITHMS[name].needs_grid


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_algorithm_brings_the_workers_closer(name: str) -> None:
    grid = GRID | {"hyperparameter_num_samples": 5}
    rows = gossiped(algorithm=name, num_steps=60, **grid)
    found = [errors(group) for group in by_setting(rows).values()]
    assert min(of_setting.get(60, np.inf) / of_setting[0] for of_setting in found) < 0.3


# Bits from a worker to one of its neighbors in a step: an 8 × 8 matrix, rank 1.
BITS = {
    **dict.fromkeys(["uncompressed", "fp_choco", "chebyshev", "finite_time"], 32 * 64),
    **{name: 32 * 8 for name in ALGORITHMS if name.startswith("power_gossip")},
    **dict.fromkeys(["sign_choco", "sign_deepsqueeze"], 64 + 32),
    **dict.fromkeys(["topk_choco", "topk_deepsqueeze"], 4 * (32 + 8)),  # K = (8 + 8)/4
    "randomk_choco": 4 * 32,
    "svd_choco": 32 * (8 + 8),
    "qsgd_choco": 32 + 64 * 4,  # nine levels
    "moniqua": 64 * 2,
    "push_sum": 32 * (64 + 1),
}


# The same with other options.
BITS_OF: list[tuple[str, dict[str, Any], int]] = [
    *((name, {}, bits) for name, bits in BITS.items()),
    ("power_gossip", {"compression_rank": 2}, 2 * 32 * 8),
    ("power_gossip", {"compression_num_iterations": 3}, 3 * 32 * 8),
    ("topk_choco", {"compression_rank": 2}, 8 * (32 + 8)),
    ("randomk_choco", {"compression_rank": 2}, 8 * 32),
    ("svd_choco", {"compression_rank": 2}, 2 * 32 * (8 + 8)),
    ("qsgd_choco", {"compression_levels": 1}, 32 + 2 * 64),
]


@pytest.mark.parametrize(("name", "options", "bits"), BITS_OF)
def test_bits_and_messages_are_those_of_one_setting(
    name: str, options: dict[str, Any], bits: int
) -> None:
    graph: dict[str, Any] = {"topology": "random-regular", "topology_options": {"degree": 5}}
    rows = gossiped(algorithm=name, num_steps=7, **graph, **options)
    degree = 5
    assert rows["bits"].tolist() == (rows["epoch"] * degree * bits).tolist()
    messages = degree * options.get("compression_num_iterations", 1)
    assert rows["messages"].tolist() == (rows["epoch"] * messages).tolist()


@pytest.mark.parametrize("name", ["power_gossip", "randomk_choco", "moniqua"])
def test_a_seed_repeats_a_run_and_another_does_not(name: str) -> None:
    """With starting matrices that do not depend on it."""
    first, again, other = (
        reproducible(gossiped(algorithm=name, data_type="sparse", seed=seed)) for seed in (3, 3, 4)
    )
    assert first == again
    assert first[0] == other[0]
    assert first != other


def test_variants_of_power_gossip_differ() -> None:
    names = [name for name in ALGORITHMS if name.startswith("power_gossip")]
    rows = gossiped(algorithm=names)
    finals = [errors(rows[rows["algorithm"] == name])[40] for name in names]
    assert len(set(finals)) == len(names) == 4


# Settings in batches.


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("sign_choco", "ring"),
        ("qsgd_choco", "star"),
        ("moniqua", "ring"),
        ("topk_deepsqueeze", "one-peer-exponential"),
    ],
)
def test_settings_in_a_batch_are_as_by_themselves(
    name: str, topology: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, though some diverge and are removed before the others end.

    CHOCO and DeepSqueeze do at the largest γ, Moniqua at the larger θ: its second and last setting.
    """
    sizes = []
    step = MatrixBatch.step

    def counted(batch: MatrixBatch) -> None:
        sizes.append(len(batch.settings))
        step(batch)

    monkeypatch.setattr(MatrixBatch, "step", counted)
    changes: dict[str, Any] = {"algorithm": name, "topology": topology, **GRID}
    changes |= {"theta_range_min": 0.01, "theta_range_max": 1e3}
    if name != "moniqua":
        changes["hyperparameter_range_max"] = 30.0
    together = gossiped(**changes)
    assert set(together["name"]) == {"error", "diverged"}
    assert len(sizes) == TINY["num_steps"], "they share their steps"
    assert sizes[0] > sizes[-1]
    by_twos = by_setting(gossiped(batch_elements=2 * 8 * 64, **changes))
    for (rate, theta), rows in by_setting(together).items():
        assert reproducible(by_twos[rate, theta]) == reproducible(rows)
        alone = by_setting(gossiped(**changes, diffusion_rate=float(rate)))
        assert reproducible(alone[rate, theta]) == reproducible(rows)


@pytest.mark.parametrize("rate", [3.0, 3e38])  # the second gives infinity
def test_a_diverged_setting_ends_with_its_step(rate: float) -> None:
    """At γ = 3, errors grow by up to (1 − 3 · 4/3)² = 9 a step."""
    with pytest.warns(UserWarning, match="diffusion rate of 3"):
        rows = gossiped(algorithm="uncompressed", diffusion_rate=rate, topology="ring")
    assert rows["name"].tolist() == ["error"] * (len(rows) - 1) + ["diverged"]
    last = rows.iloc[-1]
    assert last["value"] == last["epoch"]
    assert last["bits"] == last["epoch"] * 2 * 64 * 32
    assert last["epoch"] == 1 if rate > 1e9 else 2 < last["epoch"] < 10
    assert rows["value"].max() <= 100 * rows["value"].iloc[0]


def test_a_setting_with_nan_has_diverged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 3 of the second of three settings gets one."""
    monkeypatch.setattr(MatrixBatch, "step", lambda batch: batch.x[8 + 3].fill_(np.nan))
    rows = gossiped(**GRID, algorithm="fp_choco", num_steps=1)
    assert rows["name"].tolist() == ["error"] * 4 + ["diverged", "error"]


def test_workers_that_agree_from_the_start_do_not_diverge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATA, "equal", lambda c: lambda worker: torch.full((3, 3), 0.1))
    rows = gossiped(data_type="equal", algorithm=["uncompressed", "power_gossip", "qsgd_choco"])
    assert set(rows["name"]) == {"error"}
    one = gossiped(n_workers=1, algorithm=["uncompressed", "power_gossip", "moniqua"])
    assert set(one["value"]) == {0.0}


# Rows of the tables of algorithms and data.


def test_the_entry_point_has_the_tables_themselves() -> None:
    """A row that a driver adds there is found everywhere."""
    homes = {"ALGORITHMS": methods, "DATA": data, "is_logged": sweep, "checked": config_checks}
    for name, home in homes.items():
        assert getattr(gossip_run, name) is getattr(home, name)


def test_a_driver_adds_an_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options come from the keys by name."""
    taken = []

    def own(network: Network, layout: Layout, *, diffusion_rate: Any = 1.0, rank: int = 7) -> Any:
        taken.append(rank)
        return PlainGossip(network, diffusion_rate)

    monkeypatch.setitem(algorithms.AVERAGING, "own", own)
    monkeypatch.setitem(ALGORITHMS, "own", ConsensusMethod("own", grid=("diffusion_rate",)))
    found = gossiped(algorithm="own", compression_rank=3, diffusion_rate=0.5, num_steps=5)
    expected = gossiped(algorithm="uncompressed", diffusion_rate=0.5, num_steps=5)
    assert found["value"].tolist() == expected["value"].tolist()
    assert set(taken) == {3}


# Starting data.


def start(**changes: Any) -> Tensor:
    """[worker, row, column]"""
    run = built(**changes)
    assert torch.equal(run.mean, run.start.double().mean(0))
    return run.start.unflatten(1, run.layout.shapes[0])


def test_random_data_are_those_of_the_published_seeding() -> None:
    expected = []
    for worker in range(8):
        torch.manual_seed(7 + worker)
        expected.append(torch.randn(100, 100))
    assert torch.equal(start(seed=7, matrix_size=100), torch.stack(expected))


def test_other_data_follow_from_them() -> None:
    random, worker = start(), torch.arange(8)
    assert torch.equal(start(data_type="offset"), random + worker[:, None, None])
    assert torch.equal(start(data_type="log-normal"), random.exp())
    assert torch.equal(start(data_type="sparse").flatten(1), torch.eye(64)[:8])
    low_rank = start(data_type="low-rank")
    singular_values = torch.arange(1.0, 9) ** -2
    torch.testing.assert_close(torch.linalg.svdvals(low_rank), singular_values.expand(8, 8))
    assert not torch.allclose(low_rank[0], low_rank[1], atol=0.1)


@pytest.mark.parametrize("data_type", ["faces", "lfw"])
def test_worker_i_starts_with_image_i(
    data_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetcher and a library that stand in for scikit-learn's, which would need the network, and
    scikit-image, an extra."""
    images = np.arange(10 * 25.0).reshape(10, 5, 5)
    asked = {}

    def fetch(**options: Any) -> types.SimpleNamespace:
        asked.update(options)
        return types.SimpleNamespace(images=images.astype(np.float32))

    monkeypatch.setattr("sklearn.datasets.fetch_olivetti_faces", fetch)
    library = types.ModuleType("skimage.data")
    library.lfw_subset = lambda: images  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "skimage", types.ModuleType("skimage"))
    monkeypatch.setitem(sys.modules, "skimage.data", library)

    for matrix_size in (100, 5):  # the default, and what they have
        found = start(data_type=data_type, matrix_size=matrix_size, data_dir=str(tmp_path))
        np.testing.assert_array_equal(found.numpy(), images[:8])
    if data_type == "faces":
        assert (asked["data_home"], asked["shuffle"]) == (str(tmp_path), True)
        assert asked["random_state"].randint(1000) == np.random.RandomState(0).randint(1000)
    with pytest.raises(BadInput, match="matrix_size=8: use 5"):
        start(data_type=data_type)
    with pytest.raises(BadInput, match="n_workers=11: use 10 or less"):
        start(data_type=data_type, n_workers=11)


def test_missing_images_are_an_error_with_alternatives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fetch(**options: Any) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("sklearn.datasets.fetch_olivetti_faces", fetch)
    with pytest.raises(BadInput, match=r"data_type=faces: .*Name or service not known.*data_dir"):
        built(data_type="faces")
    with pytest.raises(BadInput, match=r"^data_dir=missing: use "):
        built(data_type="faces", data_dir="missing")
    monkeypatch.setitem(sys.modules, "skimage.data", None)
    with pytest.raises(BadInput, match=r"data_type=lfw: .*pip install"):
        built(data_type="lfw")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_starting_matrices_with_nan_or_infinity_are_rejected(
    bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def matrices(c: Any) -> Callable[[int], Tensor]:
        return lambda worker: torch.tensor([[1.0, bad if worker == 5 else 2.0]])

    monkeypatch.setitem(DATA, "broken", matrices)
    with pytest.raises(BadInput, match=r"data_type=broken: .*worker 5"):
        built(data_type="broken")


# A run from the command line, and from a driver.


def test_a_run_ends_with_a_table_and_a_figure_and_its_configuration_repeats_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    settings = [f"{key}={value}" for key, value in (TINY | GRID | {"log_verbosity": 2}).items()]
    algorithms = "algorithm=[uncompressed,sign_choco,moniqua]"
    gossip_run.main([*settings, algorithms, "--output-dir", str(first)])
    rows = metrics.load(first)
    said = capsys.readouterr()
    gossip_run.log_metric("error", {"value": 0.0}, {})
    assert metrics.load(first).equals(rows), "the logs are closed"
    assert summaries.consensus_summary(rows) in said.out
    assert str(first / "figure.png") in said.out
    assert said.out.count(" at step ") == 3 + 3 + 4, "a line for each setting"
    assert (first / "figure.png").read_bytes().startswith(b"\x89PNG")
    info = json.loads((first / "info.json").read_text())
    assert info["state.progress"] == 1.0
    assert info["settings"] == {"uncompressed": 3, "sign_choco": 3, "moniqua": 4}

    monkeypatch.setattr(gossip_run, "config", OmegaConf.structured(gossip_run.Config))
    file = str(first / "config.yaml")
    gossip_run.main(["--config", file, "log_verbosity=0", "--output-dir", str(second)])
    assert reproducible(metrics.load(second)) == reproducible(rows)


DRIVER = """
import json, os, sys

import gossip_run

assert "mpi4py.MPI" not in sys.modules, "nothing happens at import"
assert os.listdir() == ["driver.py"]

hooked = {"metric": [], "info": [], "runtime": []}
default = gossip_run.log_metric
gossip_run.log_metric = lambda *arguments: hooked["metric"].append(arguments)
gossip_run.log_info = hooked["info"].append
gossip_run.log_runtime = lambda *arguments: hooked["runtime"].append(arguments)
gossip_run.config.update(json.loads(sys.argv[1]))
gossip_run.config["topology"] = "star"
gossip_run.config["algorithm"] = ["sign_choco", "uncompressed"]
folder = gossip_run.main()
assert os.listdir("output") == [folder.name]

gossip_run.log_metric = default
gossip_run.config["algorithm"] = "finite_time"
gossip_run.config.num_steps = 4
gossip_run.config["topology"] = "ring"
gossip_run.output_dir = "second"
assert str(gossip_run.main()) == "second"
print(json.dumps(hooked))
"""


def test_a_driver_in_another_folder_replaces_hooks_and_runs_twice(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    ended = launch.python("driver.py", json.dumps(TINY), cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    hooked = json.loads(ended.stdout.splitlines()[-1])
    rows = [{"name": name, **values, **tags} for name, values, tags in hooked["metric"]]
    expected = gossiped(topology="star", algorithm=["sign_choco", "uncompressed"])
    assert reproducible(pd.DataFrame(rows)) == reproducible(expected)
    progress = [info["state.progress"] for info in hooked["info"] if "state.progress" in info]
    first = progress[: progress.index(1.0) + 1]
    assert (first, progress[-1]) == (sorted(first), 1.0)
    steps = [(label, instances) for label, _, _, instances in hooked["runtime"]]
    assert steps == [("sign_choco", 40), ("uncompressed", 40), ("finite_time", 4)]

    (dated,) = (tmp_path / "output").iterdir()
    assert (dated / metrics.FILE).read_bytes() == b"", "the hook took the rows"
    assert not (dated / FIGURE).exists()
    rows_of_second = metrics.load(tmp_path / "second")
    assert errors(rows_of_second)[4] < 1e-9
    assert "final error" in ended.stdout


HOOKED = """
import pathlib, sys
import gossip_run
from powergossip import network

default = gossip_run.log_metric

def log_metric(*arguments):
    assert network.processes().rank == 0
    default(*arguments)

gossip_run.log_metric = log_metric
assert gossip_run.main(sys.argv[1:]) == pathlib.Path(sys.argv[-1])
"""


def test_two_processes_equal_one_and_call_hooks_on_process_0_only(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(HOOKED)
    changes = TINY | GRID | {"num_steps": 20, "hyperparameter_range_max": 4}
    settings = [f"{key}={value}" for key, value in changes.items()]
    settings += ["algorithm=all", "--output-dir", str(tmp_path)]
    ended = launch.python(tmp_path / "driver.py", *settings, processes=2)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("final error") == 1, "one table"
    with pytest.warns(UserWarning, match="diffusion rate of 4"):
        rows, expected = metrics.load(tmp_path), gossiped(**changes, algorithm="all")
    assert ended.stderr.count("diffusion rate of 4") == 1, "a warning of process 0"
    for column in ("name", "epoch", "bits", "messages", "algorithm", "diffusion_rate", "theta"):
        assert rows[column].astype(str).tolist() == expected[column].astype(str).tolist()
    assert "diverged" in set(rows["name"])
    np.testing.assert_allclose(rows["value"], expected["value"], rtol=1e-3, atol=1e-9)
