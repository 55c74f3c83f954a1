"""The algorithms, at a glance. The same objects as in `powergossip.algorithms`.

Numbers after a year are arXiv identifiers.

Averaging (`optimizer` in train.py and a row of `AVERAGING`)::

    all-reduce     ExactMean     exact mean of all workers: the centralized baseline
                   QuantizedMean the same in few bits, with error feedback
    dpsgd          PlainGossip   uncompressed gossip            Xiao & Boyd (2004)
    power-gossip   PowerGossip   low-rank power iteration       Vogels et al. (2020), 2008.01425
    choco          ChocoGossip   public copies, any compressor  Koloskova et al. (2019), 1902.00340
    deepsqueeze    DeepSqueeze   error feedback                 Tang et al. (2019), 1907.07346
    moniqua        Moniqua       2 bits, modulo a bound         Lu & De Sa (2020), 2002.11787
    push-sum       PushSum       directed graphs                Assran et al. (2019), 1811.10792
    sparta         RandomEntries some random elements a step    Beton et al. (2025), exo gym

Learning rules (`learning` in train.py and a row of `learning.LEARNING`), on top of averaging::

    dpsgd                   DPSGD                        Lian et al. (2017), 1705.09056
    quasi-global-momentum   QuasiGlobalMomentum, -Adam   Lin et al. (2021), 2102.04761
    gradient-tracking       GradientTracking             Pu & Nedić (2021), 1805.11454
    k-gt                    KGT                          Liu et al. (2023), 2301.01313
    momentum-tracking       MomentumTracking             Takezawa et al. (2023), 2209.15505
    gt-nsgd                 NormalizedGradientTracking   normalized steps, for transformers
    exact-diffusion         ExactDiffusion               Li, Shi & Yan (2019), 1704.07807
    beer, motef             BEER, MoTEF                  2201.13320, 2405.20114: over choco
    relay-sgd               RelaySGD                     Vogels et al. (2021), 2110.04175: on trees
    diloco                  DiLoCo                       rounds with outer momentum, 2311.08105
    gasloc, noloco          GASLoC, NoLoCo               others of these, 2606.11081, 2506.10911

Asynchronous gossip (`gossip` in train.py and a row of `learning.POLICIES`)::

    a2cid2         A2CiD2        accelerated by a second copy of x   Nabli et al. (2023), 2306.08289

Consensus only (`algorithm` in gossip_run.py and a row of `CONSENSUS_ONLY`)::

    chebyshev      ChebyshevGossip    accelerated gossip             Golub & Varga (1961)
    finite-time    FiniteTimeGossip   exact after finite steps   Hendrickx et al. (2014), 1211.6324

Compressed gradients (`optimizer` in train.py and a row of `AGGREGATIONS`)::

    powersgd       low-rank gradients                Vogels et al. (2019), 1905.13727
    dgc            sparse gradients with momentum    Lin et al. (2018), 1712.01887
    ef-sgd         error feedback, any compressor    Karimireddy et al. (2019), 1901.09847
    signsgd        majority vote on signs            Bernstein et al. (2018), 1802.04434
    sparse-loco    local steps, top-k of chunks      Sarfi et al. (2025), 2508.15706
    demo           momentum, cosine components       Peng et al. (2024), 2411.19870
"""

from powergossip.algorithms import *  # noqa: F403
from powergossip.algorithms import __all__ as __all__
from powergossip.algorithms import learning as learning
from powergossip.algorithms.aggregation import AGGREGATIONS as AGGREGATIONS
