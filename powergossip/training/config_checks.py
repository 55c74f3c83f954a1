"""The keys of train.Config: accepted values, and the options of the chosen method.

A key `optimizer_X` is the option X of the method `optimizer`. A method has the options of its row
(see powergossip.registry_options), so a new option needs no line here. null stands for the default.
"""

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from omegaconf import DictConfig

from powergossip import algorithms, checks, tasks, ulfm
from powergossip import registry_options as options
from powergossip.algorithms import aggregation, ddp_hooks, learning, method
from powergossip.algorithms.method import Method
from powergossip.network import BACKENDS, Processes
from powergossip.network import hosted_workers as hosted
from powergossip.runs import trackers
from powergossip.runs.configuration import plain
from powergossip.training import muon
from powergossip.training.config import Config, Settings
from powergossip.training.local_optimizers import LOCAL_OPTIMIZERS
from powergossip.training.method_keys import (
    ALIASES,
    DEFAULTS,
    OF_RULE,
    OWN_KEYS,
    PREFIX,
    as_written,
)
from powergossip.training.precision import PRECISIONS

# Options of learning rules with their own key. All others are in learning_options.
LEARNING_KEYS = {
    *OWN_KEYS,
    "overlapping",
    "local_steps",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
}
# The values that stand for the task's default, where they are not null.
BLANKS = {"gradient_clipping": "auto"}

ON_WORKER_LOSS = ("end", "continue")
DATA_OF_LOST = ("left", "redistributed")


def checked(
    asked: DictConfig, processes: Processes, explicit: Collection[str] | None = None
) -> Settings:
    """Return the settings of a configuration, without blanks, with the options of its method.

    Args:
        explicit: Keys given for this run. Among them, a key of another method is rejected.
            Among the other keys, keys of another method give one warning.

    Raises:
        ValueError: For bad values.
    """
    values = plain(asked)
    checks.representable("", {key: values[key] for key in values if key != "task_options"})
    given = {
        key.removeprefix(PREFIX): values.pop(key) for key in list(values) if key.startswith(PREFIX)
    }
    method.import_rows(values["optimizer"], values["learning"], given.get("compressor"))
    _resolve_blanks(values, processes)
    c = Settings.of(values)
    if c.drop_last is None:
        c.drop_last = data_differ(c)
    _check_ignored(c, explicit or (), warn=processes.rank == 0)
    _check_values(c, given)
    connects = processes.size > 1 or c.distributed_backend in ("gloo", "nccl")
    file = c.distributed_init_file
    ok = file is None or connects or c.evaluate_only
    checks.check("distributed_init_file", file, ok, "distributed_backend=gloo or nccl with it")
    ratio, sorts = c.decentralized_data_shuffled_ratio, c.use_decentralized_data
    for prefix, needed, ok in (
        ("rank", "distributed_init_file", file is not None or not c.rank),
        ("decentralized_data_shuffled_ratio", "use_decentralized_data", sorts or not ratio),
        ("adam_", "local_optimizer=adamw or muon", c.local_optimizer in ("adamw", "muon")),
        ("muon_", "local_optimizer=muon", c.local_optimizer == "muon"),
    ):
        for key in (key for key in explicit or () if key.startswith(prefix)):
            checks.check(key, getattr(c, key), ok, f"{needed} with it")
    if c.lr_schedule == "cosine" and "lr_schedule_milestones" in (explicit or ()):
        none = not c.lr_schedule_milestones
        checks.check("lr_schedule_milestones", c.lr_schedule_milestones, none, "[] with cosine")
    _check_method(c, explicit or ())
    _check_events(c, processes)
    _resolve_method(c, given, explicit or (), warn=processes.rank == 0)
    batches = c.options.get("num_batches_per_step", 1)
    checks.at_least_one(f"{PREFIX}num_batches_per_step", batches)
    if processes.writes and not c.evaluate_only:
        trackers.check(vars(c))
    if c.optimizer in ddp_hooks.HOOKS and not c.evaluate_only:
        with errors_name_keys(c.optimizer):
            ddp_hooks.check(hosted=hosted(c.n_workers, processes.size), **hook_options(c))
    return c


