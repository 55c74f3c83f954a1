"""The order of messages between processes, as NCCL requires it."""

from collections.abc import Sequence

from powergossip.network.torch.channels import GlooGroup, Octets

# Messages that a process starts at once: tag, and bytes from and to each other process.
Batch = tuple[int, dict[int, int], dict[int, int]]


def check_order(batches: Sequence[Sequence[Batch]]) -> None:
    """Check that all processes have issued their batches in one global order, as NCCL requires.

    batches  # [process][index], see `record`

    The batches of an index belong together: each message is sent by one process and received by the
    other, with the same size.

    Raises ValueError for the first batch that differs.
    """
    lengths = [len(of_process) for of_process in batches]
    if len(set(lengths)) > 1:
        raise ValueError(f"the processes have issued {lengths} batches; all must issue as many")
    for index, of_all in enumerate(zip(*batches, strict=True)):
        for process, (tag, _, sent) in enumerate(of_all):
            for other, size in sent.items():
                if (tag, size) != (of_all[other][0], of_all[other][1].get(process)):
                    raise ValueError(
                        f"batch {index}: process {process} sends {size} bytes to {other} with tag "
                        f"{tag}, which receives {of_all[other][1]} with tag {of_all[other][0]}"
                    )
            for other in of_all[process][1]:
                if process not in of_all[other][2]:
                    raise ValueError(f"batch {index}: process {other} sends nothing to {process}")


def record(group: GlooGroup) -> list[Batch]:
    """All messages of a group from now on, appended as they start."""
    batches: list[Batch] = []
    started = group.started

    def recorded(incoming: Octets, outgoing: Octets, tag: int) -> None:
        batches.append((tag, _sizes(incoming), _sizes(outgoing)))
        started(incoming, outgoing, tag)

    group.started = recorded  # type: ignore[method-assign]
    return batches


def _sizes(messages: Octets) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for (octets,), process in messages:
        sizes[process] = sizes.get(process, 0) + octets.numel()
    return sizes
