"""Construction of the parts of a run from its configuration: the place where they are chosen."""

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

from powergossip import kernels, tasks, topologies
from powergossip.network import Network, Processes, choose_device
from powergossip.network.processes import OF_FILES
from powergossip.parameters import Parameters
from powergossip.runs import configuration
from powergossip.runs.clock import Clock
from powergossip.training import compilation, precision
from powergossip.training.config import Settings
from powergossip.training.ending import Agreement
from powergossip.training.gradients import Gradients
from powergossip.training.methods import check_method, make_method
from powergossip.training.stepping import AtRest, Computation, Execution, Together
from powergossip.training.task_check import check_first_batch, data_facts, equalize, model_facts


@dataclass(frozen=True)
class Built:
    """The parts of a run.

    Attributes:
        metric: Main metric of a task that has its own, or None.
    """

    run: Computation
    execution: Execution
    metric: dict[str, Any] | None
    transport: str


def build(c: Settings, processes: Processes, task: tasks.Task | None) -> Built:
    """Build the parts of a run. All processes call it.

    Args:
        task: Task, by default the configuration's.

    Raises:
        BadInput: In all processes.
    """
    links = None
    configuration.check_same(processes, c.as_dict())
    if c.by_edges and not c.evaluate_only and processes.size > 1:
        from powergossip.training.asynchronous import make_links

        links = make_links(c, processes)
        processes = links.group
    clock, several = Clock(), processes.size > 1
    with processes.agreed():
        network = make_network(c, processes, clock)
        check_method(c, network)
    if several:
        of_start = {"the versions of the package": configuration.version()}
        of_start |= {"the graphs": network.topology.fingerprint}
        processes.check_same(of_start, OF_FILES)
    found = transport(network)
    kernels.load(network)  # together: later calls find them
    given = task
    task = task or processes.one_by_one(partial(make_task, c, network))
    c.task_architecture = c.task_architecture or next(iter(task.architectures), None)
    of_user = given is None and not tasks.is_in_library(c.task, c.task_architecture)
    with processes.agreed():
        of_task = data_facts(task) if several and given is None else {}
    processes.check_same(of_task, OF_FILES)
    steps_per_epoch = min(task.steps_per_epoch, c.max_steps_per_epoch or task.steps_per_epoch)
    if c.local_steps > steps_per_epoch * c.num_epochs and not (processes.rank or c.evaluate_only):
        warnings.warn(
            f"local_steps={c.local_steps}: use at most the {steps_per_epoch * c.num_epochs} steps "
            "of the run; no round ends, and workers exchange nothing",
            stacklevel=2,
        )
    agreement, main = Agreement(processes), getattr(task, "main_metric", None)
    with processes.agreed():
        check_evaluation(c, task)
        models = [task.model(c.architecture, c.seed) for _ in network.workers]
        parameters = Parameters(models, network.device)
        dtype = parameters.x.dtype
        precision.check_precision(c.precision, dtype)
        if dtype != network.dtype:
            network = network.in_precision(dtype)
        check_spectrum_names(c, parameters)
        of_models = model_facts(models[0]) if several else {}
        if of_user and not c.evaluate_only:
            main, metrics = check_first_batch(task, c, network.workers[0], network.device)
            of_models |= {"the names of metrics": ", ".join(metrics)}
    processes.check_same(of_models, OF_FILES)
    if of_user:
        initial = {"the initial values of the model": equalize(processes, models)}
        processes.check_same(initial, OF_FILES)
    with processes.agreed():
        if c.method.averages:
            c.method.warn_of_rate(network)
        warn_of_rank(c, network, parameters)
        if c.torch_compile and not c.evaluate_only:
            compilation.compile_models(models)
        gradients = Gradients(c, network, task, parameters, clock, agreement)
        run = Computation(
            c, network, task, parameters, gradients, agreement, clock, steps_per_epoch
        )
        execution = _make_execution(run, links)
    metric = main and {"name": main.name, "larger_is_better": main.larger_is_better}
    return Built(run, execution, metric, found)


def _make_execution(run: Computation, links: Any) -> Execution:
    """How the workers of this process take their steps. Nothing else chooses."""
    c = run.config
    if c.evaluate_only:
        return AtRest(run.network, run.parameters, varies=c.by_edges)
    if c.by_edges:
        from powergossip.training import asynchronous

        return asynchronous.make(run, links)
    return Together(run, make_method(c, run.network, run.parameters, run.steps_per_epoch))


def make_network(c: Settings, processes: Processes, measure: Clock) -> Network:
    """The network of a configuration. Raises ValueError."""
    topology = topologies.make(c.topology, c.n_workers, seed=c.seed, options=c.topology_options)
    device = choose_device(c.device, processes.local_rank)
    if c.torch_compile and not c.evaluate_only:
        compilation.check_compiler(device)
    stage, losses = {"on": False, "off": True, "auto": None}[c.cuda_aware], None
    if c.one_way:
        from powergossip.training.late_message_checks import losses_of

        losses = losses_of(c)
    return Network(
        topology,
        processes,
        device,
        stage,
        measure=measure,
        losses=losses,
    )


def transport(network: Network) -> str:
    """The transport of a run's messages: none, mpi, gloo, nccl or internet. All processes call
    it."""
    if network.processes.can_be_lost:
        return network.processes.transport
    channel = network.connection.channel
    return "none" if channel is None else channel.name


def make_task(c: Settings, network: Network) -> tasks.Task:
    """The task of a configuration. Raises ValueError."""
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
        task_options=c.task_options,
        validation_ratio=c.validation_ratio,
        column=c.decentralized_data_column,
        data_processes=c.data_processes,
        architecture=c.task_architecture,
    )


def check_evaluation(c: Settings, task: tasks.Task) -> None:
    """Raise ValueError without data to evaluate."""
    if not c.evaluate_test_data and "valid" not in task.samples:
        raise ValueError(
            "evaluate_test_data=false: use true without validation data, or hold some out "
            "(validation_ratio)"
        )


def check_spectrum_names(c: Settings, parameters: Parameters) -> None:
    """Raise ValueError unless the configuration names parameters for spectra."""
    for name in c.spectrum_logging_params:
        if name not in parameters.names:
            names = ", ".join(parameters.names)
            raise ValueError(f'spectrum_logging_params: no parameter "{name}" among {names}')


def warn_of_rank(c: Settings, network: Network, parameters: Parameters) -> None:
    """Warn, on process 0, of a rank that compresses no matrix."""
    most = max((min(s.rows, s.columns) for s in parameters.layout.stacks), default=1)
    rank = c.options.get("rank")
    if rank is not None and rank > most and network.processes.rank == 0:
        warnings.warn(
            f"optimizer_rank={rank}: use {most} or less, the smaller side of the model's largest "
            "matrix; nothing is compressed",
            stacklevel=2,
        )