def _resolve_blanks(values: dict[str, Any], processes: Processes) -> None:
    """Give the keys that depend on processes and task their values. Raises ValueError."""
    if values["n_workers"] is None:
        values["n_workers"] = processes.size
    hosted(values["n_workers"], processes.size)
    for key, default in tasks.defaults(values["task"]).items():
        if values[key] == BLANKS.get(key):
            values[key] = default
    if values["distributed_lr_warmup_factor"] == "auto":
        values["distributed_lr_warmup_factor"] = values["n_workers"]


def data_differ(c: Settings) -> bool:
    """True if the configuration gives the workers non-IID data."""
    ignored = tasks.IGNORED.get(c.task, ())
    is_sorted = c.use_decentralized_data and "use_decentralized_data" not in ignored
    skewed = (c.decentralized_data_dirichlet_alpha, c.decentralized_data_column)
    return is_sorted or skewed != (None, None)


def _check_ignored(c: Settings, explicit: Collection[str], warn: bool) -> None:
    """Reject keys that are true in `explicit` but have no effect on the task.

    Elsewhere they give a warning, except for reshuffle_data, which is true by default.
    """
    for key in tasks.IGNORED.get(c.task, ()):
        is_set = getattr(c, key)
        if is_set and key in explicit:
            raise ValueError(
                f"{key}=true: use false with task={c.task}, where each worker has a fixed piece of "
                "the text"
            )
        if is_set and key != "reshuffle_data" and warn:
            warnings.warn(f"ignored, since task={c.task} has no such option: {key}", stacklevel=3)


def _check_values(c: Settings, given: Mapping[str, Any]) -> None:
    """Raise ValueError for a value that no method accepts."""
    checks.all_of(
        checks.at_least_one,
        vars(c),
        (
            "num_epochs",
            "batch_size",
            "checkpoint_interval",
            "evaluation_interval",
            "local_steps",
            "muon_steps",
            "recalibration_batches",
        ),
    )
    checks.all_of(checks.not_negative, vars(c), ("seed", "rank", "data_processes"))
    checks.level("log_verbosity", c.log_verbosity)
    checks.all_of(checks.positive, vars(c), ("learning_rate", "adam_epsilon", "muon_rate"))
    checks.all_of(
        checks.below_one,
        vars(c),
        ("adam_beta1", "adam_beta2", "momentum", "muon_momentum", "validation_ratio"),
    )
    checks.fraction("decentralized_data_shuffled_ratio", c.decentralized_data_shuffled_ratio)
    checks.one_of("mean_model_statistics", c.mean_model_statistics, ("averaged", "recalibrated"))
    if not c.evaluate_workers and not c.evaluate_average_model:
        raise ValueError("evaluate_workers=false: use true with evaluate_average_model=false")
    checks.one_of("lr_schedule", c.lr_schedule, ("milestones", "cosine"))
    checks.one_of("local_optimizer", c.local_optimizer, LOCAL_OPTIMIZERS)
    checks.one_of("muon_precision", c.muon_precision, muon.PRECISIONS)
    checks.one_of("muon_scale", c.muon_scale, muon.SCALES)
    checks.one_of("precision", c.precision, PRECISIONS)
    checks.one_of("batched_gradients", c.batched_gradients, ("auto", "on", "off"))
    if c.batched_gradients == "on" and not c.evaluate_only:
        _check_batched(c)
    checks.one_of("cuda_aware", c.cuda_aware, ("auto", "on", "off"))
    checks.one_of("distributed_backend", c.distributed_backend, BACKENDS)
    checks.one_of("checkpoint", c.checkpoint, ("last", "best"))
    if c.checkpoint != "last" and not (c.evaluate_only or c.resume):
        raise ValueError(
            f"checkpoint={c.checkpoint}: use it with resume=true or evaluate_only=true"
        )

    def require(key: str, ok: Callable[[Any], bool], accepted: str) -> None:
        checks.check(key, getattr(c, key), ok(getattr(c, key)), accepted)

    require("max_steps_per_epoch", lambda v: v is None or v >= 1, "1 or more, or null for all")
    require(
        "distributed_lr_warmup_epoch",
        lambda v: v >= 0 and math.isfinite(v),
        "a number of epochs, or 0 for none",
    )
    require("weight_decay", lambda v: v >= 0 and math.isfinite(v), "0 or more")
    require(
        "distributed_lr_warmup_factor",
        lambda v: checks.is_finite(v) and v > 0,
        "a number above 0, or auto",
    )
    require(
        "gradient_clipping",
        lambda v: v is None or (checks.is_finite(v) and v > 0),
        "a number above 0, null, or auto",
    )
    rate = given.get("diffusion_rate")
    ok = rate is None or rate == "auto" or (checks.is_finite(rate) and rate > 0)
    checks.check(f"{PREFIX}diffusion_rate", rate, ok, "a number above 0, or auto")
    require(
        "lr_schedule_milestones",
        lambda v: all(_is_pair(pair) and pair[0] >= 0 and pair[1] > 0 for pair in v),
        "a list of [epoch, factor], such as [[150, 0.1], [225, 0.1]]",
    )
    require(
        "spectrum_logging_worker_pairs",
        lambda v: all(
            _is_pair(pair) and all(isinstance(n, int) and n in range(c.n_workers) for n in pair)
            for pair in v
        ),
        f"a list of pairs of workers, 0 to {c.n_workers - 1}",
    )


