"""Exact diffusion by duals of the exchanges."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from powergossip import checks
from powergossip.algorithms.averaging import Incremental, Kind
from powergossip.algorithms.learning.gossip_rule import GossipRule, Variable, Workers


class ExactDiffusion(GossipRule):
    """NIDS, exact diffusion and D² with (I + W)/2, in the form of duals::

        y_i = x_i + u_i + d_i                u_i the local optimizer's displacement, −η g_i for SGD
        δ_i = Δ(y)_i/(1 + θ)                 Δ(y) = G(y) − y, opposite at both ends of an edge
        x_i ← y_i + δ_i,   d_i ← d_i + θ δ_i

    Li, Shi & Yan (2019), arXiv:1704.07807 (NIDS); Yuan, Ying, Zhao & Sayed (2019),
    arXiv:1702.05122. Over plain gossip, Δ(y) = γ (W − I) y: with γ = 1, (I + W)/2 mixes. D² (Tang
    et al. 2018, arXiv:1803.07068) mixes with W, which is at its limit of stability where W has the
    eigenvalue −1/3, such as on a ring of 8 with weights 1/3. In exact arithmetic, the difference
    form of D² is the same; its rounding errors add up, errors of the duals do not. Half of Δ, not
    half of γ: PowerGossip averages vectors with their own rate.

    The papers have a dual rate θ = 1. Where G moves a direction by a small fraction ℓ a step, as
    PowerGossip all but a few, x and d then oscillate with frequency √ℓ and decay with ℓ/2 only. A
    smaller θ reduces the frequency to √(θ ℓ). The fixed point is the same. Over PowerGossip, the
    default is therefore 0.1.

    With CHOCO-Gossip's public copies and an unbiased compressor it is CEDAS (Huang & Pu 2025,
    arXiv:2301.05872) and, for a constant η, LEAD (Liu et al. 2021, arXiv:2007.00232). Biased
    compressors diverge.

    One message a step, as large as D-PSGD's. Exact fixed point. Invariant: Σ_i d_i = 0.

    Where messages may be late, d_i = Σ_j d_ij of its edges. The duals are an integral controller of
    the differences between neighbors. With exchanges that are τ steps late, it oscillates unless
    θ < 1/τ, or the loss is curved enough to damp it: NIDS itself diverges for small learning rates,
    whatever the diffusion rate. d_ij = −d_ji once both ends have applied the same exchanges. A
    worker whose neighbor j is lost forgets d_ij. Σ_i d_i = 0 thus holds among the survivors, and
    they find the optimum of their mean loss.

    Args:
        dual_rate: Dual rate θ. None: the default of the averaging rule, or 1.

    Raises:
        BadValue: Unless 0 < θ ≤ 1.
    """

    kinds: ClassVar[frozenset[Kind]] = frozenset({Kind.ANTISYMMETRIC, Kind.UNBIASED_COPIES})
    static = True
    state: ClassVar[dict[str, Variable]] = {"d": Variable.RESET, "duals": Variable.IN_STEP}

    def __init__(self, workers: Workers, *, dual_rate: float | None = None):
        super().__init__(workers)
        if dual_rate is None:
            dual_rate = getattr(self._averaging, "dual_rate", 1.0)
        ok = checks.is_finite(dual_rate) and 0 < dual_rate <= 1
        checks.check("dual_rate", f"{dual_rate}", ok, "a number above 0, at most 1")
        self.dual_rate = dual_rate
        # d_i [worker, D], or d_ij by the neighbor j where each edge has its own exchanges.
        self._duals: dict[int | None, Tensor] = {}
        if isinstance(self._averaging, Incremental):
            self._duals[None] = torch.zeros_like(self._x)

    @property
    def duals(self) -> Mapping[int | None, Tensor]:
        """d_ij [1, D] by the neighbor j."""
        return self._duals

    @property
    def _d(self) -> Tensor:
        return self._duals.get(None, self._x[:, :0])

    def update(self, u: Tensor | None) -> None:
        super().update(u)
        for _, dual in sorted(self._duals.items(), key=lambda item: item[0] or 0):
            self._x.add_(dual)

    def add(self, u: Tensor, edge: int | None = None, agreed: bool = True) -> None:
        u.div_(1 + self.dual_rate)
        self._x.add_(u)
        if edge in self._duals:
            self._duals[edge].add_(u, alpha=self.dual_rate)
        else:
            self._duals[edge] = u * self.dual_rate

    def forget(self, edge: int) -> None:
        self._duals.pop(edge, None)
