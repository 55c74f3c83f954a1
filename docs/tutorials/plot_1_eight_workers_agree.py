"""
Eight workers agree
===================

This page shows how fast eight workers learn from each other, on three graphs.
"""

# %%
# Each worker knows one thing
# ---------------------------
#
# Worker :math:`i` has a vector with a 1 at position :math:`i` and zeros elsewhere. After some steps
# of gossip, the elements of its vector are its weights for the eight workers. All workers agree if
# all weights are 1/8.

import matplotlib.pyplot as plt
import torch
from matplotlib.animation import FuncAnimation
from matplotlib.collections import LineCollection

from powergossip import algorithms, topologies
from powergossip.network import Network

WORKERS, STEPS = 8, 10
GRAPHS = ["ring", "hypercube", "one-peer-exponential"]
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#666666"]

# %%
# Gossip
# ------
#
# In a step, every worker sends its vector to its neighbors and takes a weighted mean of its vector
# and the received vectors. `Network` sends the messages and counts their bits, `PlainGossip` takes
# the mean. The matrix `x` has a row for each worker.


def gossip(graph):
    """The vectors after 0, 1, … steps, [step, worker, element], and the bits of worker 0."""
    network = Network(topologies.make(graph, WORKERS))
    rule = algorithms.PlainGossip(network)
    x = torch.eye(WORKERS)
    history = [x.clone()]
    for _ in range(STEPS):
        network.run(rule.step(x))
        history.append(x.clone())
    return torch.stack(history), int(network.bits[0])


histories, bits = {}, {}
for graph in GRAPHS:
    histories[graph], bits[graph] = gossip(graph)
    print(f"{graph:22s}{bits[graph] // STEPS:5d} bits sent by a worker in a step")

# %%
# Who knows what
# --------------
#
# Each worker is a pie of its weights. On a ring, a color needs four steps to reach the opposite
# worker. On a hypercube, with three neighbors in place of two, it needs three, and the pies are
# even soon after. `one-peer-exponential` has one neighbor at a time, at a distance of 1, 2 and 4.
# After three steps all pies are exactly even, for half the bits of a ring.

FRAMES = 4  # of a step
figure, panels = plt.subplots(
    ncols=3,
    figsize=(6.4, 2.7),
    gridspec_kw={"left": 0, "right": 1, "bottom": 0, "top": 0.86, "wspace": 0},
    label="pies of weights on three graphs",
)
figure.set_layout_engine("none")
angle = torch.arange(WORKERS) * 2 * torch.pi / WORKERS
places = torch.stack([angle.cos(), angle.sin()], 1)
pies, lines = {}, {}
for panel, graph in zip(panels, GRAPHS, strict=True):
    lines[graph] = panel.add_collection(LineCollection([], colors="#999999", zorder=0))
    for worker in range(WORKERS):
        even = [1] * WORKERS
        pies[graph, worker], _ = panel.pie(even, colors=COLORS, center=places[worker], radius=0.27)
    panel.set(xlim=(-1.4, 1.4), ylim=(-1.3, 1.3), title=graph)


def draw(frame):
    step, part = divmod(frame, FRAMES)
    part = min(1, part / (FRAMES - 2))  # the weights change, then rest
    for graph, history in histories.items():
        receivers, senders = topologies.make(graph, WORKERS).round(step).weights.nonzero()
        lines[graph].set_segments(torch.stack([places[receivers], places[senders]], 1).numpy())
        weights = history[min(step, STEPS)].lerp(history[min(step + 1, STEPS)], part)
        spans = 90 + 360 * torch.nn.functional.pad(weights.cumsum(1), (1, 0)).unfold(1, 2, 1)
        for worker in range(WORKERS):
            for wedge, (begin, end) in zip(pies[graph, worker], spans[worker], strict=True):
                wedge.set(theta1=begin, theta2=end)
    figure.suptitle(f"step {min(step + (part > 0), STEPS)}")


animation = FuncAnimation(figure, draw, frames=(STEPS + 2) * FRAMES)
plt.show()

# %%
# The distance to the mean
# ------------------------
#
# The eigenvalues of the mixing matrix predict the slope: `contraction` is the factor of a step. On
# a ring it approaches 1 as the number of workers grows. For `one-peer-exponential` it is 0.

figure, axes = plt.subplots()
for graph, color, marker in zip(GRAPHS, COLORS, "os^", strict=False):
    errors = (histories[graph] - 1 / WORKERS).norm(dim=(1, 2)) / WORKERS**0.5
    factor = topologies.make(graph, WORKERS).contraction()
    label = f"{graph}, factor {factor:.2f}"
    axes.semilogy(errors.clamp(min=1e-8), color=color, marker=marker, label=label)
axes.set(xlabel="step", ylabel="distance to the mean, RMS of workers", ylim=(1e-7, 2))
axes.legend()
plt.show()

# %%
# `More graphs and their spectra <../topologies.html>`_. To keep the animation as a file:
# `animation.save("agree.gif", writer="pillow")`. In a notebook: `HTML(animation.to_jshtml())` with
# `from IPython.display import HTML`.