def _check_batched(c: Settings) -> None:
    """Raise ValueError for keys that do not go with batched gradients."""
    if c.torch_compile:
        raise ValueError("batched_gradients=on: use auto or off with torch_compile=true")
    if c.optimizer in ddp_hooks.HOOKS:
        raise ValueError(
            f"batched_gradients=on: use auto or off with optimizer={c.optimizer}, which has one "
            "worker in a process"
        )


def _is_pair(values: Any) -> bool:
    """True if this is a list of two finite numbers."""
    try:
        return len(values) == 2 and all(math.isfinite(value) for value in values)
    except TypeError:
        return False


def _check_method(c: Settings, explicit: Collection[str]) -> None:
    """Raise ValueError for an unknown method, or one that does not go with other keys."""
    known = {
        **algorithms.AVERAGING,
        **aggregation.AGGREGATIONS,
        **dict.fromkeys(ddp_hooks.HOOKS),
    }
    if c.optimizer not in known:
        choices = ", ".join(known)
        raise ValueError(
            f'optimizer "{c.optimizer}" is unknown; choose from {choices}, or use '
            "package.module:name"
        )
    _check_learning(c, explicit)
    has_local_steps = {*algorithms.AVERAGING, *aggregation.OF_LOCAL_STEPS}
    if c.optimizer not in has_local_steps and c.local_steps > 1:
        raise ValueError(
            f"local_steps={c.local_steps} is for gossip and sparse-loco; use local_steps=1 with "
            f"{c.optimizer} (compressed gradients have optimizer_num_batches_per_step)"
        )


