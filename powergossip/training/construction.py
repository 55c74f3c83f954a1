"""Construction of the parts of a run from its configuration."""

import warnings
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Any

from omegaconf import OmegaConf
from scipy.sparse import csr_array

from powergossip import tasks, topologies
from powergossip.network import Network, Processes, choose_device
from powergossip.network.resilient.workers import Links
from powergossip.parameters import Parameters
from powergossip.runs.clock import Clock
from powergossip.topologies import Topology
from powergossip.training import precision
from powergossip.training.asynchronous.alive import AliveWorkers, PresentParameters
from powergossip.training.asynchronous.execution import EventTraining, event_driven, losses_of
from powergossip.training.asynchronous.links import LinkedNetwork


def make_network(c: Any, processes: Processes, measure: Clock) -> Network:
    """The network of a configuration. Raises ValueError."""
    topology = topologies.make(c.topology, c.n_workers, seed=c.seed, options=c.topology_options)
    device = choose_device(c.device, processes.local_rank)
    if c.torch_compile and not c.evaluate_only:
        precision.check_compiler(device)
    stage = {"on": False, "off": True, "auto": None}[c.cuda_aware]
    return Network(
        topology,
        processes,
        device,
        stage,
        measure=measure,
        all_reduce=c.all_reduce,
        losses=losses_of(c),
    )


def transport(network: Network, links: Links | None) -> str:
    """The transport of a run's messages: none, mpi, gloo or nccl. All processes call it."""
    if links is not None:
        return "mpi"
    return (
        "none" if network.connection.channel is None else network.connection.channel.name
    )  # made together


def make_task(c: Any, network: Network) -> tasks.Task:
    """The task of a configuration. Raises ValueError."""
    given: Any = OmegaConf.to_container(c.task_options)
    return tasks.make(
        c.task,
        n_workers=c.n_workers,
        batch_size=c.batch_size,
        seed=c.seed,
        decentralized=c.use_decentralized_data,
        shuffled_ratio=c.decentralized_data_shuffled_ratio,
        dirichlet_alpha=c.decentralized_data_dirichlet_alpha,
        reshuffle=c.reshuffle_data,
        drop_last=c.drop_last,
        data_dir=c.data_dir,
        download=c.download,
        device=network.device,
        task_options=given,
        validation_ratio=c.validation_ratio,
        column=c.decentralized_data_column,
        placement=_placement(c, network.topology),
        data_processes=c.data_processes,
        architecture=c.task_architecture,
    )


def _placement(c: Any, topology: Topology) -> csr_array | None:
    """The mixing matrix, averaged over its rounds, if shards are placed by their labels."""
    if c.decentralized_data_placement == "given":
        return None
    matrices = [r.matrix() for r in topology.rounds]
    return csr_array(reduce(add, matrices) / len(matrices))


def check_evaluation(c: Any, task: tasks.Task) -> None:
    """Raise ValueError if there are no data to evaluate."""
    if not c.evaluate_test_data and "valid" not in task.samples:
        raise ValueError(
            "evaluate_test_data=false: use true without validation data, or hold some out "
            "(validation_ratio)"
        )


def check_spectrum_names(c: Any, parameters: Parameters) -> None:
    """Raise ValueError unless the spectra of the configuration are those of parameters."""
    for name in c.spectrum_logging_params:
        if name not in parameters.names:
            names = ", ".join(parameters.names)
            raise ValueError(f'spectrum_logging_params: no parameter "{name}" among {names}')


def warn_of_rank(c: Any, network: Network, parameters: Parameters) -> None:
    """Warn, on process 0, of a rank with which no matrix is compressed."""
    most = max((min(s.rows, s.columns) for s in parameters.layout.stacks), default=1)
    rank = c.get("optimizer_rank")
    if rank is not None and rank > most and network.processes.rank == 0:
        warnings.warn(
            f"optimizer_rank={rank}: use {most} or less, the smaller side of the model's largest "
            "matrix; nothing is compressed",
            stacklevel=2,
        )


def evaluated(
    c: Any,
    network: Network,
    parameters: Parameters,
    present: Callable[[], Sequence[int]],
    links: Links | None,
    events: EventTraining | None,
) -> tuple[Network | AliveWorkers | LinkedNetwork, Parameters | PresentParameters]:
    """The network and the parameters of the workers that are evaluated.

    present  # the hosted workers that are alive
    """
    if links is not None:
        assert events is not None
        return LinkedNetwork(network, links, events.everybody), parameters
    if not event_driven(c) or (events is None and len(present()) == network.hosted):
        return network, parameters
    return AliveWorkers(network, present), PresentParameters(parameters, present)
