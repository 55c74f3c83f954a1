"""A checkpoint of n workers starts a run of m workers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

import train
from powergossip import network
from powergossip.algorithms import AVERAGING, learning
from powergossip.algorithms.aggregation import AGGREGATIONS
from powergossip.errors import BadInput
from powergossip.network import Processes
from powergossip.runs import metrics
from powergossip.runs.checkpoints import Checkpoints
from powergossip.training import resizing
from powergossip.training.config_checks import checked
from powergossip.training.trainer import Trainer
from tests.harness.checkpoints import assert_same, entry_of
from tests.harness.helpers import with_one_each
from tests.harness.training import run

SMALL: dict[str, Any] = {
    "n_workers": 4,
    "task_architecture": "MLP",
    "batch_size": 64,
    "drop_last": True,
    "num_epochs": 1,
    "checkpoint_interval": 1,
    "log_verbosity": 0,
}  # 5 steps an epoch, 11 with 2 workers, 3 with 6
PLAIN: dict[str, Any] = {"optimizer": "dpsgd"}
METHODS: list[dict[str, Any]] = [
    *({"optimizer": name} for name in AVERAGING),
    *({"optimizer": name} for name in AGGREGATIONS),
    {"optimizer": "dgc", "optimizer_num_batches_per_step": 2, "gradient_clipping": 1.0},
    {"optimizer": "push-sum", "topology": "star"},  # with weights other than 1
    {"optimizer": "choco", "learning": "gradient-tracking"},
    {"optimizer": "power-gossip", "learning": "exact-diffusion"},
    {**PLAIN, "local_optimizer": "adamw", "learning_rate": 0.003},
    {**PLAIN, "local_optimizer": "muon", "learning_rate": 0.003},
    {"optimizer": "sparse-loco", "local_steps": 5, "momentum": 0.0},
    {"optimizer": "all-reduce", "optimizer_bits": 2, "learning": "diloco", "local_steps": 2},
    {**PLAIN, "local_optimizer": "adamw", "learning": "quasi-global-momentum"},
    *(
        {
            "optimizer": "choco" if name in ("beer", "motef") else "dpsgd",
            "learning": name,
            "topology": "chain" if name == "relay-sgd" else "ring",
        }
        for name in learning.LEARNING
    ),
]


# Of each kind of method, one with fewer and with more workers; the others with one of them.
CASES = with_one_each(
    METHODS, (6, 2), lambda case: ("learning" in case, case["optimizer"] in AVERAGING)
)
CASES.append(({"optimizer": "push-sum", "topology": "star"}, 6))


def label(case: Any) -> str:
    return "-".join(map(str, case.values())) if isinstance(case, dict) else str(case)


def built(who: Processes, resume_from: Path | None = None, **changes: Any) -> Trainer:
    config = OmegaConf.merge(OmegaConf.structured(train.Config), SMALL, changes)
    settings = checked(config, who)  # type: ignore[arg-type]
    return Trainer(settings, who, resume_from=resume_from)


def save(trainer: Trainer, folder: Path, epoch: int, step: int) -> None:
    """A checkpoint as of a run."""
    facts = {
        "config": trainer.config.as_dict(),
        "metrics_bytes": 0,
        "steps_per_epoch": trainer.steps_per_epoch,
    }
    kept = Checkpoints(folder, trainer.processes)
    kept.save(trainer.step, trainer.network.workers, trainer.state_dict((epoch, step, {})), facts)


def mean(rows: Tensor) -> Tensor:
    return rows.double().mean(0)


def tensors(tree: Any, path: str = "") -> dict[str, Tensor]:
    """Path → tensor [worker, ...]."""
    if isinstance(tree, Tensor):
        return {path: tree} if tree.ndim else {}
    if not isinstance(tree, (dict, list)):
        return {}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {k: v for key, value in items for k, v in tensors(value, f"{path}.{key}").items()}


# --- Every method ---------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("case", "m"), CASES, ids=label)
def test_methods_go_on_with_another_number_of_workers(
    case: dict[str, Any], m: int, tmp_path: Path
) -> None:
    before = built(Processes(), **case)
    for step in range(3):
        before.execution.train_step(0, step)
    save(before, tmp_path, 1, 0)
    after = built(Processes(), tmp_path, **case, n_workers=m)
    goes_on(before, before.state_dict((1, 0, {})), after, m)
    invariants(after, case)


def goes_on(before: Trainer, saved: dict[str, Any], after: Trainer, m: int) -> None:
    """A run of m workers begins with the state of one of 4, and makes a step."""
    now = after.state_dict(after.position)
    assert (after.step, after.position[:2]) == (after.steps_per_epoch, (1, 0))

    kept = min(m, 4)
    w = saved["algorithm"].get("averaging", {}).get("weights", torch.ones(4, 1)).double()
    expected = (w * saved["x"].double()).sum(0) / w.sum()
    torch.testing.assert_close(mean(now["x"]), expected, rtol=1e-6, atol=1e-7)
    differences = [rows["x"][:kept] - rows["x"][:1] for rows in (saved, now)]
    torch.testing.assert_close(*differences, rtol=1e-4, atol=1e-6)
    if m > 4 and before.config.topology != "star":
        assert torch.equal(now["x"][:4], saved["x"])
        assert torch.equal(now["x"][4:], expected.float().expand(m - 4, -1))

    of_rule = before.execution.rule.kept
    for old, new in (
        (saved["optimizer"], now["optimizer"]),
        *((saved["algorithm"][name], now["algorithm"][name]) for name in of_rule),
    ):
        assert isinstance(old, (dict, Tensor)) or old == new
        old, new = tensors(old), tensors(new)
        assert old.keys() == new.keys()
        for name, rows in new.items():  # moments
            assert torch.equal(rows[:kept], old[name][:kept])
            assert all(torch.equal(row, mean(old[name]).float()) for row in rows[kept:])
    if "step" in saved["optimizer"]:  # of Adam
        assert now["optimizer"]["step"] == saved["optimizer"]["step"] == 3
    for name in before.execution.rule.conserved:
        old, new = (tensors(state["algorithm"].get(name, {})) for state in (saved, now))
        assert old.keys() == new.keys()
        for path in old:
            torch.testing.assert_close(mean(new[path]), mean(old[path]), rtol=1e-5, atol=1e-7)
    for counts in ("bits", "messages"):
        assert now["network"][counts][:kept].equal(saved["network"][counts][:kept])
        assert not now["network"][counts][kept:].any()

    after.execution.train_step(1, 0)
    assert after.parameters.x.isfinite().all()


def invariants(trainer: Trainer, case: dict[str, Any]) -> None:
    """Check the invariants of the method after a step."""
    algorithm = trainer.execution.rule.state_dict()
    averaging = algorithm.get("averaging", {})
    sums = {name: mean(algorithm[name]) for name in ("c", "d", "v", "y") if name in algorithm}
    for name in ("c", "d"):  # corrections
        if name in sums:
            assert sums[name].abs().max() < 1e-6
    if "y" in sums:  # what is tracked
        torch.testing.assert_close(sums["y"], sums["v"], rtol=1e-4, atol=1e-7)
    if "public" in averaging:  # neighbors' copies are those of the workers themselves
        for worker, row in enumerate(trainer.network.neighbors.tolist()):
            for slot, neighbor in enumerate(row):
                copy = averaging["publics"][worker, slot]
                assert neighbor < 0 or torch.equal(copy, averaging["public"][neighbor])
    if "weights" in averaging:
        total = averaging["weights"].double().sum()
        assert total == pytest.approx(trainer.config.n_workers, rel=1e-6)
    if case["optimizer"] in AGGREGATIONS or case["optimizer"] == "all-reduce":
        equal = algorithm.get("slow", trainer.parameters.x)  # also within a round of local steps
        torch.testing.assert_close(equal[1:], equal[:-1])


@pytest.mark.parametrize("rule", ["dpsgd", "beer"])
def test_public_copies_begin_at_the_mean_model(rule: str, tmp_path: Path) -> None:
    """From 0, the models would move apart until the copies have followed them."""
    case: dict[str, Any] = {"optimizer": "choco", "learning": rule}
    before = built(Processes(), **case)
    for step in range(5):
        before.execution.train_step(0, step)
    save(before, tmp_path, 1, 0)
    after = built(Processes(), tmp_path, **case, n_workers=6)
    public = after.execution.rule.state_dict()["averaging"]["public"]
    expected = mean(before.parameters.x).float()
    copies = torch.cat([expected, torch.zeros(public.shape[1] - len(expected))])  # of x, and of v
    assert torch.equal(public.sort().values, copies.sort().values.expand(6, -1))


# --- Position, rows, and what may change ----------------------------------------------------------


def test_within_an_epoch_the_run_resumes_at_the_same_fraction(tmp_path: Path) -> None:
    before = built(Processes(), **PLAIN)
    sums: dict[str, Tensor] = {}
    for step in range(3):
        for name, values in before.execution.train_step(0, step).items():
            sums[name] = sums.get(name, 0) + values
    facts = {"config": before.config.as_dict(), "metrics_bytes": 0}
    kept = Checkpoints(tmp_path, before.processes)
    kept.save(3, range(4), before.state_dict((0, 3, sums)), facts | {"steps_per_epoch": 5})
    after = built(Processes(), tmp_path, **PLAIN, n_workers=2)
    assert (after.step, after.position[:2]) == (6, (0, 6))  # 3/5 of 11, rounded down
    for name, of_three in sums.items():
        torch.testing.assert_close(after.position[2][name], of_three[:2] * 2)
    assert built(Processes(), tmp_path, **PLAIN, n_workers=6).position[:2] == (0, 1)


@pytest.mark.long
def test_a_run_trains_on_with_2_and_then_6_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = SMALL | {"checkpoint_interval": 4}
    run(tmp_path, changes | {"num_epochs": 4})
    shown = {"log_verbosity": 1, "resume": True}
    run(tmp_path, changes | shown | {"num_epochs": 8, "n_workers": 2, "topology": "chain"})
    assert resizing.sentence(4, 2) in capsys.readouterr().out
    run(tmp_path, changes | {"num_epochs": 12, "n_workers": 6, "resume": "auto"})
    rows = metrics.load(tmp_path)
    of_mean = rows[(rows["name"] == "accuracy") & (rows["split"] == "test_avg")]
    assert of_mean["epoch"].tolist() == list(range(1, 13))
    assert of_mean["value"].iloc[-1] > 0.85
    workers = rows[rows["name"] == "workers"]
    assert workers[["value", "epoch"]].to_numpy().tolist() == [[2, 4], [6, 8]]
    assert rows["bits"].is_monotonic_increasing
    assert rows["seconds"].is_monotonic_increasing
    assert OmegaConf.load(tmp_path / "config.yaml")["n_workers"] == 6  # type: ignore[index]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("run")
    run(folder, SMALL)
    return folder


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n_workers": 6, "topology": "hypercube"}, "hypercube"),
        ({"n_workers": 6, "learning_rate": 0.3}, "learning_rate=0.3"),
        ({"n_workers": 1000}, "n_workers"),
        ({"n_workers": 2, "num_epochs": 1}, "n_workers=2"),  # complete
        ({"topology": "star"}, "topology=star"),
        ({"n_workers": 2, "evaluate_only": True}, "n_workers=2"),
        ({"n_workers": 2, "gossip": "bounded"}, "n_workers=2"),
    ],
    ids=str,
)
def test_bad_input_changes_no_file(changes: dict[str, Any], named: str, finished: Path) -> None:
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    resume = {} if "evaluate_only" in changes else {"resume": True}
    with pytest.raises(BadInput, match=named):
        run(finished, SMALL | {"num_epochs": 2} | resume | changes)
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


# --- Layouts --------------------------------------------------------------------------------------


@pytest.mark.parallel(2)
@pytest.mark.parametrize("m", [2, 6])
@pytest.mark.parametrize("optimizer", ["dpsgd", "dgc"])
def test_the_state_does_not_depend_on_the_layout(optimizer: str, m: int, tmp_path: Path) -> None:
    """Written by one process or two, and read by one or two: the same bits."""
    who = network.processes()
    shared = Path(who.broadcast(str(tmp_path)))
    before = built(who, optimizer=optimizer)
    before.execution.train_step(0, 0)
    save(before, shared / "two", 1, 0)
    mine = shared / f"one-{who.rank}"
    alone = Processes()
    written = Checkpoints(shared / "two", alone)
    facts = entry_of(shared / "two")["facts"]
    Checkpoints(mine, alone).save(1, range(4), written.load(range(4)), facts)
    whole, other = (
        run.state_dict(run.position)
        for run in (
            built(alone, folder, optimizer=optimizer, n_workers=m)
            for folder in (mine, shared / "two")
        )
    )
    assert_same(whole, other)
    trainer = built(who, shared / "two", optimizer=optimizer, n_workers=m)
    workers = trainer.network.workers
    own = tensors(trainer.state_dict(trainer.position))
    for path, rows in tensors(whole).items():
        assert torch.equal(own[path], rows[workers.start : workers.stop]), path


@pytest.mark.parallel(2)
def test_a_hook_of_ddp_goes_on(tmp_path: Path) -> None:
    """Its residuals, by bucket, keep their mean."""
    who = network.processes()
    shared = Path(who.broadcast(str(tmp_path)))
    hook: dict[str, Any] = {
        "optimizer": "ddp-powersgd",
        "optimizer_start_iteration": 2,
        "batch_size": 32,
    }
    before = built(who, **hook, n_workers=2)
    for step in range(4):
        before.execution.train_step(0, step)
    save(before, shared, 1, 0)
    saved = Checkpoints(shared, Processes()).load(range(2))["algorithm"]
    after = built(Processes(), shared, **hook, n_workers=1)
    now = after.execution.rule.state_dict()
    assert now["steps"] == saved["steps"] == 4
    assert now["errors"]
    for bucket, errors in now["errors"].items():
        torch.testing.assert_close(errors[0], mean(saved["errors"][bucket]).float())
    after.execution.train_step(1, 0)
