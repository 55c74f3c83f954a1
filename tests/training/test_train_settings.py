"""Every key of a method has an effect, and keys of other methods are not ignored silently."""

import dataclasses
import importlib
import inspect
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

import train
from powergossip import compressors, tasks
from powergossip import registry_options as options
from powergossip.algorithms import AVERAGING
from powergossip.algorithms.aggregation import AGGREGATIONS
from powergossip.algorithms.ddp_hooks import HOOKS
from powergossip.compressors import COMPRESSORS
from powergossip.network import Processes
from powergossip.optimizers.gossip_method import GossipMethod
from powergossip.training import method_keys
from powergossip.training.config_checks import checked, option_defaults
from powergossip.training.method_keys import (
    ALIASES,
    DEFAULTS,
    OF_RULE,
    OWN_KEYS,
    PREFIX,
    as_written,
)
from powergossip.training.resuming import check_same_run
from powergossip.training.trainer import Trainer
from tests.harness.training import after_steps, built, configured, trained

ALONE = Processes()

BOUNDED = {"optimizer_compress_upper_bound": 1.05}

HOOK = {"optimizer": "ddp-powersgd", "n_workers": 1, "optimizer_start_iteration": 2}
# What a key's effect is seen with, besides another value for it than its default.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "optimizer_diffusion_rate": (0.5, {"optimizer": "dpsgd"}),
    "optimizer_rank": (2, {}),
    "optimizer_num_iterations": (1, {}),
    "optimizer_warm_start": (False, {}),
    "optimizer_round_weights": (True, {}),
    "optimizer_compressor": ("top-k", {"optimizer": "choco"}),
    "optimizer_keep_ratio": (0.5, {"optimizer": "choco", "optimizer_compressor": "top-k"}),
    "optimizer_levels": (7, {"optimizer": "choco", "optimizer_compressor": "qsgd"}),
    "optimizer_unbiased": (True, {"optimizer": "choco", "optimizer_compressor": "qsgd"}),
    "optimizer_copy_rate": (0.5, {"optimizer": "choco"}),
    "optimizer_theta": (1.0, {"optimizer": "moniqua"}),
    "optimizer_running_sums": (True, {"optimizer": "push-sum"}),
    "optimizer_min_compression_rate": (50.0, {"optimizer": "powersgd"}),
    "optimizer_start_compressing_after": (2, {"optimizer": "powersgd"}),
    "optimizer_num_batches_per_step": (2, {"optimizer": "powersgd"}),
    "optimizer_sample_ratio": (1.0, {"optimizer": "dgc"}),
    "optimizer_momentum_masking": (False, {"optimizer": "dgc"}),
    "optimizer_compress_upper_bound": (1.3, {"optimizer": "dgc"}),
    "optimizer_compress_lower_bound": (0.99, {"optimizer": "dgc"} | BOUNDED),
    "optimizer_warmup_epochs": (1, {"optimizer": "dgc"}),
    "optimizer_warmup_ratios": ([0.5], {"optimizer": "dgc", "optimizer_warmup_epochs": 1}),
    "optimizer_fp16_values": (True, {"optimizer": "dgc"}),
    "optimizer_int32_indices": (False, {"optimizer": "dgc"}),
    "optimizer_start_iteration": (5, {"optimizer": "ddp-powersgd", "n_workers": 1}),
    "optimizer_momentum_before_compression": (True, {"optimizer": "ef-sgd"}),
    "optimizer_rescale_error": (False, {"optimizer": "ef-sgd", "distributed_lr_warmup_factor": 4}),
    "optimizer_per_tensor": (False, {"optimizer": "ef-sgd"}),
    "optimizer_outer_rate": (0.5, {"optimizer": "sparse-loco"}),
    "optimizer_error_decay": (0.5, {"optimizer": "sparse-loco"}),
    "optimizer_mean_over": ("senders", {"optimizer": "sparse-loco"}),
    "optimizer_kept": (8, {"optimizer": "demo"}),
    "optimizer_chunk": (16, {"optimizer": "demo"}),
    "optimizer_bits": (8, {"optimizer": "sparse-loco"}),
    "optimizer_error_feedback": (False, HOOK),
    "optimizer_orthogonalization_epsilon": (0.1, HOOK),
}
# Key → another value, and a method that has it.
TIME_ONLY = {
    "optimizer_max_adaptation_iterations": (3, "dgc"),  # beyond them, all numbers are sorted
}


