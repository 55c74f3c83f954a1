"""Checks of the configuration of gossip_run.py, and the grids of its algorithms."""

from itertools import product
from typing import Any

import numpy as np
from omegaconf import DictConfig, ListConfig

from powergossip import checks
from powergossip.checks import BadValue
from powergossip.consensus.data import DATA
from powergossip.consensus.methods import ALGORITHMS, Method
from powergossip.network import Processes
from powergossip.network import hosted_workers as hosted
from powergossip.runs.output import plain_copy
from powergossip.topologies import Topology

Setting = dict[str, float]  # option → value, a point of an algorithm's grid


def checked(config: DictConfig, processes: Processes) -> Any:
    """Return a copy of the configuration with n_workers and the list of algorithms resolved.

    Raises ValueError for values that are not accepted.
    """
    c = plain_copy(config)
    c.n_workers = processes.size if c.n_workers is None else c.n_workers
    hosted(c.n_workers, processes.size)
    checks.all_of(
        checks.at_least_one,
        c,
        (
            "num_steps",
            "matrix_size",
            "compression_rank",
            "compression_num_iterations",
            "hyperparameter_num_samples",
            "theta_num_samples",
            "moniqua_num_samples",
        ),
    )
    checks.all_of(checks.not_negative, c, ("seed", "log_verbosity"))
    checks.between("compression_levels", c.compression_levels, 1, 127)
    for grid in ("hyperparameter", "theta"):
        low, high = f"{grid}_range_min", f"{grid}_range_max"
        checks.all_of(checks.positive, c, (low, high))
        checks.check(low, c[low], c[low] <= c[high], f"at most {high}={c[high]}")
    rate = c.diffusion_rate
    checks.check(
        "diffusion_rate",
        rate,
        rate is None or rate == "auto" or (checks.is_finite(rate) and rate > 0),
        "a number above 0, auto, or null for the grid",
    )
    checks.one_of("data_type", c.data_type, DATA)
    c.algorithm = _algorithms(c.algorithm)
    return c


def _algorithms(value: Any) -> list[str]:
    """The names of a name, a list of names, or all; each once. Raises BadValue."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, ListConfig | list) or not names:
        raise BadValue("algorithm", value, "a name, a list of names, or all")
    if "all" in names:
        names = list(ALGORITHMS)
    for name in names:
        checks.one_of("algorithm", name, [*ALGORITHMS, "all"])
    return list(dict.fromkeys(names))


def diffusion_rate(c: Any, topology: Topology) -> float:
    """γ as configured, or the best for plain gossip on this topology. Raises ValueError."""
    if c.diffusion_rate != "auto":
        return float(c.diffusion_rate)
    try:
        return topology.best_diffusion_rate
    except ValueError as error:
        raise ValueError(f"diffusion_rate=auto: {error}") from error


def grid(c: Any, method: Method, topology: Topology) -> list[Setting]:
    """All settings of an algorithm: one for an algorithm without a grid."""
    low, high = c.hyperparameter_range_min, c.hyperparameter_range_max
    if c.diffusion_rate is not None:
        rates = [diffusion_rate(c, topology)]
    elif not method.grid:
        rates = [high]
    else:
        with_theta = "theta" in method.grid
        count = c.moniqua_num_samples if with_theta else c.hyperparameter_num_samples
        rates = np.geomspace(low, high, count).tolist()
    thetas = np.geomspace(c.theta_range_min, c.theta_range_max, c.theta_num_samples).tolist()
    values = {"diffusion_rate": rates, "theta": thetas}
    names = ["diffusion_rate", *(name for name in method.grid if name != "diffusion_rate")]
    return [
        dict(zip(names, point, strict=True)) for point in product(*(values[name] for name in names))
    ]