def _check_events(c: Settings, processes: Processes) -> None:
    """Resolve the keys of exchanges by edges. Raises ValueError for others that do not fit."""
    checks.one_of("data_of_lost", c.data_of_lost, DATA_OF_LOST)
    checks.one_of("on_worker_loss", c.on_worker_loss, ON_WORKER_LOSS)
    checks.positive("worker_timeout", c.worker_timeout)
    continues = c.survives
    given = f"on_worker_loss={c.on_worker_loss}" if continues else f"gossip={c.gossip}"
    if continues and not c.evaluate_only:
        if c.scenario is not None:
            raise ValueError(f"{given}: use end with a scenario, which has deaths of its own")
        if processes.transport != "internet":
            ulfm.require(given)
        if processes.size == 1 or not processes.are_linked:
            raise ValueError(
                f"{given}: use several processes of mpirun, with its own messages, or machines "
                "that meet with a ticket"
            )
    n_processes = 1 if c.evaluate_only else processes.size
    apart = continues
    if c.gossip != "synchronous" or c.max_delay is not None or c.scenario is not None:
        from powergossip.events import scenario

        apart = scenario.resolve(c, n_processes, linked=processes.are_linked) or continues
    if apart:
        given = "a scenario" if c.scenario is not None else given
        on = c.batched_gradients == "on"
        checks.check("batched_gradients", c.batched_gradients, not on, f"auto or off with {given}")
        checks.check("final_merge", c.final_merge, not c.final_merge, f"false with {given}")
    else:
        kept = c.data_of_lost == "left"
        checks.check("data_of_lost", c.data_of_lost, kept, "left where no worker can be lost")


# --- Options of the method -----------------------------------------------------------------------


def _check_learning(c: Settings, explicit: Collection[str]) -> None:
    """Raise ValueError for an unknown learning rule, or one that does not go with other keys.

    Momentum that the rule does not have is rejected where it is in `explicit`.
    """
    checks.one_of("learning", c.learning, learning.LEARNING)
    if c.optimizer not in algorithms.AVERAGING:
        wanted = f"{learning.DEFAULT} with optimizer={c.optimizer}, which is no averaging rule"
        checks.check("learning", c.learning, c.learning == learning.DEFAULT, wanted)
        return
    rule = learning.rule(c.learning, c.local_optimizer)
    known = learning.options(c.learning, c.local_optimizer)
    if rule.directs() and learning.is_sgd(c.local_optimizer):
        lacks = f"with learning={c.learning}, which has none"
        momentum = c.momentum if "momentum" in explicit else 0
        checks.check("momentum", momentum, "momentum" in known or momentum == 0, f"0 {lacks}")
        if "nesterov" in explicit and c.nesterov and "nesterov" not in known:
            raise ValueError(f"nesterov=true: use false {lacks}")


def shared_keys(optimizer: str) -> dict[str, str]:
    """Return option → key without the prefix, for the options of a row with shared values.

    A value that a row binds by `functools.partial` stays. Averaging rules of a script share the
    seed only: their momentum, for instance, is not the local optimizer's.
    """
    row = {**algorithms.AVERAGING, **aggregation.AGGREGATIONS}.get(optimizer, ddp_hooks.DDPHook)
    bound = row.keywords if isinstance(row, partial) else {}
    of_script = not options.are_of_library(row)
    names = ("seed",) if of_script and optimizer in algorithms.AVERAGING else OWN_KEYS
    own = options.parameters(row)  # without a compressor's
    return {name: OWN_KEYS[name] for name in names if name in own and name not in bound}


def _keys(optimizer: str, known: Iterable[str]) -> dict[str, str]:
    """Return option → X of its key optimizer_X, for the options with such a key."""
    keys = {name: key for key, name in ALIASES.get(optimizer, {}).items()}
    shared = shared_keys(optimizer)
    own = (name for name in known if name not in shared and name not in OF_RULE)
    return {name: keys.get(name, name) for name in own}