def test_every_key_has_its_case() -> None:
    keys = {key for key in train.Config.__dataclass_fields__ if key.startswith("optimizer_")}
    assert keys == {*CASES, *TIME_ONLY}


def test_settings_of_adamw_are_those_of_vectors_with_muon() -> None:
    by_default = after_steps(2, local_optimizer="muon")
    for key in ("adam_beta1", "adam_beta2", "adam_epsilon"):
        given = configured(local_optimizer="muon", **{key: 0.5})
        assert vars(checked(given, ALONE, explicit={key}))[key] == 0.5
        run = after_steps(2, local_optimizer="muon", **{key: 0.5})
        assert not torch.equal(run.parameters.x, by_default.parameters.x)


@pytest.fixture(scope="module")
def by_default() -> dict[str, tuple[Tensor, Any]]:
    """Results without a value for the key, of several keys."""
    return {}


@pytest.mark.parametrize("key", CASES)
def test_a_key_changes_what_is_computed_or_sent(
    key: str, by_default: dict[str, tuple[Tensor, Any]]
) -> None:
    value, common = CASES[key]

    def result(**changes: Any) -> tuple[Tensor, Any]:
        run = after_steps(6, **common, **changes)
        return run.parameters.x, run.network.bits

    if str(common) not in by_default:
        by_default[str(common)] = result()
    x, bits = by_default[str(common)]
    other, of_other = result(**{key: value})
    assert not torch.equal(x, other) or (bits != of_other).any()


@pytest.mark.parametrize("key", TIME_ONLY)
def test_a_key_that_changes_time_only_arrives(key: str) -> None:
    value, optimizer = TIME_ONLY[key]
    c = checked(configured(optimizer=optimizer, n_workers=1, **{key: value}), Processes())
    name = key.removeprefix(PREFIX)
    assert c.method.options[ALIASES.get(optimizer, {}).get(name, name)] == value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer_rank": 129}, "^optimizer_rank=129: use 128 or less"),
        ({"optimizer_rank": 128}, None),
        (
            {"optimizer": "dpsgd", "local_steps": 9999},
            "^local_steps=9999: use at most the .* nothing",
        ),
    ],
)
def test_nothing_to_compress_or_to_exchange_gives_a_warning(
    changes: dict[str, Any], words: str | None
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        after_steps(1, **changes)
    assert [bool(re.search(words or "", str(w.message))) for w in caught] == [True] * bool(words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer_diffusion_rate": 1.0}, []),
        # Plain gossip diverges above 1.5 on a ring of 4.
        ({"optimizer_diffusion_rate": 2.0}, ["workers do not agree", "diffusion_rate"]),
        ({"learning_rate": 1e-9}, ["no better than a guess", "% of the"]),
        ({"learning_rate": 0.3, "use_decentralized_data": True}, ["do not agree, since their acc"]),
    ],
)
def test_a_run_that_has_failed_has_a_sentence_at_its_end(
    changes: dict[str, Any], words: list[str]
) -> None:
    run, _ = trained(optimizer="dpsgd", **changes)
    defect = run.evaluation.defect
    assert [word for word in words if word not in defect] == []
    assert bool(defect) == bool(words)


