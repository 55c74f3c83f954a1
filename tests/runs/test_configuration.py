"""Laws of the configuration: values from files and command lines, their sources, errors, help."""

import re
import tempfile
import warnings
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

import gossip_run
import train
from powergossip import presets, tasks
from powergossip.algorithms import AVERAGING
from powergossip.algorithms.aggregation import AGGREGATIONS
from powergossip.algorithms.learning import LEARNING
from powergossip.errors import BadInput
from powergossip.runs import configuration, key_help, output
from powergossip.runs.configuration import plain
from powergossip.runs.output import Output
from powergossip.topologies import TOPOLOGIES
from powergossip.training import recorder, schedule
from powergossip.training.config import Settings
from powergossip.training.config_checks import option_defaults
from powergossip.training.help import MAIN
from tests.harness import launch


def config_after(*arguments: str | Path) -> DictConfig:
    """The configuration of train.py after these arguments changed it."""
    config = OmegaConf.structured(train.Config)
    configuration.read_command_line(config, [str(a) for a in arguments], "")
    return config


def yaml_file(folder: Path, text: str, name: str = "some.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


# Accepted values.


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("learning_rate=1e-3", 0.001),
        ("learning_rate=1E+2", 100.0),
        ("learning_rate=.5e1", 5.0),
        ("learning_rate=2", 2.0),  # a whole number for a float
        ("n_workers=8", 8),
        ("n_workers=null", None),
        ("topology=torus", "torus"),
        ("topology=12", "12"),  # a file may be called that
        ("task=2024-01-31", "2024-01-31"),
        ("data_dir=", None),
        ("data_dir=/some/folder with spaces", "/some/folder with spaces"),
        ("topology=graphs/a=b.txt", "graphs/a=b.txt"),
        ("cuda_aware=on", "on"),  # YAML 1.1 would say true
        ("overlapping=false", False),
        ("overlapping=no", False),
        ("overlapping=1", True),
        ("optimizer_diffusion_rate=auto", "auto"),
        ("optimizer_diffusion_rate=0.3", 0.3),
        ("optimizer_diffusion_rate=1e-1", 0.1),
        ("lr_schedule_milestones=[]", []),
        ("lr_schedule_milestones=[[150, 0.1], [225, 1e-1]]", [[150, 0.1], [225, 0.1]]),
        ("spectrum_logging_params=[hidden1.weight]", ["hidden1.weight"]),
        ("topology_options={degree: 4}", {"degree": 4}),
    ],
)
def test_an_assignment_sets_a_typed_value(assignment: str, expected: Any) -> None:
    value = config_after(assignment)[assignment.partition("=")[0]]
    if isinstance(value, DictConfig) or OmegaConf.is_list(value):
        value = OmegaConf.to_container(value)
    assert value == expected
    assert type(value) is type(expected)


def test_assignments_come_after_files_and_later_ones_win(tmp_path: Path) -> None:
    first = yaml_file(tmp_path, "seed: 10\nbatch_size: 11\nnum_epochs: 12\n", "first.yaml")
    second = yaml_file(tmp_path, "batch_size: 21\nnum_epochs: 22\n", "second.yaml")
    config = config_after("num_epochs=32", "--config", first, "--config", second)
    assert (config.seed, config.batch_size, config.num_epochs) == (10, 21, 32)
    config = config_after("--config", second, "num_epochs=32", "--config", first, "num_epochs=33")
    assert (config.seed, config.batch_size, config.num_epochs) == (10, 11, 33)


def test_a_mapping_replaces_the_previous_one_and_a_dotted_key_changes_one_entry(
    tmp_path: Path,
) -> None:
    config = config_after("topology_options={degree: 4, rewiring: 0.1}", "topology_options={}")
    assert config.topology_options == {}
    config = config_after("topology_options={degree: 4}", "topology_options.rewiring=0.1")
    assert config.topology_options == {"degree": 4, "rewiring": 0.1}
    file = yaml_file(tmp_path, "topology_options: {degree: 4}\ntopology_options.rewiring: 0.2\n")
    config = config_after("--config", file, "topology_options.degree=5")
    assert config.topology_options == {"degree": 5, "rewiring": 0.2}


