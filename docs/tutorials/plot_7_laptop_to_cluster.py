"""
From a laptop to a cluster
==========================

This page shows the same run in one process, in four and in two, and how little their results
differ.
"""

# %%
# Workers and processes
# ---------------------
#
# The number of workers is part of the method. The number of processes is not: a process hosts one
# worker, several, or all of them. Only messages between processes use the network, the thick lines.

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import networkx as nx
import pandas as pd

import train
from powergossip import topologies

COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#666666"]
ring = nx.Graph(topologies.make("ring", 8).edges.tolist())
figure, panels = plt.subplots(1, 3, figsize=(9, 3.2))
for panel, processes in zip(panels, (1, 4, 8), strict=True):
    host = [worker * processes // 8 for worker in range(8)]
    nx.draw_networkx(
        ring,
        nx.circular_layout(range(8)),
        ax=panel,
        node_color=[COLORS[host[worker]] for worker in ring],
        width=[1 if host[i] == host[j] else 4 for i, j in ring.edges],
        edge_color="#999999",
        font_color="white",
    )
    panel.text(0, 0, f"{processes} process{'es' * (processes > 1)}", ha="center")
    panel.set_aspect("equal")
    panel.set_axis_off()
plt.show()

# %%
# One process
# -----------
#
# In a notebook or on a laptop, `n_workers=8` is all that is needed. On the command line, this is
# `powergossip-train n_workers=8`, or `python train.py n_workers=8` in a checkout.

folder = Path(tempfile.mkdtemp())
SETTINGS = "n_workers=8 task_architecture=MLP learning_rate=0.05 num_epochs=10 log_verbosity=0"
with contextlib.redirect_stdout(io.StringIO()):  # without the table of the run
    train.main([*SETTINGS.split(), "--output-dir", str(folder / "one process")])

# %%
# Several processes
# -----------------
#
# A launcher starts the same program several times. The processes find each other through MPI, or
# without MPI through torchrun. Without `mpirun`, this page skips MPI.

TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2"
LAUNCHERS = {"torchrun, 2 processes": [sys.executable, *TORCHRUN.split()]}
if shutil.which("mpirun"):
    LAUNCHERS["mpirun, 4 processes"] = ["mpirun", "-np", "4", sys.executable]
for name, launcher in LAUNCHERS.items():
    command = [*launcher, "-m", "train", *SETTINGS.split(), "--output-dir", str(folder / name)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, capture_output=True)

# %%
# The results agree
# -----------------
#
# Random numbers depend on the seed, the worker and the step, and not on processes. Only the
# rounding of sums may differ, with the number of threads. The differences grow in training. Bits
# are counted for workers, and are equal. A run with another seed shows a large difference.

with contextlib.redirect_stdout(io.StringIO()):
    train.main([*SETTINGS.split(), "seed=2", "--output-dir", str(folder / "another seed")])


def rows_of(name):
    rows = pd.read_json(folder / name / "metrics.jsonl", lines=True)
    rows = rows[(rows.name == "cross_entropy") & (rows.split == "test_avg")]
    return rows.set_index("epoch")[["value", "bits"]]


one = rows_of("one process")
figure, axes = plt.subplots()
axes.semilogy(one.value, color=COLORS[0], linewidth=8, alpha=0.4, label="one process")
for name, color, style in zip(LAUNCHERS, COLORS[1:], ("--", ":"), strict=False):
    several = rows_of(name)
    axes.semilogy(several.value, style, color=color, linewidth=3, label=name)
    differences = (several - one).abs().max()
    print(f"{name}: differs by {differences.value:.0e}, and by {differences.bits:.0f} bits")
axes.semilogy(rows_of("another seed").value, color=COLORS[-1], label="another seed")
axes.set(xlabel="epoch", ylabel="test cross entropy, mean model")
axes.legend()
plt.show()

# %%
# A cluster
# ---------
#
# On several hosts, use the cluster's launcher. The rest stays the same:
#
# .. code-block:: bash
#
#     mpirun -np 8 --host first:4,second:4 python train.py
#     sbatch environment/slurm/train.sbatch topology=torus
#     torchrun --nnodes 2 --nproc-per-node 4 --rdzv-endpoint first:29500 train.py
#
# `Clusters, GPUs, Slurm <../clusters.html>`_, `torchrun, gloo and NCCL <../torchrun.html>`_.