@pytest.mark.parametrize(("rate", "found"), [(1.0, 1.0), (2.0, 0.9 * 0.975)])
def test_a_large_consensus_rate_reduces_the_default_diffusion_rate(
    rate: float, found: float
) -> None:
    """γ times that is at most 2 (1 + β)/λ = 1.95 with β = 0.3, on a ring of 8 with λ = 4/3."""
    given: dict[str, Any] = {"learning": "noloco", "optimizer": "dpsgd", "n_workers": 8}
    run = built(**given, learning_options={"consensus_rate": rate})
    assert run.facts()["diffusion_rate"] == pytest.approx(found)
    with pytest.warns(UserWarning, match="from 0.975 on"):
        built(**given, learning_options={"consensus_rate": 2.0}, optimizer_diffusion_rate=1.0)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["dpsgd", "power-gossip"])
def test_messages_in_flight_during_a_round_reduce_the_default_diffusion_rate(
    optimizer: str,
) -> None:
    common = {"optimizer": optimizer, "n_workers": 8, "learning": "diloco", "local_steps": 2}
    later, overlapped = (after_steps(4, **common, overlapping=value) for value in (False, True))
    assert later.facts()["diffusion_rate"] == 1.0
    assert overlapped.facts()["diffusion_rate"] == pytest.approx(0.54)
    given = after_steps(4, **common, overlapping=True, optimizer_diffusion_rate=0.54)
    assert torch.equal(overlapped.parameters.x, given.parameters.x)
    with pytest.warns(UserWarning, match="from 0.6 on"):
        after_steps(1, **common, overlapping=True, optimizer_diffusion_rate=1.0)


# Keys of other methods.


def test_a_driver_may_loop_over_methods_with_one_warning() -> None:
    config = configured(optimizer="dpsgd", optimizer_theta=0.5, optimizer_rank=2)
    with pytest.warns(UserWarning, match="optimizer_rank, optimizer_theta") as caught:
        found = checked(config, ALONE)
    assert len(caught) == 1
    assert list(found.options) == ["diffusion_rate"]
    explicit = ["optimizer", "optimizer_theta", "optimizer_rank"]  # null for another method
    assert checked(configured(optimizer="moniqua", optimizer_theta=0.5), ALONE, explicit)


@pytest.mark.parametrize("optimizer", [*AVERAGING, *AGGREGATIONS])
def test_null_is_the_default_of_the_constructor_or_of_the_table(optimizer: str) -> None:
    """The configuration that is recorded has the keys of the method, with their values."""
    found = checked(configured(optimizer=optimizer), ALONE)
    assert set(found.options) == set(option_defaults(optimizer))
    given = found.method.options
    row = (AVERAGING | AGGREGATIONS)[optimizer]
    names = ALIASES.get(optimizer, {})
    overridden = {names.get(key, key) for key in DEFAULTS.get(optimizer, {})}
    for name, default in options.defaults(row, compressor=COMPRESSORS).items():
        if name not in overridden and name not in OWN_KEYS and name not in OF_RULE:
            assert given[name] == default or default is None, name


def test_options_of_a_row_of_a_script_are_those_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the run has a key of the same name. Only the seed is the run's."""

    class Mine:
        def __init__(
            self,
            network: Any,
            layout: Any,
            *,
            momentum: float = 0.2,
            clip: float = 1,
            seed: int = 0,
        ) -> None: ...

    @dataclasses.dataclass(frozen=True)
    class Clipped(compressors.Identity):
        clip: float = 2.0

    monkeypatch.setitem(AVERAGING, "mine", Mine)
    monkeypatch.setitem(AVERAGING, "bound", partial(Mine, momentum=0.3, seed=5))
    monkeypatch.setitem(COMPRESSORS, "clipped", Clipped)
    with_compressor = partial(AVERAGING["choco"], compressor="clipped", clip=3.0)
    monkeypatch.setitem(AVERAGING, "choco-clipped", with_compressor)
    monkeypatch.setitem(AGGREGATIONS, "dgc", partial(AGGREGATIONS["dgc"], momentum=0.4))
    for optimizer, expected in {
        "mine": {"momentum": 0.2, "clip": 1, "seed": 7},
        "bound": {"momentum": 0.3, "clip": 1, "seed": 5},
        "choco": {"clip": 2.0, "seed": 7},
        "choco-clipped": {"clip": 3.0, "seed": 7},
        "dgc": {"momentum": 0.4, "nesterov": True},
    }.items():
        own = {"optimizer_compressor": "clipped"} if optimizer == "choco" else {}
        found = checked(configured(optimizer=optimizer, seed=7, **own), ALONE).method.options
        assert {name: found[name] for name in expected} == expected


