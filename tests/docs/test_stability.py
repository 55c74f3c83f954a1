"""docs/stability.md has every public name, key and value, as stable or as experimental."""

import importlib
import re
import tomllib

import algorithms
import compressors
import gossip_run
import topologies
import train
from powergossip.algorithms.learning import LEARNING
from powergossip.tasks import TASKS, language_models, models
from powergossip.training.method_keys import PREFIX
from tests.harness import launch

MODULES = (
    *("train", "gossip_run", "algorithms", "compressors", "topologies", "powergossip"),
    *("powergossip.optimizers", "powergossip.tasks", "powergossip.network"),
)
PROJECT = tomllib.loads((launch.ROOT / "pyproject.toml").read_text())["project"]
PUBLIC = {
    **{module: importlib.import_module(module).__all__ for module in MODULES},
    "powergossip.optimizers.dgc": ["DGC", "DGCConfig", "DGCSGD", "optimizer_step"],
    "commands": PROJECT["scripts"],
    "optimizer": [
        *(*algorithms.AVERAGING, *algorithms.AGGREGATIONS),
        *("ddp-powersgd", "ddp-batched-powersgd"),
    ],
    "learning": LEARNING,
    "optimizer_compressor": compressors.COMPRESSORS,
    "topology": topologies.TOPOLOGIES,
    "task": TASKS,
    "task_architecture": {
        *(*models.ARCHITECTURES, *models.IMAGENET, *language_models.ARCHITECTURES),
    },
    "algorithm": gossip_run.ALGORITHMS,
    "data_type": gossip_run.DATA,
    "train.py": [key for key in train.config if not str(key).startswith(PREFIX)],
    "gossip_run.py": gossip_run.config,
}
ROWS = {
    title: re.findall(r"`(.+?)`", cells)
    for title, cells in re.findall(
        r"^\| `?([\w.]+)`? \| (.*`.*) \|$",
        (launch.ROOT / "docs" / "stability.md").read_text(),
        re.MULTILINE,
    )
}


def test_every_public_name_is_stable_or_experimental() -> None:
    assert ROWS.keys() == PUBLIC.keys()
    for title, names in PUBLIC.items():
        assert sorted(ROWS[title]) == sorted(names), title