@pytest.mark.parametrize("program", [train, gossip_run])
def test_arguments_of_a_run_are_not_those_of_the_next(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a complaint: the values of `config` and `output_dir`, also a path, are those of the
    driver."""
    seen = []

    def stop(name: str | None, config: Any, *rest: Any) -> None:
        seen.append((name, config["seed"], config["n_workers"]))
        raise ValueError("seen")

    where = recorder if program is train else output
    monkeypatch.setattr(where, "Output", stop)
    config = program.config.copy()
    config.n_workers = 2
    monkeypatch.setattr(program, "config", config)
    monkeypatch.setattr(program, "output_dir", Path("mine"))
    for arguments in (["seed=7", "--output-dir", tmp_path], [], None):
        with pytest.raises(BadInput, match="seen"):
            program.main(arguments)
    default = program.config.seed
    assert seen == [(str(tmp_path), 7, 2), ("mine", default, 2), ("mine", default, 2)]
    assert default != 7
    with pytest.raises(BadInput, match='"7" is not an assignment'):
        program.main([7])
    monkeypatch.setattr(program, "output_dir", 5)
    with pytest.raises(BadInput, match="output_dir=5"):
        program.main()
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ([], None),
        (["seed=3", "--output-dir", "some/where", "num_epochs=1"], "some/where"),
        (["--output-dir=some/where"], "some/where"),
    ],
)
def test_the_output_folder_is_returned(arguments: list[str], folder: str | None) -> None:
    config = OmegaConf.structured(train.Config)
    assert configuration.read_command_line(config, arguments, "").output_dir == folder


def test_a_folder_has_its_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = OmegaConf.structured(train.Config)
    first, second, mine = (Output(name, config) for name in (None, None, "results/{date}-mine"))
    assert first.folder != second.folder
    for one in (first, second):
        assert re.fullmatch(r"output/\d{4}-\d\d-\d\d-\d{6}(-2)?", str(one.folder))
        assert (one.folder / "config.yaml").exists()
    assert re.fullmatch(r"results/[\d-]+-mine", str(mine.folder))
    for one in (first, second, mine):
        one.close()


@pytest.mark.parametrize("program", [train, gossip_run])
def test_a_mapping_in_place_of_the_configuration_has_its_keys(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(name: str | None, config: Any, *rest: Any) -> None:
        raise ValueError(f"n_workers is {config['n_workers']}")

    monkeypatch.setattr(recorder if program is train else output, "Output", stop)
    unknown = OmegaConf.create({"n_workers": "${foo}"})
    for mapping, words in (
        ({"n_workers": 3}, "n_workers is 3"),
        ({"n_workers": "three"}, "n_workers=three"),
        ({"n_workrs": 3}, "n_workers"),
        (OmegaConf.create({"n_workers": "${seed}", "seed": 5}), "n_workers is 5"),
        (unknown, "Interpolation key 'foo' not found, key: n_workers$"),
        (OmegaConf.create({"n_workers": "???"}), "n_workers"),
        ([], "config="),
    ):
        monkeypatch.setattr(program, "config", mapping)
        with pytest.raises(BadInput, match=words):
            program.main()


# Which keys were given.


def test_the_explicit_keys_are_returned(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "seed: 10\nbatch_size: 11\ntopology_options.degree: 4\n")
    config = OmegaConf.structured(train.Config)
    config.momentum = 0.5  # by a driver
    config.local_steps = 3
    arguments = ["--config", str(file), "seed=1", "local_steps=1"]  # the defaults
    found = configuration.read_command_line(config, arguments, "").explicit
    assert {*found} == {"seed", "local_steps", "batch_size", "topology_options"}
    assert (config.seed, config.local_steps) == (1, 1)


def test_values_of_a_saved_configuration_are_not_explicit(tmp_path: Path) -> None:
    """Neither a complete file nor a run's config.yaml, of a version with fewer keys, is written
    by hand. A key that is also on the command line is. Options with a key keep their values."""
    changed = config_after("batch_size=9", "optimizer_num_iterations=4")
    complete = yaml_file(tmp_path, OmegaConf.to_yaml(changed))
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    text = "batch_size: 9\nseed: 3\noptimizer_of_mine: 0.6\noptimizer_num_iterations: 4\n"
    of_run = yaml_file(run, text, "config.yaml")
    for file in (complete, of_run):
        config = OmegaConf.structured(train.Config)
        arguments = ["--config", str(file), "seed=3"]
        found = configuration.read_command_line(config, arguments, "").explicit
        assert (config.batch_size, config.optimizer_num_iterations) == (9, 4)
        assert found == ["seed"]


def test_a_key_of_a_saved_file_is_a_text(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "seed: 3\n3: 4\n", "config.yaml")
    (tmp_path / "metrics.jsonl").touch()
    for first, second in (("--config", file), ("resume=true", f"--output-dir={tmp_path}")):
        with pytest.raises(BadInput, match='key "3" is unknown'):
            config_after(first, second)


@pytest.mark.parametrize(
    ("name", "beside"), [("config.yaml", "notes.txt"), ("mine.yaml", "metrics.jsonl")]
)
def test_a_file_with_the_name_or_in_the_folder_of_a_saved_one_is_by_hand(
    name: str, beside: str, tmp_path: Path
) -> None:
    """Only both make it a saved one. Its keys are explicit, and an unknown option is an error."""
    (tmp_path / beside).touch()
    file = str(yaml_file(tmp_path, "batch_size: 9\n", name))
    config = OmegaConf.structured(train.Config)
    assert configuration.read_command_line(config, ["--config", file], "").explicit == [
        "batch_size"
    ]
    yaml_file(tmp_path, "optimizer_of_mine: 0.6\n", name)
    with pytest.raises(BadInput, match="optimizer_of_mine"):
        config_after("--config", file)


def test_a_resumed_run_keeps_the_values_of_keys_that_are_not_given(tmp_path: Path) -> None:
    """Options of a driver's own method have no keys; its row has their values."""
    of_run = "seed: 3\nbatch_size: 9\nmomentum: 0.5\n"
    of_methods = "optimizer_of_mine: 0.6\noptimizer_num_iterations: 4\n"
    yaml_file(tmp_path, of_run + of_methods, "config.yaml")
    config = OmegaConf.structured(train.Config)
    config.momentum = 0.7  # by a driver
    arguments = ["resume=true", "seed=1", "--output-dir", str(tmp_path)]
    found = configuration.read_command_line(config, arguments, "").explicit
    assert (config.seed, config.batch_size, config.momentum) == (1, 9, 0.7)
    assert config.optimizer_num_iterations == 4
    assert {*found} == {"resume", "seed"}
    without = config_after("seed=1", "--output-dir", tmp_path)
    assert without.batch_size == train.Config.batch_size


# The changed keys, which a run prints.


def test_changed_keys_have_a_line_each() -> None:
    assert configuration.changed(plain(config_after()), train.Config) == ""
    config = config_after(
        "seed=7", "topology=12", "cuda_aware=on", "lr_schedule_milestones=[[1, 1e-4]]"
    )
    text = configuration.changed(plain(config), train.Config)
    assert text.splitlines() == [
        "seed: 7",
        "cuda_aware: on",
        "lr_schedule_milestones: [[1, 0.0001]]",
        "topology: '12'",
    ]
    assert configuration.changed({"n_workers": 3}, train.Config) == "n_workers: 3"


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="$\\"), max_size=8)
NUMBERS = st.floats(allow_nan=False, width=64)


