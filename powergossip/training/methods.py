"""The method of a run: averaging algorithm, local optimizer and learning rule, as configured."""

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any, NamedTuple

from powergossip import algorithms, checks
from powergossip import registry_options as options
from powergossip.algorithms import aggregation, ddp_hooks, learning, trials
from powergossip.algorithms.method import SMALL
from powergossip.network import Network
from powergossip.parameters import Layout, Parameters
from powergossip.topologies import Topology
from powergossip.training.config import Settings
from powergossip.training.config_checks import (
    errors_name_keys,
    errors_name_learning_options,
    hook_options,
)
from powergossip.training.local_optimizers import LocalOptimizer
from powergossip.user_functions import one_sentence


class Learner(NamedTuple):
    """A local optimizer and the learning rule that calls it."""

    local: LocalOptimizer
    rule: learning.Learning
    # To be called before each step, with the fractional epoch. Most methods have no such options.
    at_epoch: Callable[[float], None] = lambda _: None


def make_averaging(c: Settings, network: Network, layout: Layout) -> algorithms.Averaging:
    """Build the averaging algorithm of the configuration. Raises ValueError."""
    with errors_name_keys(c.optimizer), errors_name_learning_options(c):
        return c.method.averaging_rule(network, layout)


def _make_aggregation(c: Settings, network: Network, layout: Layout) -> aggregation.Aggregation:
    with errors_name_keys(c.optimizer), one_sentence(f"optimizer={c.optimizer}"):
        return c.method.aggregation(network, layout)


def check_method(c: Settings, network: Network) -> None:
    """Raise ValueError for bad options of the method, before data are loaded.

    Gives `overlapping` its default, which depends on the averaging rule.
    """
    overlapping = False
    is_own = trials.are_needed(c.optimizer, c.options)
    compressor = c.options.get("compressor")
    name = f"optimizer={c.optimizer}" + (f" with compressor={compressor}" if compressor else "")
    if c.by_edges:
        from powergossip.training import late_message_checks

        with errors_name_learning_options(c):
            resolved = c.method.resolved(network.topology, SMALL)
        late_message_checks.check(c, resolved, network)
    if c.method.averages:
        of_user = one_sentence(f"optimizer={c.optimizer}")
        with errors_name_keys(c.optimizer), errors_name_learning_options(c), of_user:
            averaging = c.method.example(network)
        overlapping = learning.overlapping(c.learning, averaging)
        if c.overlapping is not None:
            learning.check_overlapping(c.learning, c.overlapping, c.optimizer, averaging)
        if is_own:
            trials.try_averaging(name, network.topology, partial(make_averaging, c))
    elif c.optimizer in aggregation.AGGREGATIONS:
        owns_momentum = _make_aggregation(c, network, SMALL).owns_momentum
        if is_own:
            make = partial(_make_aggregation, c)
            trials.try_aggregation(name, network.topology, c.learning_rate, make)
        if owns_momentum and not learning.is_sgd(c.local_optimizer):
            raise ValueError(
                f"local_optimizer={c.local_optimizer}: {c.optimizer} corrects the momentum of "
                "sgd; use sgd"
            )
    if not c.method.averages:
        none = f"false with optimizer={c.optimizer}, whose messages follow the gradients"
        checks.check("overlapping", c.overlapping, not c.overlapping, none)
    if c.overlapping is None:
        c.overlapping = overlapping
    c.method = c.method.with_learning(overlapping=c.overlapping)
    own_rule = not options.are_of_library(learning.LEARNING[c.learning])
    if own_rule and c.optimizer in algorithms.AVERAGING:
        learner = partial(make_method, c, steps_per_epoch=1)
        trials.try_learning(f"learning={c.learning}", network.topology, c.local_steps, learner)


def make_method(
    c: Settings, network: Network, parameters: Parameters, steps_per_epoch: int
) -> Learner:
    """Build the local optimizer and the learning rule. Raises ValueError."""
    if c.optimizer in aggregation.AGGREGATIONS:
        return _gradient_learner(c, network, parameters)
    if c.optimizer in ddp_hooks.HOOKS:
        return _hook_learner(c, network, parameters, steps_per_epoch)
    return _gossip_learner(c, network, parameters)


