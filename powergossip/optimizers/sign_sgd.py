"""signSGD with majority vote in your own training loop, one worker per process::

    from powergossip.optimizers.sign_sgd import SignSGD, SignSGDConfig, optimizer_step

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, weight_decay=1e-4)
    signs = SignSGD(model.named_parameters(), SignSGDConfig(momentum=0.9))
    for batch in batches:
        loss(model, batch).backward()
        optimizer_step(optimizer, signs)  # in place of optimizer.step() and zero_grad()

The momentum is part of the method, so the optimizer has momentum=0. The learning rate is the length
of the step of each parameter element: start a hundred times below SGD's. The algorithm is
algorithms.sign_sgd.
"""

from typing import Any

from powergossip.algorithms.sign_sgd import SignSGDAggregation, SignSGDConfig
from powergossip.optimizers.checks import Params
from powergossip.optimizers.gradients import Aggregator, Gradients, optimizer_step

__all__ = ["SignSGD", "SignSGDConfig", "optimizer_step"]


class SignSGD(Aggregator):
    """The majority vote on the signs of these parameters' gradients, −1, 0 or 1 for each element.

    Cost on the wire: 1 bit for each element, to n − 1 others.

    Args:
        config: Momentum of the method. The optimizer has none. Other arguments, attributes and
            errors as for `PowerSGD`. Parameters are float32.

    References:
        Bernstein et al. (2018), arXiv:1802.04434, and (2019), arXiv:1810.05291.
    """

    def __init__(
        self,
        params: Params,
        config: SignSGDConfig | None = None,
        *,
        process_group: Any = None,
        mesh: Any = None,
    ):
        self.config = given = config or SignSGDConfig()
        flat = Gradients(params, process_group=process_group, mesh=mesh)
        super().__init__(flat, SignSGDAggregation(flat.network, flat.layout, given))
