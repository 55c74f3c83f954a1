"""Grids of diffusion rates and theta, and numbers of steps, of the algorithms of a sweep."""

from itertools import product

import numpy as np

from powergossip.algorithms import rates
from powergossip.consensus.config import Settings
from powergossip.consensus.methods import ALGORITHMS, ConsensusMethod
from powergossip.topologies import Topology

Setting = dict[str, float]  # option → value, a point of an algorithm's grid

# Of the grids of diffusion rates, where the configuration has null. As published.
_NUM_SAMPLES = 20
RANGE_MIN = 1e-4
OTHERS = "others"  # the other algorithms, in a mapping num_steps


def num_steps(c: Settings, name: str) -> int:
    """The number of steps of an algorithm."""
    steps = c.num_steps
    if isinstance(steps, dict):
        steps = steps.get(name, steps.get(OTHERS))
    return ALGORITHMS[name].num_steps if steps is None else int(steps)


def grid(c: Settings, method: ConsensusMethod, topology: Topology) -> list[Setting]:
    """All settings of an algorithm. Raises BadValue for diffusion_rate=auto without a spectrum."""
    points = {"diffusion_rate": _diffusion_rates(c, method, topology)}
    if "theta" in method.grid:
        theta = np.geomspace(c.theta_range_min, c.theta_range_max, c.theta_num_samples)
        points["theta"] = theta.tolist()
    return [dict(zip(points, values, strict=True)) for values in product(*points.values())]


def _diffusion_rates(c: Settings, method: ConsensusMethod, topology: Topology) -> list[float]:
    if c.diffusion_rate is not None:
        return [rates.best(topology) if c.diffusion_rate == rates.AUTO else float(c.diffusion_rate)]
    count, low = c.hyperparameter_num_samples, c.hyperparameter_range_min
    high = c.hyperparameter_range_max
    specified = count is not None or low is not None
    if "diffusion_rate" not in method.grid or not (method.needs_grid or specified):
        return [high]
    if "theta" in method.grid:
        count = c.moniqua_num_samples or count
    return np.geomspace(low or RANGE_MIN, high, count or _NUM_SAMPLES).tolist()
