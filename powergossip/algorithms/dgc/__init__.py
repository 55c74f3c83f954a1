"""Deep Gradient Compression: all workers apply one mean gradient. Each worker sends its entries of
largest magnitude, and accumulates the others locally with momentum correction.

`optimizers.DGC` puts it into your own training loop::

    config.py       the options
    clipping.py     of a worker's gradient, before it is accumulated
    selection.py    the elements that are sent
    aggregation.py  the algorithm
"""

from powergossip.algorithms.dgc.aggregation import DGCAggregation
from powergossip.algorithms.dgc.clipping import CLIPPING, Clipping
from powergossip.algorithms.dgc.config import DGCConfig
from powergossip.algorithms.dgc.selection import Selector

__all__ = ["CLIPPING", "Clipping", "DGCAggregation", "DGCConfig", "Selector"]
