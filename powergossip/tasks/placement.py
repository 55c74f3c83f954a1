"""Placement of shards on the graph: the permutation that mixes the labels of neighbors."""

import numpy as np
from scipy.sparse import csr_array

_DIGITS = 2**12  # weights and proportions are multiples of 1/_DIGITS


def mixed(counts: np.ndarray, mixing: csr_array) -> np.ndarray:
    """The shard of each worker such that neighborhoods have the labels of all: int64 [worker].

    Minimizes Σ_i ‖Σ_j w_ij h_p(j) − h‖², where h_s are the label proportions of shard s and h is
    their mean, the proportions that the workers' mean loss weighs. This is the heterogeneity of
    neighborhoods, which bounds the bias of gossip, with proportions of labels in place of
    gradients. In the paper the graph is chosen, here the permutation p.

    Greedy: from p(i) = i, each worker in turn swaps with the one that decreases the sum most, until
    no swap decreases it. O(n · (n · label + degree²)) for a pass over n workers, O(n · label)
    memory beside W. All values are integers below 2⁵³ in float64, hence exact: the permutation is
    the same on all machines.

    Args:
        counts: Number of samples [shard, label], int64.
        mixing: Mixing matrix W, csr [receiver, sender], the mean of its rounds.

    References:
        Le Bars et al. (2023), arXiv:2204.04452.
    """
    n = len(counts)
    proportions = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    h = np.rint(_DIGITS * (proportions - proportions.mean(axis=0)))  # [worker, label], h_p − h
    W = csr_array(mixing, copy=True)
    W.data = np.rint(_DIGITS * W.data)
    Wt = csr_array(W.T)
    squares = np.asarray(W.multiply(W).sum(axis=0)).ravel()  # diagonal of G = WᵀW
    Y = Wt @ (W @ h)  # G h
    placed = np.arange(n)
    swapped = True
    while swapped:
        swapped = False
        for a in range(n):
            # h + (e_a − e_b) dᵀ, d = h_b − h_a, changes tr(hᵀ G h) by
            # 2 (Y_a − Y_b)·d + (G_aa + G_bb − 2 G_ab) ‖d‖²
            row = _product(Wt, W, a)
            d = h - h[a]
            change = 2 * (d * (Y[a] - Y)).sum(axis=1)
            change += (squares[a] + squares - 2 * row) * (d**2).sum(axis=1)
            b = int(change.argmin())
            if change[b] < 0:
                Y += np.outer(row - _product(Wt, W, b), d[b])
                h[[a, b]], placed[[a, b]] = h[[b, a]], placed[[b, a]]
                swapped = True
    return placed


def _product(Wt: csr_array, W: csr_array, a: int) -> np.ndarray:
    """Row a of G = WᵀW: Σ_i w_ia w_ib for each b."""
    row = np.zeros(W.shape[1])
    for k in range(Wt.indptr[a], Wt.indptr[a + 1]):
        entries = slice(W.indptr[Wt.indices[k]], W.indptr[Wt.indices[k] + 1])
        row[W.indices[entries]] += Wt.data[k] * W.data[entries]
    return row