def option_defaults(optimizer: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return X → default for the keys optimizer_X of a method.

    `given`, X → value, may choose the compressor, whose options are included.
    """
    known = method.defaults(method.parameters(optimizer, given), given or {})
    found = {key: known[name] for name, key in _keys(optimizer, known).items()}
    of_gradients = {*aggregation.AGGREGATIONS} - aggregation.OF_LOCAL_STEPS
    return found | (OF_RULE if optimizer in of_gradients else {}) | DEFAULTS.get(optimizer, {})


def _resolve_method(
    c: Settings, asked: Mapping[str, Any], explicit: Collection[str], warn: bool
) -> None:
    """Give the method and its options their values. See `checked`.

    Args:
        asked: X → value of optimizer_X, for the options of all methods.
    """
    given = {name: value for name, value in asked.items() if value is not None and value != []}
    preferred = learning.averaging_defaults(c.learning, c.optimizer)
    known = option_defaults(c.optimizer, preferred | given)
    title = f"optimizer={c.optimizer}"
    for name in learning.without(c.learning):
        known.pop(name, None)
        title = f"learning={c.learning}"
    lacking = [name for name in given if name not in known]
    for name in lacking:
        if f"{PREFIX}{name}" in explicit or f"{PREFIX}{name}" not in vars(Config()):
            accepted = ", ".join(f"{PREFIX}{name}" for name in known)
            raise ValueError(
                f"{PREFIX}{name}={as_written(given[name])}: {title} has no such option; "
                f"leave it out (its options: {accepted or 'none'})"
            )
    if lacking and warn:
        keys = ", ".join(f"{PREFIX}{name}" for name in lacking)
        warnings.warn(f"ignored, since {title} has no such options: {keys}", stacklevel=3)
    own = DEFAULTS.get(c.optimizer, {}) | {k: v for k, v in given.items() if k in known}
    c.method = _method(c, own)
    values = {
        key: c.method.options[name] for name, key in _keys(c.optimizer, c.method.options).items()
    }
    c.options = {name: values.get(name, own.get(name, known[name])) for name in known}


def _method(c: Settings, given: Mapping[str, Any]) -> Method:
    """The method of a configuration, with X → value of optimizer_X. Raises ValueError."""
    names = ALIASES.get(c.optimizer, {})
    own = {names.get(key, key): value for key, value in given.items() if key not in OF_RULE}
    of_run = {**vars(c), "nesterov": c.nesterov and c.momentum > 0}
    own |= {name: of_run[key] for name, key in shared_keys(c.optimizer).items()}
    known = options.parameters(learning.rule(c.learning, c.local_optimizer))
    known = {name: parameter for name, parameter in known.items() if name not in LEARNING_KEYS}
    options.check(f"learning={c.learning}", c.learning_options, known, "learning_options.")
    of_run["overlapping"] = bool(c.overlapping)
    of_rule = method.rule_options(
        c.learning, c.local_optimizer, **{key: of_run[key] for key in LEARNING_KEYS & of_run.keys()}
    )
    with errors_name_keys(c.optimizer):
        return Method.of(
            c.optimizer,
            c.learning,
            local_optimizer=c.local_optimizer,
            options=own,
            learning_options=of_rule | c.learning_options,
        )


def hook_options(c: Settings) -> dict[str, Any]:
    """Return the options of PyTorch's hooks alone, without those shared with other methods."""
    return {name: value for name, value in c.method.options.items() if name not in OWN_KEYS}


@contextmanager
def errors_name_keys(optimizer: str) -> Iterator[None]:
    """Rename the options of a method in the errors of the block to their keys."""
    try:
        yield
    except checks.BadValue as error:
        if "." in error.name:  # an entry of another key
            raise
        keys = {name: key for key, name in ALIASES.get(optimizer, {}).items()}
        shared = shared_keys(optimizer)
        key = shared.get(error.name, f"{PREFIX}{keys.get(error.name, error.name)}")
        raise error.renamed(key) from error


@contextmanager
def errors_name_learning_options(c: Settings) -> Iterator[None]:
    """Rename the given options of a learning rule in the errors of the block to their keys."""
    try:
        yield
    except checks.BadValue as error:
        if error.name not in c.learning_options:
            raise
        raise error.renamed(f"learning_options.{error.name}") from error