@settings(max_examples=12)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "topology": WORDS
            | st.sampled_from(["1e-3", "true", "on", "null", "2024-01-01", "a: b"]),
            "data_dir": st.none() | WORDS,
            "seed": st.integers(0, 2**40),
            "learning_rate": NUMBERS,
            "overlapping": st.booleans(),
            "topology_options": st.dictionaries(WORDS.filter(bool), st.integers() | WORDS),
            "spectrum_logging_params": st.lists(WORDS),
            "lr_schedule_milestones": st.lists(st.tuples(st.integers(), NUMBERS).map(list)),
            "optimizer_diffusion_rate": NUMBERS | st.just("auto"),
        },
    )
)
def test_the_lines_of_the_changed_keys_can_be_read_again(values: dict[str, Any]) -> None:
    config = OmegaConf.structured(train.Config)
    for key, value in values.items():
        config[key] = value
    text = configuration.changed(plain(config), train.Config)
    with tempfile.TemporaryDirectory() as folder:
        again = config_after("--config", yaml_file(Path(folder), text)) if text else config_after()
    assert again == config


# Bad input: the error contains the key, the value, and where it stands.


def test_a_driver_cannot_set_unknown_keys_or_wrong_types() -> None:
    """The error has one line. So it has if the configuration is read-only."""
    config: Any = configuration.structured(train.Config)
    with pytest.raises(BadInput, match=r'^key "no_such_key" .*$'):
        config["no_such_key"] = 1
    with pytest.raises(BadInput, match=r'^key "no_such_key" .*$'):
        config.no_such_key = 1
    with pytest.raises(BadInput, match=r"^n_workers=four: use .*$"):
        config["n_workers"] = "four"
    with pytest.raises(BadInput, match=r"^topology=.*$"):
        config.topology = [3]
    assert config == OmegaConf.structured(train.Config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config["n_workers"], config.overwrite, config["topology"] = "2", "yes", Path("a.txt")
    assert (config.n_workers, config.overwrite, config.topology) == (2, True, "a.txt")
    OmegaConf.set_readonly(config, True)
    with pytest.raises(BadInput, match=r"^n_workers=4: .*read-only.*$"):
        config["n_workers"] = 4


def test_a_driver_may_set_values_of_numpy() -> None:
    for value in (np.arange(5)[4], np.int32(4), 4):
        config: Any = configuration.structured(train.Config)
        config["n_workers"], config.seed = value, value
        assert (config.n_workers, config.seed) == (4, 4)
        config["topology_options"] = {"degree": value}
        config.spectrum_logging_worker_pairs = [(value, value)]
        assert config.topology_options == {"degree": 4}
        assert config.spectrum_logging_worker_pairs == [[4, 4]]
    with pytest.raises(BadInput, match="n_workers"):
        config["n_workers"] = np.float64(2.5)


def test_a_copy_of_a_configuration_is_like_it() -> None:
    original = configuration.structured(train.Config)
    for config in (deepcopy(original), copy(original), original.copy()):
        config["learning_rate"] = np.float64(0.1)
        config.topology_options["degree"] = 3
        assert (config.learning_rate, type(config.learning_rate)) == (0.1, float)
        with pytest.raises(BadInput, match=r"^n_workers=four: use .*$"):
            config["n_workers"] = "four"
    asked = configuration.request(original, train.Config, ["seed=3"], None, "")
    assert (asked.config.seed, original.seed) == (3, train.Config.seed)
    with pytest.raises(BadInput):
        configuration.read_command_line(original, ["seed=7", "n_workrs=8"], "")
    assert original == OmegaConf.structured(train.Config)


# Help.


def test_help_lists_every_key_with_its_default_and_meaning() -> None:
    """A meaning is beside a default or, behind a long one, in the next line. A key of a method has
    the default of the method, and a key that several methods have, those of each."""
    shown = launch.python("train.py", "--help", "all")
    assert (shown.returncode, shown.stderr) == (0, "")
    config = OmegaConf.structured(train.Config)
    keys = shown.stdout.partition("keys and their defaults:\n")[2]
    keys, _, of_tasks = keys.partition("\n\ndefaults of each task:\n")
    assert re.findall(r"^  (\w+):", of_tasks, re.MULTILINE) == list(tasks.TASKS)
    found = re.findall(r"^  (\w+)=(\S*)", keys, re.MULTILINE)
    of_methods = [key for key in config if key.startswith("optimizer_")]
    others = [key for key in config if key not in of_methods]
    assert [key for key, _ in found][: len(others)] == others
    assert {key for key, _ in found} == set(config)
    given = config_after(*(f"{key}={default}" for key, default in found[: len(others)]))
    assert given == config, "defaults can be given back"
    assert re.search(r"^  evaluation_interval=1 +epochs between", shown.stdout, re.MULTILINE)
    assert re.search(r"^  n_workers=null +number of workers", shown.stdout, re.MULTILINE)
    for program in (train, gossip_run):
        text = key_help.describe(program.config)
        assert re.findall(r"^  \w+=\S*$(?!\n {10})", text, re.MULTILINE) == []
    parts = re.split(r"\n\n(optimizer\S*=.*):\n", shown.stdout)
    groups = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert "  optimizer_num_iterations=2 " in groups["optimizer=power-gossip"]
    assert "  optimizer_keep_ratio=0.01 " in groups["optimizer=dgc"]
    assert "optimizer_rank" not in groups["optimizer=choco"]
    for name in (*AVERAGING, *AGGREGATIONS):
        assert any(name in title for title in groups) or not option_defaults(name), name


def test_help_begins_with_the_main_keys_and_answers_a_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def lines(*name: str) -> list[str]:
        with pytest.raises(SystemExit) as ended:
            train.main(["--help", *name])
        assert ended.value.code == 0
        return capsys.readouterr().out.splitlines()

    first = "\n".join(lines())
    assert len(first.splitlines()) <= 60
    assert re.findall(r"^  (\w+)=", first, re.MULTILINE) == ["key", *MAIN]
    for option in ("--config FILE.yaml", "--output-dir DIR", "--help"):
        assert option in first
    preset_names = presets.names()
    assert {name.partition("/")[0] for name in preset_names} <= set(first.split())
    assert lines("presets") == preset_names
    for registry in (AVERAGING, AGGREGATIONS, LEARNING, TOPOLOGIES, tasks.TASKS):
        assert set(registry) <= set(re.findall(r"[\w-]+", first))
    keys = {
        name: re.findall(r"^  (\w+)=", "\n".join(lines(name)), re.MULTILINE)
        for name in ("choco", "optimizer=top-k", "diloco", "topology", "FashionMNIST")
    }
    assert keys["choco"] == [f"optimizer_{option}" for option in option_defaults("choco")]
    assert keys["optimizer=top-k"] == ["optimizer_keep_ratio", "optimizer_rank"]
    assert "learning_options" in keys["diloco"]
    assert keys["topology"] == ["topology", "topology_options"]
    assert keys["FashionMNIST"] == ["task"]


# The learning rate.


WARM = {"distributed_lr_warmup_epoch": 4.0, "distributed_lr_warmup_factor": 8.0}
STEPS = {"lr_schedule_milestones": [[10, 0.1], [20, 0.5]]}
COSINE = {"num_epochs": 24, "lr_schedule": "cosine", "lr_schedule_milestones": [[1, 0.5]]}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # from the start to 8 times that; from a milestone on, whose factors multiply
        (
            WARM | STEPS,
            {0: 0.1, 1: 0.275, 2: 0.45, 4: 0.8, 9.99: 0.8, 10: 0.08, 20: 0.04, 1e3: 0.04},
        ),
        (WARM | STEPS | {"distributed_lr_warmup_epoch": 0.0}, {0: 0.1, 0.5: 0.1, 9.99: 0.1}),
        (WARM | {"lr_schedule_milestones": [[1, 0.5]]}, {0: 0.1, 2: 0.225, 4: 0.4}),  # within
        # from the end of the warm-up, without milestones; one by a factor of 1 is none
        (COSINE, {0: 0.1, 6: 0.05 * (1 + 0.5**0.5), 12: 0.05, 24: 0.0}),
        (WARM | COSINE, {2: 0.45, 4: 0.8, 9: 0.4 * (1 + 0.5**0.5), 14: 0.4, 24: 0.0}),
    ],
)
def test_learning_rate_by_hand(keys: dict[str, Any], expected: dict[float, float]) -> None:
    config = Settings(learning_rate=0.1, **keys)
    found = {epoch: schedule.learning_rate(config, epoch) for epoch in expected}
    assert found == pytest.approx(expected, abs=1e-12)
