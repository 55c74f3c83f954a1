"""Error-feedback SGD in your own training loop, one worker per process::

    from powergossip.compressors import TopK
    from powergossip.optimizers.error_feedback import ErrorFeedback, optimizer_step

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    feedback = ErrorFeedback(model.named_parameters(), TopK(keep_ratio=0.01))
    for batch in batches:
        loss(model, batch).backward()
        optimizer_step(optimizer, feedback)  # in place of optimizer.step() and zero_grad()

The optimizer's momentum follows the mean. With ErrorFeedbackConfig(momentum=…), each worker's
momentum is compressed instead, and the optimizer is SGD with momentum=0, or `DGCSGD`, which applies
that momentum to the weight decay. The algorithm is algorithms.error_feedback.
"""

from typing import Any

from powergossip import checks
from powergossip.algorithms.error_feedback import ErrorFeedback as Aggregation
from powergossip.algorithms.error_feedback import ErrorFeedbackConfig
from powergossip.compressors import Compressor
from powergossip.optimizers.checks import Params
from powergossip.optimizers.dgc_sgd import DGCSGD
from powergossip.optimizers.gradients import Aggregator, Gradients, optimizer_step

__all__ = ["DGCSGD", "ErrorFeedback", "ErrorFeedbackConfig", "optimizer_step"]


class ErrorFeedback(Aggregator):
    """The mean of these parameters' gradients, compressed with error feedback.

    Cost on the wire: an all-gather of the compressed gradients. Those that fit an all-reduce
    (random-k, random-block) use one.

    Args:
        compressor: Any of powergossip.compressors, or your own. Other arguments, attributes and
            errors as for `PowerSGD`. Parameters are float32.

    References:
        Karimireddy et al. (2019), arXiv:1901.09847, Algorithm 2.
    """

    def __init__(
        self,
        params: Params,
        compressor: Compressor,
        config: ErrorFeedbackConfig | None = None,
        *,
        process_group: Any = None,
        mesh: Any = None,
    ):
        accepted = f'an object, such as compressors.make("{compressor}")'
        checks.check("compressor", compressor, not isinstance(compressor, str), accepted)
        self.config = given = config or ErrorFeedbackConfig()
        flat = Gradients(params, process_group=process_group, mesh=mesh)
        super().__init__(flat, Aggregation(flat.network, flat.layout, compressor, given))
