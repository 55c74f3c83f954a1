"""Settings of the library's methods.

The quick tier tries only the first settings, in this order.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from powergossip.benchmark.tasks import CONSENSUS, FASHION_MNIST, OF_GRAPH, TEXT, Values

Settings = Mapping[str, Sequence[Values]]

# Learning rates of images. Rates above 0.1 often train with one seed and diverge with another.
_OF_SGD = (0.05, 0.1, 0.02, 0.01, 0.2, 0.005, 0.07, 0.03)
_OF_SGD_ON_TEXT = (0.1, 0.3, 0.03, 1.0, 0.01, 3.0, 0.003, 0.001)
_OF_SIGNS = (0.003, 0.01, 0.001, 0.0003, 0.005, 0.02, 0.0001, 0.03)  # of updates ±η, on all data
_OF_ADAM = (0.01, 0.003, 0.03, 0.001, 0.0003, 0.1, 0.0001, 0.3)  # learning rates, text


def _rates(values: Values, rates: Sequence[float], **axes: Sequence[Any]) -> list[Values]:
    """At most 8 settings: learning rates, and further keys whose first value comes first."""
    others = [dict(zip(axes, chosen, strict=True)) for chosen in product(*axes.values())]
    n = 8 // len(others)
    tried = [{**values, "learning_rate": rate, **other} for rate in rates[:n] for other in others]
    return tried


def _method(
    optimizer: str, *, consensus: Sequence[Values] | None = None, late: bool = True, **more: Any
) -> Settings:
    """Learning rates on all tasks, and settings of agreement: by default without options.

    Args:
        late: True if the method has exchanges that may be late or lost.
    """
    values: Values = {"optimizer": optimizer, **more}
    method_keys = [key for key in values if key.startswith("optimizer") or key in OF_GRAPH]
    own = {key: values[key] for key in method_keys}
    settings = {
        CONSENSUS: [own] if consensus is None else consensus,
        FASHION_MNIST: _rates(values, _OF_SGD),
        TEXT: _rates(values, _OF_ADAM),
    }
    return settings if late else {**settings, LATE: ()}


def _compressed(optimizer: str, **more: Any) -> Settings:
    """The default of γ and other ones in agreement, where compression limits it."""
    values: Values = {"optimizer": optimizer, **more}
    rates = (None, 0.1, 0.03, 0.3, 0.01, 0.5, 0.003, 1.0)
    consensus = [
        values if rate is None else {**values, "optimizer_diffusion_rate": rate} for rate in rates
    ]
    return _method(optimizer, consensus=consensus, late=optimizer == "choco", **more)


def _learning(rule: str, optimizer: str = "dpsgd", *, late: bool = True, **more: Any) -> Settings:
    """A learning rule. It has no settings of agreement, which concerns its averaging rule alone."""
    return _method(optimizer, consensus=(), late=late, learning=rule, **more)


def _bounds(*bounds: float) -> list[Values]:
    """Bounds θ on the differences of matrices, for Moniqua."""
    return [{"optimizer": "moniqua", "optimizer_theta": theta} for theta in bounds]


def _gradients(optimizer: str, **more: Any) -> Settings:
    """Compressed gradients: workers always agree, and wait for each other."""
    return _method(optimizer, consensus=(), late=False, **more)


def _with_sgd(
    settings: Settings, rates: Sequence[float] = _OF_SGD_ON_TEXT, groups: Sequence[str] = (TEXT,)
) -> Settings:
    """With SGD in place of AdamW, on these groups of tasks."""
    own = {of: _rates({**settings[of][0], "local_optimizer": "sgd"}, rates) for of in groups}
    return {**settings, **own}


LATE = "fashion_mnist_late"
_ROUNDS: Values = {"local_steps": 10}
_LEARNING = (FASHION_MNIST, TEXT)

ENTRIES: dict[str, Settings] = {
    "all-reduce": _method("all-reduce", late=False),
    "d-psgd": _method("dpsgd"),
    # Data-parallel training: one optimizer, where all-reduce averages the steps of several.
    "mean-gradient": _gradients("ef-sgd", optimizer_compressor="identity"),
    "all-reduce-8-bits": _method("all-reduce", late=False, optimizer_bits=8),
    "all-reduce-4-bits": _method("all-reduce", late=False, optimizer_bits=4),
    "d-psgd-exponential": _method("dpsgd", topology="one-peer-exponential", late=False),
    "d-psgd-asynchronous": {
        LATE: _rates({"optimizer": "dpsgd", "gossip": "asynchronous"}, _OF_SGD)
    },
    "a2cid2": {LATE: _rates({"optimizer": "dpsgd", "gossip": "a2cid2"}, _OF_SGD)},
    "power-gossip": _method("power-gossip"),
    "power-gossip-8-bits": _method("power-gossip", optimizer_bits=8),
    "power-gossip-4-bits": _method("power-gossip", optimizer_bits=4),
    "power-gossip-4-iterations": _method("power-gossip", optimizer_num_iterations=4),
    "power-gossip-exact-diffusion": _learning("exact-diffusion", "power-gossip"),
    "power-gossip-diloco": _learning(
        "diloco", "power-gossip", late=False, optimizer_num_iterations=4, **_ROUNDS
    ),
    "choco-sign": _compressed("choco", optimizer_compressor="sign-and-norm"),
    "choco-top-k": _compressed("choco", optimizer_compressor="top-k"),
    "choco-qsgd": _compressed("choco", optimizer_compressor="qsgd"),
    "deepsqueeze-sign": _compressed("deepsqueeze", optimizer_compressor="sign-and-norm"),
    "deepsqueeze-top-k": _compressed("deepsqueeze", optimizer_compressor="top-k"),
    "moniqua": {
        **_method("moniqua", consensus=(), late=False),
        "consensus_random": _bounds(2.0, 3.0, 1.0, 4.0, 1.5, 6.0, 0.5, 8.0),
        "consensus_low_rank": _bounds(0.05, 0.1, 0.02, 0.2, 0.03, 0.01, 0.5, 1.0),
    },
    "push-sum": _method("push-sum"),
    "sparta": _method("sparta", late=False),
    "quasi-global-momentum": _learning("quasi-global-momentum"),
    "gradient-tracking": _learning("gradient-tracking"),
    "k-gt": _learning("k-gt", late=False, **_ROUNDS),
    "momentum-tracking": _with_sgd(_learning("momentum-tracking", late=False)),
    "gt-nsgd": _with_sgd(_learning("gt-nsgd", late=False)),
    "exact-diffusion": _learning("exact-diffusion"),
    "beer": _with_sgd(_learning("beer", "choco", late=False)),
    "motef": _with_sgd(_learning("motef", "choco", late=False)),
    "relay-sgd": _learning("relay-sgd", topology="binary-tree"),
    "diloco": _learning("diloco", "all-reduce", late=False, **_ROUNDS),
    "diloco-4-bits": _learning("diloco", "all-reduce", late=False, optimizer_bits=4, **_ROUNDS),
    "gasloc": _learning("gasloc", late=False, **_ROUNDS),
    "noloco": _learning("noloco", late=False, topology="random-matching", **_ROUNDS),
    "powersgd": _gradients("powersgd"),
    "dgc": _with_sgd(_gradients("dgc")),
    "ef-sgd-sign": _gradients("ef-sgd", optimizer_compressor="sign-and-norm"),
    "ef-sgd-top-k": _gradients("ef-sgd", optimizer_compressor="top-k"),
    "signsgd": _with_sgd(_gradients("signsgd"), _OF_SIGNS, _LEARNING),
    "demo": _with_sgd(_gradients("demo", local_optimizer="sgd"), _OF_SIGNS, _LEARNING),
    "sparse-loco": _gradients("sparse-loco", **_ROUNDS),
}
