"""
Your own compressor in ten lines
================================

This page shows a compressor with 2 bits for each element, and compares it with the library's
compressors.
"""

# %%
# Ternary messages
# ----------------
#
# The compressor sends the sign of each element whose magnitude is above the mean, zero for the
# others, and one float: the mean magnitude of the former. A compressor has three methods: the
# fields of a message, their values, and the matrix at the receiver. A row in the registry gives it
# a name.

import contextlib
import io
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch

import train
from powergossip import Layout, Network, algorithms, compressors, topologies


class Ternary:
    """C(v) = m · sign(v) for the elements above the mean magnitude, 0 for the others."""

    def stable_rate(self, rows, columns):
        return 0.5

    def fields(self, rows, columns):
        levels = compressors.Levels(first=-1, step=1, count=3)
        return compressors.Field(torch.float32, 1), compressors.Field(levels, rows * columns)

    def compress(self, v, stream):
        v = v.flatten(-2)
        large = v.abs() > v.abs().mean(-1, keepdim=True)
        mean = (v.abs() * large).sum(-1, keepdim=True) / large.sum(-1, keepdim=True).clamp(min=1)
        return mean, v.sign() * large + 1  # the index of a level, from 0

    def decompress(self, fields, out, stream):
        mean, levels = fields
        out.flatten(-2).add_(mean * levels)


compressors.COMPRESSORS["ternary"] = Ternary

# %%
# Packing, bits, checkpoints and MPI follow from the fields. `stable_rate` limits the default
# diffusion rate of CHOCO-Gossip. A good first value is the contraction, the fraction of the squared
# norm in a message. Here it is above one half for normal elements:

v = torch.randn(64, 64)
codec = compressors.Codec(Layout([v.shape]), Ternary(), workers=[0])
received = codec.decode(codec.encode(v.reshape(1, -1), 0), torch.tensor([0]), 0).reshape(v.shape)
print(f"{8 * codec.size} bits for {v.numel()} elements")
print(f"contraction: {1 - (v - received).norm() ** 2 / v.norm() ** 2:.2f}")

# %%
# Consensus
# ---------
#
# Eight workers on a ring have random matrices and average them with CHOCO-Gossip. Each compressor
# has its default diffusion rate. Ternary messages reach a distance of 0.1 with the fewest bits. For
# a smaller distance, rounding to nine levels needs fewer.

COMPRESSORS = {
    "ternary": "#D55E00",
    "sign-and-norm": "#0072B2",
    "top-k": "#009E73",
    "qsgd": "#CC79A7",
    "rounding": "#E69F00",
}
figure, axes = plt.subplots()
for name, color in COMPRESSORS.items():
    network, layout = Network(topologies.make("ring", 8)), Layout([(64, 64)])
    choco = algorithms.AVERAGING["choco"](network, layout, compressor=name)
    x = torch.randn(8, 64 * 64, generator=torch.Generator().manual_seed(1))
    mean, bits, errors = x.mean(0), [], []
    for _ in range(400):
        network.run(choco.step(x))
        bits.append(network.bits[0] / 1e6)
        errors.append((x - mean).norm() / mean.numel() ** 0.5)
    axes.semilogy(bits, errors, color=color, label=name, linewidth=3 if name == "ternary" else 1.5)
axes.set(xlabel="sent by a worker, Mbit", ylabel="distance to the mean", xlim=(0, 8))
axes.legend()
plt.show()

# %%
# Training
# --------
#
# The same name works in `train.py`. Eight workers train a small network on handwritten digits, all
# in this process. `metrics.jsonl` has a row for each measurement. The final accuracies are nearly
# the same; top-k needs the fewest bits.

folder = Path(tempfile.mkdtemp())
SETTINGS = "n_workers=8 task_architecture=MLP learning_rate=0.05 num_epochs=10 optimizer=choco"
figure, axes = plt.subplots()
for name, color in COMPRESSORS.items():
    arguments = f"{SETTINGS} optimizer_compressor={name} --output-dir {folder / name}"
    with contextlib.redirect_stdout(io.StringIO()):  # without the table of the run
        train.main([*arguments.split(), "log_verbosity=0"])
    rows = pd.read_json(folder / name / "metrics.jsonl", lines=True)
    rows = rows[(rows.name == "accuracy") & (rows.split == "test_avg")]
    axes.semilogx(rows.bits / 8e6, 100 * rows.value, color=color, marker="o", label=name)
axes.set(xlabel="sent by a worker, MB", ylabel="test accuracy of the mean model, %")
axes.legend()
plt.show()

# %%
# `More about compressors <../extending.html#a-compressor>`_: options, random numbers that sender
# and receiver share, and the laws that the tests check for each compressor in the library.