def test_an_error_names_keys_that_exist_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine:
        def __init__(self, network: Any, layout: Any, *, beta: float = 0.2, theta: float = 1): ...

    monkeypatch.setitem(AVERAGING, "mine", Mine)
    own = r"optimizer_rank=2: .* \(its options: optimizer_beta, optimizer_theta\)"
    with pytest.raises(ValueError, match=own):
        checked(configured(optimizer="mine", optimizer_rank=2), ALONE, ["optimizer_rank"])


# Keys whose defaults depend on the task.


@pytest.mark.parametrize("task", tasks.TASKS)
def test_a_task_alone_has_its_own_settings(task: str) -> None:
    found = checked(configured_task(task=task), ALONE)
    for key, default in tasks.defaults(task).items():
        assert getattr(found, key) == default, key
        assert key in train.Config.__dataclass_fields__
    again = checked(OmegaConf.create(found.as_dict()), ALONE)
    assert again == found, "a recorded configuration stands for itself"


def configured_task(**values: Any) -> Any:
    return OmegaConf.merge(OmegaConf.structured(train.Config), values)


def test_given_settings_are_not_those_of_the_task() -> None:
    given: dict[str, Any] = {"batch_size": 3, "momentum": 0.5}
    given |= {"lr_schedule_milestones": [], "gradient_clipping": None}
    found = checked(configured_task(task="LSTM", **given), ALONE)
    assert {key: getattr(found, key) for key in given} == given
    assert checked(configured_task(task="LSTM"), ALONE).gradient_clipping == 0.4
    found = checked(configured_task(n_workers=6, distributed_lr_warmup_factor="auto"), ALONE)
    assert found.distributed_lr_warmup_factor == 6


@pytest.mark.parametrize(
    ("given", "left_out"),
    [
        ({}, False),
        ({"use_decentralized_data": True}, True),
        ({"decentralized_data_dirichlet_alpha": 0.1}, True),
        ({"use_decentralized_data": True, "drop_last": False}, False),
        ({"drop_last": True}, True),
    ],
)
def test_the_last_batch_is_used_as_published(given: dict[str, Any], left_out: bool) -> None:
    assert checked(configured_task(**given), ALONE).drop_last is left_out


def test_runs_of_other_versions_are_rejected(tmp_path: Path) -> None:
    now = checked(configured_task(), ALONE)
    saved = now.as_dict()
    check_same_run(tmp_path, saved, now)
    for other in ({**saved, "unknown": 1}, {k: v for k, v in saved.items() if k != "drop_last"}):
        with pytest.raises(ValueError, match=r"another version .*(unknown|drop_last)"):
            check_same_run(tmp_path, other, now)


@pytest.mark.parametrize(
    ("learning", "optimizer", "default"),
    [
        ("dpsgd", "dpsgd", True),
        ("quasi-global-momentum", "power-gossip", True),
        ("gradient-tracking", "dpsgd", False),
        ("gradient-tracking", "power-gossip", False),
        ("gradient-tracking", "choco", True),
        ("momentum-tracking", "power-gossip", False),
        ("gt-nsgd", "dpsgd", False),
        ("gt-nsgd", "choco", True),
    ],
)
def test_messages_of_tracking_follow_the_update_by_default(
    learning: str, optimizer: str, default: bool
) -> None:
    for given, expected in ((None, default), (not default, not default)):
        asked = configured(n_workers=2, learning=learning, optimizer=optimizer, overlapping=given)
        assert Trainer(checked(asked, ALONE), ALONE).config.overlapping is expected