def _hook_learner(
    c: Settings, network: Network, parameters: Parameters, steps_per_epoch: int
) -> Learner:
    """Build one of PyTorch's hooks, a row of ddp_hooks.HOOKS."""
    local, options = LocalOptimizer(parameters, c), hook_options(c)
    if options["start_iteration"] == ddp_hooks.AUTO:
        options["start_iteration"] = _guided_start(c, steps_per_epoch)
    with errors_name_keys(c.optimizer):
        rule = ddp_hooks.DDPHook(
            network,
            parameters,
            local.step,
            hook=c.optimizer,
            **options,
            seed=c.seed,
            weight_decay=local.coupled_decay,
            clip=c.gradient_clipping,
        )
    return Learner(local, rule)


def _gradient_learner(c: Settings, network: Network, parameters: Parameters) -> Learner:
    """Build the mean of compressed gradients, one of aggregation.AGGREGATIONS."""
    aggregate = _make_aggregation(c, network, parameters.layout)
    local = LocalOptimizer(parameters, c, 0.0 if aggregate.owns_momentum else None)
    if c.optimizer in aggregation.OF_LOCAL_STEPS:
        of_local_steps = learning.CentralizedLocal(
            network,
            aggregate,
            parameters,
            local.step,
            local_steps=c.local_steps,
            weight_decay=local.coupled_decay,
            clip=c.gradient_clipping,
        )
        return Learner(local, of_local_steps)
    rule = learning.CentralizedSGD(
        network,
        aggregate,
        parameters,
        local.step,
        weight_decay=local.coupled_decay,
        clip=None if aggregate.clips else c.gradient_clipping,
        num_batches_per_step=c.options["num_batches_per_step"],
    )

    def follow(epoch: float) -> None:
        aggregate.at_epoch(epoch)
        aggregate.at_learning_rate(local.rate)

    return Learner(local, rule, follow)


def _gossip_learner(c: Settings, network: Network, parameters: Parameters) -> Learner:
    """Build a rule of learning.LEARNING."""
    local = local_optimizer(c, parameters)
    averaging = partial(make_averaging, c, network)
    decay, clip = local.coupled_decay, c.gradient_clipping
    workers = learning.Workers(network, averaging, parameters, local, decay, clip)
    return Learner(local, learning_rule(c, workers))


def local_optimizer(c: Settings, parameters: Parameters) -> LocalOptimizer:
    """The local optimizer of a learning rule: plain SGD for one that has its own direction."""
    if learning.rule(c.learning, c.local_optimizer).directs():
        return LocalOptimizer(parameters, c, 0.0, "sgd")
    return LocalOptimizer(parameters, c)


def learning_rule(c: Settings, workers: learning.Workers, **options: Any) -> learning.GossipRule:
    """The learning rule of the configuration, with other values of some options."""
    with errors_name_learning_options(c):
        return c.method.with_learning(**options).learning_rule(workers)


def _guided_start(c: Settings, steps_per_epoch: int) -> int:
    """The first compressed step of PyTorch's hooks for the run as it is planned now.

    max(2, steps of the warm-up, 10 % of the steps of a run): PyTorch's guidance, from the
    documentation of PowerSGDState. A resumed run keeps its checkpoint's. With a warm-up factor of 1
    there is no warm-up.
    """
    epochs = c.distributed_lr_warmup_epoch if c.distributed_lr_warmup_factor != 1 else 0
    warm_up = ceil(min(epochs, c.num_epochs) * steps_per_epoch)
    return max(2, warm_up, ceil(c.num_epochs * steps_per_epoch / 10))


def diffusion_rate(c: Settings, topology: Topology, layout: Layout) -> float | None:
    """γ as configured, the best for plain gossip on this topology, or the default.

    None without gossip, or if each tensor has its own rate.
    """
    rate = c.method.diffusion_rate(topology, layout)
    if rate == "auto":
        return topology.best_diffusion_rate
    return None if rate is None or callable(rate) else float(rate)
