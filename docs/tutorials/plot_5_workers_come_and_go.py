"""
Workers come and go
===================

This page shows a run in which two workers die, one joins and one is replaced, and a run with a slow
worker.
"""

# %%
# A scenario
# ----------
#
# One process hosts all workers, and time is virtual: a step takes a second. Worker 7 joins later.
# Worker 2 dies after a minute and is replaced later. Worker 5 dies for good.

import contextlib
import io
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

import train

COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#666666"]
folder = Path(tempfile.mkdtemp())
(folder / "churn.yaml").write_text("""
    seconds_per_step: 1.0
    deaths: [{worker: 2, at: 60.0}, {worker: 5, at: 80.0}]
    joins: [{worker: 7, at: 40.0}, {worker: 2, at: 140.0}]
""")
SETTINGS = "n_workers=8 task_architecture=MLP optimizer=dpsgd learning_rate=0.05 num_epochs=20"


def measured(name, arguments):
    """The rows of a run with SETTINGS and these arguments."""
    given = f"{SETTINGS} {arguments} log_verbosity=0 --output-dir {folder / name}"
    with contextlib.redirect_stdout(io.StringIO()):  # without the table of the run
        train.main(given.split())
    return pd.read_json(folder / name / "metrics.jsonl", lines=True)


# %%
# A worker has one or two of the ten digits. With `data_of_lost=redistributed`, the others take over
# the images of a dead worker. Gradient tracking holds the workers together.

rows = measured(
    "churn",
    f"scenario={folder / 'churn.yaml'} data_of_lost=redistributed"
    " use_decentralized_data=true learning=gradient-tracking",
)
print("workers after each epoch:", *rows[rows.name == "workers"].value.astype(int))

# %%
# Deaths and joins over time
# --------------------------
#
# The graph and the data of the others change whenever somebody dies or joins. Training goes on. A
# new worker begins with the mean of its neighbors' models, and so with a trained model's accuracy.

LIVES = {2: [(0, 60), (140, 222)], 5: [(0, 80)], 7: [(40, 222)]}  # the others: always
accuracy = rows[rows.name == "accuracy"]
figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=[1, 2])
for worker, color in enumerate(COLORS):
    for begin, end in LIVES.get(worker, [(0, 222)]):
        above.barh(worker, end - begin, left=begin, color=color, height=0.6)
        if end < 222:
            above.plot(end, worker, "kX", markersize=9)
        of_worker = accuracy[(accuracy.worker == worker) & accuracy.seconds.between(begin, end)]
        below.plot(of_worker.seconds, 100 * of_worker.value, color=color, linewidth=1.2)
mean = accuracy[accuracy.split == "test_avg"]
below.plot(mean.seconds, 100 * mean.value, color="black", linewidth=2.5, label="mean model")
for time, change in [(40, "7 joins"), (60, "2 dies"), (80, "5 dies"), (140, "2 is replaced")]:
    below.axvline(time, color="#999999", linestyle=":")
    below.annotate(change, (time, 30), rotation=90, ha="right", va="bottom")
above.set(ylabel="worker", yticks=range(8))
above.grid(False)
below.set(xlabel="virtual time, seconds", ylabel="test accuracy, %", ylim=(25, 100))
below.legend(loc="lower right")
plt.show()

# %%
# A slow worker
# -------------
#
# Here worker 3 is four times slower than the others. With `gossip=synchronous`, all of them wait
# for it in each step. With `gossip=asynchronous` nobody waits, and the slow worker takes fewer
# steps.

(folder / "slow.yaml").write_text("speeds: {3: 0.25}")
figure, axes = plt.subplots()
for gossip, color in [("synchronous", COLORS[0]), ("asynchronous", COLORS[1])]:
    rows = measured(gossip, f"gossip={gossip} scenario={folder / 'slow.yaml'}")
    mean = rows[(rows.name == "accuracy") & (rows.split == "test_avg")]
    axes.plot(mean.seconds, 100 * mean.value, color=color, marker="o", label=gossip)
axes.set(xlabel="virtual time, seconds", ylabel="test accuracy of the mean model, %")
axes.legend()
plt.show()

# %%
# The same happens with real processes, which `kill -9` may end: `When workers fail
# <../when-workers-fail.html>`_.
