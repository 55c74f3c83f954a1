"""Averaging algorithms by the names that the published experiment gives them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from powergossip.algorithms.method import Method, parameters


@dataclass(frozen=True)
class ConsensusMethod:
    """An averaging algorithm, its fixed options, and its grid.

    Attributes:
        averaging: Row of algorithms.AVERAGING or algorithms.CONSENSUS_ONLY.
        options: Fixed options of that row.
        grid: Names of the options to sweep: diffusion_rate, theta.
        needs_grid: True if there is a default grid. False: one diffusion rate unless the
            configuration specifies the grid.
        num_steps: Number of steps unless the configuration specifies it.
    """

    averaging: str
    options: Mapping[str, Any] = field(default_factory=dict)
    grid: tuple[str, ...] = ()
    needs_grid: bool = True
    num_steps: int = 5000

    def method(self, values: Mapping[str, Any]) -> Method:
        """The method, with other options from `values`. Options of other methods are ignored."""
        given = {**values, **self.options}
        known = parameters(self.averaging, given)
        own = {option: value for option, value in given.items() if option in known}
        return Method.of(self.averaging, options=own)


# As published: by then, methods of the family of plain gossip agree up to rounding.
_FEW_STEPS = 500
_RATE = ("diffusion_rate",)
_RATE_AND_THETA = ("diffusion_rate", "theta")


def _power_gossip(**options: Any) -> ConsensusMethod:
    return ConsensusMethod("power-gossip", options, _RATE, needs_grid=False)


ALGORITHMS: dict[str, ConsensusMethod] = {
    "uncompressed": ConsensusMethod("dpsgd", grid=_RATE, needs_grid=False, num_steps=_FEW_STEPS),
    "power_gossip": _power_gossip(),
    "power_gossip_random": _power_gossip(warm_start=False),
    "power_gossip_signs": _power_gossip(round_weights=True),
    "power_gossip_random_signs": _power_gossip(warm_start=False, round_weights=True),
    "sign_choco": ConsensusMethod("choco", {"compressor": "sign-and-norm"}, _RATE),
    "topk_choco": ConsensusMethod("choco", {"compressor": "top-k", "rank": None}, _RATE),
    "randomk_choco": ConsensusMethod("choco", {"compressor": "random-k", "rank": None}, _RATE),
    "svd_choco": ConsensusMethod("choco", {"compressor": "svd"}, _RATE),
    "qsgd_choco": ConsensusMethod("choco", {"compressor": "qsgd"}, _RATE),
    "fp_choco": ConsensusMethod("choco", {"compressor": "identity"}, _RATE),
    "sign_deepsqueeze": ConsensusMethod("deepsqueeze", {"compressor": "sign-and-norm"}, _RATE),
    "topk_deepsqueeze": ConsensusMethod(
        "deepsqueeze", {"compressor": "top-k", "rank": None}, _RATE
    ),
    "moniqua": ConsensusMethod("moniqua", grid=_RATE_AND_THETA),
    "push_sum": ConsensusMethod("push-sum", num_steps=_FEW_STEPS),
    "chebyshev": ConsensusMethod("chebyshev", num_steps=_FEW_STEPS),
    "finite_time": ConsensusMethod("finite-time", num_steps=_FEW_STEPS),
}
