"""Trainable parameters of one dtype, and their learning rule around the wrapped optimizer.

Axes: worker (always 1: this process's worker), D elements of a part.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from powergossip.algorithms.learning import GossipRule
from powergossip.network import Conversation
from powergossip.optimizers.checks import working_dtype
from powergossip.optimizers.learning_rules import Wrapped
from powergossip.optimizers.sharded_parameters import (
    Sharding,
    copy_all,
    memory,
)
from powergossip.parameters import Layout, is_misaligned


class Part:
    """Trainable parameters of one dtype that were added together: a driver of their learning rule,
    see GossipRule, around the wrapped optimizer.

    Its methods are called in this order, once in a step::

        start                         a conversation that may overlap with the gradient
        local.take_gradients          g ← p.grad, before the messages of `start` are received
        direct                        p.grad ← the rule's direction
        before_update, after_update   around the step of the wrapped optimizer
        move                          a conversation after the local update
        end                           after the last message

    A step without a local update skips the four in the middle. Then the displacement is 0.

    Attributes:
        x: Memory of the parameters after `allocate`, or a copy of them: [1, D], float32 or float64.
        rule: The learning rule, which has the averaging algorithm.
        local: The wrapped optimizer, for the rule.
        before: Values before construction, if process 0 has others, until the first step.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        make_rule: Callable[[Sequence[Tensor], Layout, Tensor], tuple[GossipRule, Wrapped]],
        sharding: Sharding | None = None,
    ):
        self.parameters = parameters
        whole = Layout(p.shape for p in parameters)
        self.layout = whole if sharding is None else sharding.layout(whole)
        dtype = working_dtype(parameters)
        self.x = memory(parameters[0]).new_empty(1, self.layout.size, dtype=dtype)
        self._views = self.layout.tensors(self.x[0])
        # Parameters in the memory of x, their views of x, and addresses. The others are copied.
        self._moved: list[tuple[Tensor, Tensor, int]] = []
        self._copied = [*zip(parameters, self._views, strict=True)]
        self.before: list[Tensor] = []
        self.rule, self.local = make_rule(parameters, self.layout, self.x)
        # True if the rule depends on the local update, or changes x after messages.
        self._reads_updates = not (self.rule.in_place and self.rule.stateless)
        x = self.x[:, :0] if self.rule.in_place else self.x
        self._old_x, self._u = torch.empty_like(x), torch.zeros_like(x)
        self._directed = self._updated = False  # in this step

    def allocate(self) -> None:
        """Give x its values. Parameters are moved into its memory, if they have its dtype, are
        whole in this process, and are aligned."""
        self.load()
        if type(self.parameters[0].data) is Tensor and self.parameters[0].dtype == self.x.dtype:
            both, self._copied = self._copied, []
            for parameter, view in both:
                if is_misaligned(view):
                    self._copied.append((parameter, view))
                else:
                    parameter.data = _with_own_storage(view)
                    self._moved.append((parameter, view, view.data_ptr()))

    def load(self) -> None:
        """x ← the parameters that are not in its memory."""
        with torch.no_grad():
            copy_all((view, memory(parameter)) for parameter, view in self._copied)

    def store(self) -> None:
        """The parameters that are not in the memory of x ← x, rounded to their dtype."""
        with torch.no_grad():
            copy_all((memory(parameter), view) for parameter, view in self._copied)

    def start(self) -> Conversation | None:
        """The messages that may be in flight while gradients are computed."""
        if self._reads_updates:
            self.load()
        self._directed = self._updated = False
        self.rule.begin()
        return self._prepared(self.rule.before())

    def direct(self) -> None:
        """p.grad ← the direction: the first gradient's if a closure computes several."""
        g = self.local.g
        if g is None:
            return
        if not self._directed:
            self._directed = True
            self.rule.clip()
            self.rule.direct(g)
        self.local.put_gradients()

    def before_update(self) -> None:
        """Keep x to compute the displacement."""
        if self._reads_updates:
            self.load()
        self._old_x.copy_(self.x[:, : self._old_x.shape[1]])

    def after_update(self, owner: str) -> None:
        """u ← x − x before the update, x ← x before it, and x moves as the rule has it.

        The gradients are the user's again.
        """
        self.reclaim(owner)
        if self._reads_updates:
            self.load()
        if not self.rule.in_place:
            torch.sub(self.x, self._old_x, out=self._u)
            self.x.copy_(self._old_x)
        self.local.restore_gradients()
        self._update()
        if self._reads_updates:
            self.store()

    def _update(self) -> None:
        self._updated = True
        self.rule.update(None if self.rule.in_place else self._u)

    def move(self) -> Conversation | None:
        """The messages after the local update. Without one, the displacement is 0."""
        if not self._updated:
            self._u.zero_()
            self._update()
        return self._prepared(self.rule.after())

    def _prepared(self, conversation: Conversation | None) -> Conversation | None:
        """The conversation, with x ← the parameters."""
        if conversation is not None:
            self.load()
        return conversation

    def end(self) -> None:
        """End the step, after the last message."""
        self.rule.settle()
        if self._reads_updates:
            self.store()

    def reclaim(self, owner: str) -> None:
        """Move parameters back into the memory of x, with the values that were assigned to .data.

        Raises RuntimeError for a parameter of another device, dtype or shape, or in shared memory.
        """
        for parameter, view, address in self._moved:
            if parameter.data_ptr() == address:
                continue
            found, known = ((p.device, p.dtype, p.shape, p.is_shared()) for p in (parameter, view))
            if found != known:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} has other memory than when "
                    f"{owner} was created: create it after moving the model (to, cuda, double, "
                    "share_memory, accelerate's prepare)"
                )
            view.copy_(parameter.detach())
            parameter.data = _with_own_storage(view)


def _with_own_storage(view: Tensor) -> Tensor:
    """A tensor in the memory of a view, but with its own storage.

    Programs that save, load or share tensors regard one storage as one tensor.
    """
    return torch.from_dlpack(view.view(-1)).view(view.shape)
