"""The compressors, at a glance. The same objects as in `powergossip.compressors`.

Numbers after a year are arXiv identifiers.

A row of `COMPRESSORS` (`optimizer_compressor` in train.py)::

    identity        Identity      all entries, 32 bits each
    qsgd            QSGD          stochastic rounding to levels   Alistarh et al. (2017), 1610.02132
    random-block    RandomBlock   adjacent entries, shared seed   Vogels et al. (2019), 1905.13727
    random-k        RandomK       random entries, shared seed     Stich et al. (2018), 1809.07599
    rounding        Rounding      rounding to the nearest level   Liu et al. (2021), 2007.00232
    sign-and-norm   SignAndNorm   1 bit an entry, and a norm Karimireddy et al. (2019), 1901.09847
    svd             SVD           best rank-r approximation  Eckart & Young (1936)
    top-k           TopK          largest entries                 Stich et al. (2018), 1809.07599
"""

from powergossip.compressors import *  # noqa: F403
from powergossip.compressors import __all__ as __all__
