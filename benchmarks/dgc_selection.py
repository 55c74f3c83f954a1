"""The time of selecting the largest elements of a gradient, compared with an exact top-k.

    OMP_NUM_THREADS=1 python -m benchmarks.dgc_selection

prints one JSON line. selection_ms is the time of Deep Gradient Compression's selection of a
fraction `share` of `size` standard normal elements, topk_ms the time of torch.topk of their
magnitudes. Both are medians of interleaved rounds. speedup = topk_ms / selection_ms, `selected` and
`target` count elements, and `recall` is the fraction of the exact top-k among the selected
elements.
"""

from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

from benchmarks.timing import in_turns, report
from powergossip.algorithms import dgc
from powergossip.network import choose_device, processes
from powergossip.runs import configuration


@dataclass
class Selection:
    size: int = 25_000_000  # ResNet-50 has 25.6 million
    share: float = 0.001  # fraction to select
    sample_ratio: float = 0.01  # fraction sampled for the threshold
    device: str = "auto"  # auto, cpu, cuda or cuda:NUMBER
    rounds: int = 11  # for the median
    seconds: float = 10.0  # of all rounds, approximately


config = OmegaConf.structured(Selection)


def main(arguments: list[str]) -> None:
    """Measure and print one line."""
    comm, c = processes(), config
    with comm.agreed():
        configuration.read_command_line(config, arguments, __doc__ or "")
        options = dgc.DGCConfig(
            compress_ratio=c.share, sample_ratio=c.sample_ratio, compress_upper_bound=1
        )
        device = choose_device(c.device, comm.local_rank)
    selector = dgc.Selector(c.size, c.share, options)
    values = torch.randn(c.size, generator=torch.Generator().manual_seed(0)).to(device)
    random = np.random.default_rng(0)

    def select() -> Tensor:
        return selector.positions(values, selector.sample(random))

    def sort() -> Tensor:
        return torch.topk(values.abs(), selector.target, sorted=False).indices

    found, exact = select(), sort()
    recall = float(torch.isin(exact, found).float().mean())
    functions = {"selection": select, "top-k": sort}
    times = in_turns(functions, c.rounds, c.seconds, comm, device)
    selection_ms, topk_ms = map(median, times.values())
    report(
        comm,
        size=c.size,
        share=c.share,
        device=device.type,
        threads=torch.get_num_threads(),
        target=selector.target,
        selected=len(found),
        recall=round(recall, 6),
        selection_ms=round(selection_ms, 4),
        topk_ms=round(topk_ms, 4),
        speedup=round(topk_ms / selection_ms, 2),
    )


if __name__ == "__main__":
    configuration.run_entry_point(main)
