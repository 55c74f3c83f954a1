"""Gradient aggregations: the mean of all workers' compressed gradients.

`step(gradient, mean)` is a conversation (see powergossip.network), as an averaging algorithm's
step is. `learning.CentralizedSGD` makes a learning rule of an aggregation.

To add one, write its class and its row in `AGGREGATIONS`, where train.py and the laws of
tests/algorithms/test_centralized.py find it. A row is called with the network and the layout. Its
other parameters are its options (see powergossip.registry_options).

Axes: worker (hosted here); D parameters of a worker.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from powergossip import compressors
from powergossip import registry_options as options
from powergossip.algorithms import chunked, dgc, power_sgd, sign_sgd
from powergossip.algorithms.averaging import Aggregation as Aggregation
from powergossip.algorithms.error_feedback import ErrorFeedback
from powergossip.algorithms.error_feedback import ErrorFeedbackConfig as ErrorFeedbackConfig
from powergossip.network import Network
from powergossip.parameters import Layout


def _row(kind: Callable[..., Any], config: Callable[..., Any], **more: Any) -> options.Builder:
    """A row kind(network, layout, config(**options)), with the options of `config`.

    Args:
        more: Defaults of options that `config` requires.
    """

    def build(network: Network, layout: Layout, **given: Any) -> Aggregation:
        aggregation: Aggregation = kind(network, layout, config(**more | given))
        return aggregation

    build.__doc__ = config.__doc__
    places = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in ("n", "l")]
    fields = inspect.signature(config).parameters.values()
    named = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=more.get(p.name, p.default))
        for p in fields
    ]
    build.__signature__ = inspect.Signature([*places, *named])  # type: ignore[attr-defined]
    return build


def _error_feedback(
    network: Network,
    layout: Layout,
    *,
    compressor: str = "sign-and-norm",
    momentum_before_compression: bool = False,
    momentum: float = 0.9,
    nesterov: bool = False,
    rescale_error: bool = True,
    error_feedback: bool = True,
    min_compression_rate: float = 1.0,
    per_tensor: bool = True,
    seed: int = 0,
    **compressor_options: Any,
) -> Aggregation:
    """Error feedback, with a compressor by its name. See ErrorFeedbackConfig for other options.

    Args:
        compressor: Name of the compressor.
        momentum_before_compression: Compress the momentum of each worker. Otherwise the mean has
            the momentum of the local optimizer.
    """
    config = ErrorFeedbackConfig(
        momentum=momentum if momentum_before_compression else 0.0,
        nesterov=nesterov,
        rescale_error=rescale_error,
        error_feedback=error_feedback,
        min_compression_rate=min_compression_rate,
        per_tensor=per_tensor,
        seed=seed,
    )
    made = compressors.make(compressor, **compressor_options)
    return ErrorFeedback(network, layout, made, config)


# The names that users choose from: `optimizer` in train.py.
AGGREGATIONS: dict[str, options.Builder] = {
    "powersgd": _row(power_sgd.PowerSGDAggregation, power_sgd.PowerSGDConfig, rank=1),
    "dgc": _row(dgc.DGCAggregation, dgc.DGCConfig),
    "ef-sgd": _error_feedback,
    "signsgd": _row(sign_sgd.SignSGDAggregation, sign_sgd.SignSGDConfig),
    "sparse-loco": chunked.SparseLoCo,
    "demo": chunked.DeMo,
}
# Aggregations of displacements of several local steps: for learning.CentralizedLocal.
OF_LOCAL_STEPS = frozenset({"sparse-loco"})


def make(name: str, network: Network, layout: Layout, **given: Any) -> Aggregation:
    """Build the aggregation of that name with the options `given`.

    Raises ValueError for an unknown name, an option that it does not have, or a bad value.
    """
    row = options.find(AGGREGATIONS, "aggregation", name)
    known = options.parameters(row, given, compressor=compressors.COMPRESSORS)
    return build(name, network, layout, options.check(name, given, known))


def build(name: str, network: Network, layout: Layout, options: Mapping[str, Any]) -> Aggregation:
    """Build the aggregation of that name with options that have been checked."""
    aggregation: Aggregation = AGGREGATIONS[name](network, layout, **options)
    for attribute in dir(Aggregation):
        if not attribute.startswith("_") and not hasattr(aggregation, attribute):
            raise TypeError(
                f"{name} has no {attribute}; derive {type(aggregation).__name__} from "
                "powergossip.algorithms.aggregation.Aggregation"
            )
    return aggregation
