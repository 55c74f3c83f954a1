"""Facts about a run for info.json."""

import platform
from typing import Any

import torch

from powergossip import kernels
from powergossip.network import Network, cuda_aware_mpi
from powergossip.parameters import Parameters
from powergossip.tasks import Task


def environment_facts(network: Network, transport: str) -> dict[str, Any]:
    """Software versions, layout of processes, topology."""
    mpi_on_gpu = network.device.type == "cuda" and transport == "mpi"
    return {
        "processes": network.processes.size,
        "n_workers": network.n_workers,
        "threads_per_process": torch.get_num_threads(),
        "device": str(network.device),
        "transport": transport,
        "run": network.processes.name or None,
        "cuda_aware_mpi": cuda_aware_mpi() if mpi_on_gpu else None,
        "messages_staged_in_host_memory": network.connection.stage,
        "kernels": kernels.name(kernels.load(network)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "topology": network.topology.summary(),
    }


def task_facts(task: Task, parameters: Parameters) -> dict[str, Any]:
    """Sizes of the model and the data, and the task's own facts. label_counts: [worker][label]."""
    found = {"parameters": parameters.layout.size, "samples": dict(task.samples)}
    found |= getattr(task, "facts", {})
    counts = task.label_counts()
    return found if counts is None else {**found, "label_counts": counts.tolist()}
