"""Flat buffers for the gradients of a training loop: the common part of PowerSGD and DGC."""

import torch
from torch import Tensor

from powergossip import topologies
from powergossip.network import Network, processes
from powergossip.optimizers.checks import (
    Params,
    broadcast_from_process_0,
    check_gradients,
    check_optimizer,
    check_parameters,
    check_same_shapes_everywhere,
    named,
)
from powergossip.parameters import Layout


class Gradients:
    """The parameters of a training loop, and buffers for a gradient and for the workers' mean.

    params: tensors, or (name, tensor) pairs, in an order that all processes share. Construction
    gives all workers the values of process 0. network: a network with one worker per process,
    by default that of all processes.

    parameters       # in the given order
    network, layout
    gradient, mean   # [1, D]
    gradients, means # views of them in the shapes of the parameters

    Raises ValueError, in all processes, for parameters that are not dense float32 tensors, or
    differ in shape between processes.
    """

    def __init__(self, params: Params, network: Network | None = None):
        self._names, self.parameters = named(params)
        comm = network.processes if network else processes()
        with comm.agreed():
            if not self.parameters:
                raise ValueError("there are no parameters; use model.parameters()")
            check_parameters(self._names, self.parameters)
            for name, parameter in zip(self._names, self.parameters, strict=True):
                if not parameter.numel():
                    raise ValueError(f"{name} has no elements; leave it out")
        device = self.parameters[0].device
        # The mean of gradients does not depend on the topology.
        self.network = network or Network(topologies.make("ring", comm.size), comm, device)
        if self.network.rows != 1:
            raise ValueError(
                f"the network hosts {self.network.rows} workers in this process; "
                "use one worker per process"
            )
        check_same_shapes_everywhere(comm, self.parameters)
        self.layout = Layout(p.shape for p in self.parameters)
        self.gradient = torch.zeros(1, self.layout.size, device=device)
        self.mean = torch.zeros_like(self.gradient)
        self.gradients = self.layout.tensors(self.gradient[0])
        self.means = self.layout.tensors(self.mean[0])
        broadcast_from_process_0(comm, self.parameters)

    def of_loop(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """Return the gradients p.grad, in the order of the parameters.

        Raises ValueError if one is missing, sparse or not float32, and for an optimizer of other
        parameters.
        """
        check_optimizer(optimizer, self.parameters)
        return check_gradients(self._names, self.parameters, required=True)

    @property
    def bits(self) -> int:
        """Bits that this worker has sent since the start."""
        return int(self.network.bits[0])
