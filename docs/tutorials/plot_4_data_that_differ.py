"""
Data that differ
================

This page shows how workers with different data drift apart, and two rules that hold them together.
"""

# %%
# Eight optima in a plane
# -----------------------
#
# A model has two parameters, so that it is a point in a plane. Worker i has the loss ½ Σ_k a_i[k]
# (x[k] − b_i[k])², with its own optimum b_i on a circle. The optimum of the mean loss is elsewhere.
# A learning rule needs the parameters, the gradients, and a local optimizer.

import contextlib
import io
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch

import train
from powergossip import Layout, Network, algorithms, topologies
from powergossip.algorithms import learning

COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#666666"]
RULES = ["dpsgd", "gradient-tracking", "exact-diffusion"]


class Plane:
    """Parameters and gradients [worker, 2]."""

    n_workers, layout = 8, Layout([(2,)])

    def __init__(self):
        angle = torch.arange(8) * torch.pi / 4
        directions = torch.stack([angle.cos(), angle.sin()], 1)
        self.a, self.b = 1 + 0.8 * directions, 3 * directions
        self.optimum = (self.a * self.b).sum(0) / self.a.sum(0)
        self.x, self.grad = torch.tensor([[-3.0, -3.0]]).repeat(8, 1), torch.zeros(8, 2)

    def decay_spans(self):
        return []


class SGD:
    def __init__(self, x, rate):
        self.x, self.rate = x, rate

    def displacement(self, gradient):
        return -self.rate * gradient

    def step(self, gradient):
        self.x += self.displacement(gradient)


def path(rule, steps=300):
    """The points of all workers, [step, worker, 2]."""
    plane = Plane()
    network = Network(topologies.make("ring", 8))
    gossip = algorithms.PlainGossip(network)
    workers = learning.Workers(network, lambda layout: gossip, plane, SGD(plane.x, rate=0.1))
    rule, points = learning.make(rule, workers), [plane.x.clone()]
    for _ in range(steps):
        rule.start()
        plane.grad.copy_(plane.a * (plane.x - plane.b))
        rule.finish()
        points.append(plane.x.clone())
    return torch.stack(points)


# %%
# All workers begin at the same point. With D-PSGD, each moves towards its own optimum (a square)
# until its neighbors pull as much as its gradient. They come to rest apart, and their mean is not
# the common optimum (the cross). Gradient tracking and exact diffusion correct each step, so that
# all workers come to rest at the cross.

figure, panels = plt.subplots(1, 3, figsize=(6.4, 3.1), sharex=True, sharey=True)
for panel, rule in zip(panels, RULES, strict=True):
    plane, points = Plane(), path(rule)
    for worker, color in enumerate(COLORS):
        panel.plot(*points[:, worker].T, color=color, linewidth=1)
        panel.plot(*points[-1, worker], "o", color=color)
        panel.plot(*plane.b[worker], "s", color=color, alpha=0.5)
    panel.plot(*plane.optimum, "kx", markersize=9, markeredgewidth=2)
    error = (points[-1] - plane.optimum).norm(dim=1).mean()
    panel.set(title=f"{rule}\nmean distance {error:.0e}", aspect="equal", xlabel="parameter 1")
panels[0].set_ylabel("parameter 2")
plt.show()

# %%
# Digits sorted by label
# ----------------------
#
# Here a network has 26,122 parameters, and each worker has images of one or two digits
# (`use_decentralized_data=true`). Its model forgets the other digits between two exchanges.

SETTINGS = "n_workers=8 task_architecture=MLP optimizer=dpsgd learning_rate=0.05 num_epochs=20"
folder = Path(tempfile.mkdtemp())
figure, panels = plt.subplots(1, 3, figsize=(9, 3.4), sharey=True)
for panel, rule in zip(panels, RULES, strict=True):
    arguments = f"{SETTINGS} use_decentralized_data=true learning={rule}"
    with contextlib.redirect_stdout(io.StringIO()):  # without the table of the run
        train.main([*arguments.split(), "log_verbosity=0", "--output-dir", str(folder / rule)])
    rows = pd.read_json(folder / rule / "metrics.jsonl", lines=True)
    accuracy = rows[rows.name == "accuracy"]
    for worker, of_worker in accuracy[accuracy.split == "test"].groupby("worker"):
        panel.plot(of_worker.epoch, 100 * of_worker.value, color=COLORS[int(worker)], linewidth=1)
    mean = accuracy[accuracy.split == "test_avg"]
    panel.plot(mean.epoch, 100 * mean.value, color="black", linewidth=2.5, label="mean model")
    panel.set(title=rule, xlabel="epoch")
panels[0].set_ylabel("test accuracy, %")
panels[0].legend()
plt.show()

# %%
# Gradient tracking sends two variables in place of one. `All rules, their costs and measurements
# <../different-data.html>`_.
