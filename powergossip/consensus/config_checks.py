"""Checks of the configuration of gossip_run.py."""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from powergossip import checks, user_functions
from powergossip import registry_options as options
from powergossip.algorithms import AVERAGING
from powergossip.algorithms.method import import_rows, parameters
from powergossip.checks import BadValue
from powergossip.consensus.config import Settings
from powergossip.consensus.data import DATA
from powergossip.consensus.grids import OTHERS, RANGE_MIN
from powergossip.consensus.methods import ALGORITHMS, ConsensusMethod
from powergossip.network import Processes
from powergossip.network import hosted_workers as hosted
from powergossip.runs.assignments import OPTION
from powergossip.runs.configuration import plain

_MOST_SAMPLES = 1000  # of a rate or theta
_MOST_ROWS = 2**15  # an element has 4 bytes, and its position 31 bits


def checked(config: DictConfig, processes: Processes) -> Settings:
    """Return the settings of a configuration, with n_workers and the list of algorithms resolved.

    Raises:
        ValueError: For values that are not accepted.
    """
    values = plain(config)
    checks.representable("", values)
    if values["n_workers"] is None:
        values["n_workers"] = processes.size
    own = {k.removeprefix(OPTION): values.pop(k) for k in [*values] if k.startswith(OPTION)}
    c = Settings(**values, options=own)
    hosted(c.n_workers, processes.size)
    checks.at_least_one("compression_rank", c.compression_rank)
    checks.at_least_one("compression_num_iterations", c.compression_num_iterations)
    checks.between("matrix_size", c.matrix_size, 1, _MOST_ROWS)
    for key in ("theta_num_samples", "hyperparameter_num_samples", "moniqua_num_samples"):
        if values[key] is not None:
            checks.between(key, values[key], 1, _MOST_SAMPLES)
    checks.not_negative("seed", c.seed)
    checks.level("log_verbosity", c.log_verbosity)
    checks.between("compression_levels", c.compression_levels, 1, 127)
    for kind in ("hyperparameter", "theta"):
        low, high = f"{kind}_range_min", f"{kind}_range_max"
        least, most = values[low], values[high]
        least = RANGE_MIN if least is None else least
        checks.positive(high, most)
        checks.positive(low, least)
        checks.check(low, least, least <= most, f"at most {high}={most}")
    rate = c.diffusion_rate
    checks.check(
        "diffusion_rate",
        rate,
        rate is None or rate == "auto" or (checks.is_finite(rate) and rate > 0),
        "a number above 0, auto, or null for the grid",
    )
    checks.one_of("data_type", c.data_type, DATA)
    c.algorithm = _algorithms(c.algorithm, c.options)
    _check_num_steps(c.num_steps)
    return c


def _algorithms(value: Any, own: Mapping[str, Any]) -> list[str]:
    """The names of a name, a list of names, or all; each once. Raises BadValue.

    Args:
        own: Options of rows of the user among them, which are added to `ALGORITHMS`.
    """
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names:
        raise BadValue("algorithm", value, "a name, a list of names, or all")
    if "all" in names:
        names = list(ALGORITHMS)
    for name in filter(user_functions.is_name, names):
        ALGORITHMS[name] = _of_user(name, own)
    for option in own:
        ok = any(option in ALGORITHMS[name].options for name in names if name in ALGORITHMS)
        checks.check(f"{OPTION}{option}", own[option], ok, "an option of the algorithm")
    for name in names:
        checks.one_of("algorithm", name, [*ALGORITHMS, "all"])
    return list(dict.fromkeys(names))


def _of_user(name: str, own: Mapping[str, Any]) -> ConsensusMethod:
    """The row package.module:name: an averaging rule, or a compressor of CHOCO-Gossip, with those
    of the options that it has. Raises ValueError."""
    row = user_functions.find("algorithm", name).function
    compresses = hasattr(getattr(row, "func", row), "decompress")
    averaging, fixed = ("choco", {"compressor": name}) if compresses else (name, {})
    import_rows(averaging, compressor=fixed.get("compressor"), keys=("algorithm",) * 3)
    checks.check("algorithm", name, averaging in AVERAGING, "an averaging rule or a compressor")
    known = parameters(averaging, fixed)
    given = {option: value for option, value in own.items() if option in known}
    options.check(name, given, known, OPTION)
    return ConsensusMethod(averaging, fixed | given, ("diffusion_rate",) if compresses else ())


def _check_num_steps(value: Any) -> None:
    """Raise BadValue unless it is null, a number of steps, or a mapping of them."""
    accepted = (
        f"a whole number of 1 or more, null, or a mapping {{ALGORITHM: steps, {OTHERS}: steps}}"
    )
    steps = [value]
    if isinstance(value, dict):
        for name in value:
            checks.one_of("num_steps", name, [*ALGORITHMS, OTHERS])
        steps = list(value.values())
    elif value is None:
        return
    for number in steps:
        ok = isinstance(number, int) and not isinstance(number, bool) and number >= 1
        checks.check("num_steps", value, ok, accepted)