@pytest.mark.parametrize(
    ("compressor", "more", "rate", "copy_rate"),
    [
        ("sign-and-norm", {}, None, 1.0),
        ("random-block", {"optimizer_keep_ratio": 0.1}, None, 1.0),
        ("qsgd", {}, None, 1.0),
        ("qsgd", {"optimizer_unbiased": True}, None, None),  # by the sizes of tensors
        ("qsgd", {"optimizer_unbiased": True, "learning": "exact-diffusion"}, None, None),
        ("qsgd", {"optimizer_unbiased": True, "optimizer_diffusion_rate": 0.2}, 0.2, None),
        ("top-k", {"optimizer_diffusion_rate": 0.7, "optimizer_copy_rate": 0.9}, 0.7, 0.9),
    ],
)
def test_rates_of_choco_by_default(
    compressor: str, more: dict[str, Any], rate: float | None, copy_rate: float | None
) -> None:
    """γ depends on the graph and the tensors, too: see test_default_rates.py."""
    found = checked(configured(optimizer="choco", optimizer_compressor=compressor, **more), ALONE)
    assert found.options["diffusion_rate"] == rate
    assert found.options["copy_rate"] == copy_rate
    given = {key.removeprefix("optimizer_"): value for key, value in more.items()}
    given.pop("learning", None)
    if "learning" not in more:
        method = GossipMethod.on_graph("choco", compressor=compressor, **given)
        assert method.options["diffusion_rate"] == rate
        assert method.options["copy_rate"] == copy_rate


def test_a_run_on_the_virtual_clock_is_evaluated_by_any_number_of_processes() -> None:
    two, values = Processes(), {"n_workers": 4, "optimizer": "dpsgd", "scenario": {}}
    two.size = 2
    with pytest.raises(ValueError, match=r"^scenario: use one process"):
        checked(configured(**values), two)
    checked(configured(**values, evaluate_only=True), two)


# The table of keys.


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("powergossip.algorithms.registry", "AVERAGING"),
        ("powergossip.algorithms.aggregation", "AGGREGATIONS"),
        ("powergossip.algorithms.learning.registry", "LEARNING"),
        ("powergossip.compressors", "COMPRESSORS"),
    ],
)
def test_options_in_the_sources_of_rows_are_those_of_the_imported_rows(
    module: str, name: str
) -> None:
    """Names and their order, types, defaults and descriptions, inherited ones, too."""
    imported, sources = vars(importlib.import_module(module))[name], method_keys.names(module)[name]
    assert [*imported] == [*sources]
    for key, row in imported.items():
        found = sources[key].options if isinstance(sources[key], method_keys.Definition) else {}
        texts: dict[str, str] = {}
        for described in reversed(inspect.getmro(row)) if inspect.isclass(row) else (row,):
            texts |= method_keys.described(inspect.getdoc(described) or "")
        expected = options.parameters(row)
        assert {*found} == {*expected}, key
        for option, parameter in expected.items():
            kinds = {None if kind is Tensor else kind for kind in get_args(parameter.annotation)}
            kinds = {type(None) if k is None else k for k in kinds} or {parameter.annotation}
            assert found[option] == (kinds, parameter.default, texts.get(option, "")), option


def test_keys_of_methods_have_the_defaults_of_their_methods() -> None:
    found: dict[str, list[str]] = {}
    for title, keys in method_keys.methods().items():
        kind, _, name = title.partition("=")
        values = {key.removeprefix(PREFIX): option.default for key, option in keys.items()}
        row = kind == "optimizer_compressor" and COMPRESSORS[name]
        assert [*values.items()] == [
            *(options.defaults(row) if row else option_defaults(name)).items()
        ]
        found.setdefault(kind, []).append(name)
    assert found == {
        "optimizer": [*AVERAGING, *AGGREGATIONS, *HOOKS],
        "optimizer_compressor": [*COMPRESSORS],
    }


def test_help_has_the_defaults_of_each_task() -> None:
    found = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", method_keys.task_defaults(), re.MULTILINE)
    assert {name: text.split() for name, text in found} == {
        name: [f"{key}={as_written(value)}" for key, value in tasks.defaults(name).items()]
        for name in tasks.TASKS
    }
