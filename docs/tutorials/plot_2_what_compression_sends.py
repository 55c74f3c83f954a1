"""
What compression sends
======================

This page shows one matrix, and the versions of it that arrive at a neighbor in a message of 2 to 6
% of its size.
"""

# %%
# The difference of two workers
# -----------------------------
#
# Two workers begin with the same network. One trains on the digits 0 to 4, the other on 5 to 9.
# After 60 steps, the matrices of their hidden layers differ by `D`, with 64 rows of neurons and 64
# columns of pixels.

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from powergossip import Layout, compressors

images, labels = map(torch.tensor, load_digits(return_X_y=True))


def hidden_layer(own):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(60):
        batch = own[torch.randint(len(own), (32,))]
        optimizer.zero_grad()
        scores = model(images[batch].float() / 16)
        nn.functional.cross_entropy(scores, labels[batch]).backward()
        optimizer.step()
    return model[0].weight.detach()


D = hidden_layer((labels < 5).nonzero()[:, 0]) - hidden_layer((labels >= 5).nonzero()[:, 0])
print("singular values:", *(f"{value:.1f}" for value in torch.linalg.svdvals(D)[:12].tolist()))

# %%
# A compressor and its codec
# --------------------------
#
# `compressors.make` builds a compressor by its name. A `Codec` turns tensors into a message of
# bytes and back. All bits are in this message: values, indices, norms.


def arrives(name, **options):
    """The matrix at the receiver, and the bits of the message."""
    codec = compressors.Codec(Layout([D.shape]), compressors.make(name, **options), workers=[0])
    message = codec.encode(D.reshape(1, -1), counter=0)
    received = codec.decode(message, torch.tensor([0]), counter=0)
    return received.reshape(D.shape), 8 * codec.size


# %%
# PowerGossip has no compressor, since both neighbors compute the message together. An iteration
# sends the product of each matrix with a direction `p`, here 64 numbers. The neighbors then know
# `s`, the product of `p` with their difference, and move towards each other along `p`. The next
# iteration begins with `s`, and multiplies from the other side.


def power_iterations(count):
    left, p = D.clone(), torch.randn(64, generator=torch.Generator().manual_seed(1))
    for _ in range(count):
        p /= p.norm()
        s = left.T @ p
        left = (left - torch.outer(p, s)).T  # the sides swap
        p = s
    return D - (left.T if count % 2 else left), count * 64 * 32


# %%
# Pictures of messages
# --------------------
#
# Signs approximate every element, top-k keeps the largest elements exactly. A low rank keeps rows
# and columns: pixels at the margin that no digit uses, and neurons that do not respond, stay white.
# QSGD rounds at random, so that its mean is right, and its variance large. With the levels −1, 0
# and 1, it and `rounding` still need twice the bits of the others.

messages = {
    "the difference": arrives("identity"),
    "top-k": arrives("top-k", keep_ratio=1 / 64),
    "random-k": arrives("random-k", keep_ratio=1 / 32),
    "sign-and-norm": arrives("sign-and-norm"),
    "qsgd": arrives("qsgd", levels=1, unbiased=True),
    "rounding": arrives("rounding", levels=1),
    "svd": arrives("svd", rank=1),
    "PowerGossip": power_iterations(2),
}


def error(matrix):
    return float((D - matrix).norm() / D.norm())


figure, panels = plt.subplots(2, 4, figsize=(6.2, 4))
for panel, (name, (matrix, bits)) in zip(panels.flat, messages.items(), strict=True):
    shown = panel.imshow(matrix, cmap="RdBu_r", vmin=-0.3, vmax=0.3)
    panel.set(title=name, xlabel=f"{bits / 1000:.1f} kbit\nerror {error(matrix):.2f}")
    panel.set(xticks=[], yticks=[])
figure.colorbar(shown, ax=panels, label="element of the matrix", shrink=0.7)
plt.show()

# %%
# Bits against error
# ------------------
#
# The error is relative to the norm of `D`: no message at all has an error of 1. An unbiased QSGD is
# above 1 until it has enough levels. Nine singular values of `D` are large, so that a rank of nine
# is good, and PowerGossip comes close to the best low rank without a decomposition.

families = {
    "top-k": [arrives("top-k", keep_ratio=2.0**-k) for k in range(1, 10)],
    "random-k": [arrives("random-k", keep_ratio=2.0**-k) for k in range(1, 10)],
    "qsgd": [arrives("qsgd", levels=2**k - 1, unbiased=True) for k in range(1, 8)],
    "sign-and-norm": [arrives("sign-and-norm")],
    "svd": [arrives("svd", rank=rank) for rank in (1, 2, 4, 8, 12, 16)],
    "PowerGossip": [power_iterations(count) for count in (1, 2, 4, 8, 16, 24, 32)],
}
COLORS = ["#0072B2", "#56B4E9", "#CC79A7", "#E69F00", "#009E73", "#D55E00"]
figure, axes = plt.subplots()
for (name, sent), color, marker in zip(families.items(), COLORS, "osvD^P", strict=True):
    bits = [bits / 1000 for _, bits in sent]
    axes.semilogx(
        bits, [error(matrix) for matrix, _ in sent], color=color, marker=marker, label=name
    )
axes.axvline(D.numel() * 32 / 1000, color="#666666", linestyle=":", label="uncompressed")
axes.set(xlabel="message, kbit", ylabel="relative error", xlim=(0.2, 200), ylim=(0, 1.6))
axes.legend()
plt.show()

# %%
# An error is not lost: `CHOCO <../methods/choco.html>`_ sends the difference to a public copy, and
# the next message contains the residual of the last. `PowerGossip <../methods/power-gossip.html>`_
# begins each step with the directions of the last one.
