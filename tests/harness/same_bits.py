"""Whether two commits compute the same bits: short deterministic runs with both, on this machine.

    git worktree add ../before COMMIT
    python -m tests.harness.same_bits ../before

Compares, to the last bit, the rows of each run, without those of real time, and the models of all
workers at its end. Names the runs that differ. For changes that should not change a result.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

TINY = (
    *("task_architecture=MLP", "n_workers=4", "num_epochs=2", "max_steps_per_epoch=5"),
    *("batch_size=16", "log_verbosity=0", "momentum=0.9", "learning_rate=0.02"),
)
DIFFERENT = ("use_decentralized_data=true",)
METHODS = {
    "all-reduce": ("optimizer=all-reduce",),
    "dpsgd": ("optimizer=dpsgd",),
    "power-gossip": ("optimizer=power-gossip", "optimizer_num_iterations=2"),
    "power-gossip-rank-2": ("optimizer=power-gossip", "optimizer_rank=2"),
    "choco-sign": ("optimizer=choco",),
    "choco-top-k": ("optimizer=choco", "optimizer_compressor=top-k", "optimizer_keep_ratio=0.1"),
    "choco-svd": ("optimizer=choco", "optimizer_compressor=svd", "optimizer_rank=1"),
    "choco-qsgd": ("optimizer=choco", "optimizer_compressor=qsgd", "optimizer_levels=4"),
    "deepsqueeze": ("optimizer=deepsqueeze",),
    "moniqua": ("optimizer=moniqua", "optimizer_theta=0.5"),
    "push-sum": ("optimizer=push-sum", "topology=one-peer-exponential"),
    "powersgd": ("optimizer=powersgd", "optimizer_rank=2"),
    "dgc": ("optimizer=dgc", "optimizer_keep_ratio=0.1"),
    "signsgd": ("optimizer=signsgd",),
    "ef-sgd": ("optimizer=ef-sgd",),
}
RULES = {
    "quasi-global-momentum": ("optimizer=power-gossip",),
    "gradient-tracking": ("optimizer=choco",),
    "k-gt": ("optimizer=dpsgd", "local_steps=2"),
    "momentum-tracking": ("optimizer=power-gossip",),
    "gt-nsgd": ("optimizer=dpsgd",),
    "exact-diffusion": ("optimizer=dpsgd",),
    "beer": ("optimizer=choco", "momentum=0"),
    "motef": ("optimizer=choco",),
    "relay-sgd": ("optimizer=dpsgd", "topology=chain"),
}
LATE = "scenario={speeds: {1: 0.3}, late: {fraction: 0.3, seconds: 2}, loss: {fraction: 0.1}}"
LOSSES = "scenario={deaths: [{worker: 2, at: 3.5}], joins: [{worker: 2, at: 7.5}]}"
BY_EDGES = {
    "dpsgd": ("optimizer=dpsgd",),
    "power-gossip": ("optimizer=power-gossip", "optimizer_num_iterations=2"),
    "choco": ("optimizer=choco",),
    "exact-diffusion": ("optimizer=dpsgd", "learning=exact-diffusion"),
    "quasi-global-momentum": ("optimizer=dpsgd", "learning=quasi-global-momentum"),
    "gradient-tracking": ("optimizer=power-gossip", "learning=gradient-tracking"),
}
CONSENSUS = ("power_gossip", "topk_choco", "moniqua", "push_sum", "chebyshev")

Command = tuple[str, ...]  # the entry point and its arguments


def cases() -> Iterator[tuple[str, int, list[Command]]]:
    """Name, processes, and the commands that follow each other in the same folder."""
    for name, values in METHODS.items():
        run = ("train", *TINY, *values)
        yield f"{name}, resumed", 1, [run, (*run, "resume=true", "num_epochs=3")]
        yield f"{name}, 4 processes", 4, [run]
    for name, values in RULES.items():
        run = ("train", *TINY, *DIFFERENT, *values, f"learning={name}")
        yield f"{name}, resumed", 1, [run, (*run, "resume=true", "num_epochs=3")]
        yield f"{name}, 2 processes", 2, [run]
    for name, values in BY_EDGES.items():
        run = ("train", *TINY, *values)
        for gossip in ("synchronous", "bounded", "asynchronous"):
            late = (*run, f"gossip={gossip}", LATE)
            yield f"{name}, {gossip}, late", 1, [late]
        yield f"{name}, lost and replaced", 1, [(*run, LOSSES)]
    elastic = ("train", *TINY, "optimizer=power-gossip")
    fewer = (*elastic, "resume=true", "num_epochs=3", "n_workers=3")
    yield "fewer workers", 1, [elastic, fewer]
    for name in CONSENSUS:
        run = ("gossip_run", "n_workers=8", "num_steps=30", f"algorithm={name}")
        yield f"consensus, {name}", 1, [run]
    yield "GossipOptimizer", 4, [("loop",)]


# --- The runs of one checkout, in the processes of mpirun ---


def carry_out(processes: int, out: Path) -> None:
    """Carry out the cases for this number of processes, with the checkout that Python imports."""
    import gossip_run
    import train

    for number, (name, wanted, commands) in enumerate(cases()):
        if wanted != processes:
            continue
        folder = out / str(number)
        for entry, *arguments in commands:
            try:
                if entry == "loop":
                    _loop(folder)
                else:
                    main = train.main if entry == "train" else gossip_run.main
                    main([*arguments, "--output-dir", str(folder)])
            except BaseException as error:  # the case counts as different, unless both raise it
                folder.mkdir(exist_ok=True)
                (folder / "error.txt").write_text(f"{name}: {type(error).__name__} {error}")


def _loop(folder: Path) -> None:
    """A loop of a user, over each averaging rule with which a learning rule goes."""
    from powergossip.network import processes
    from powergossip.optimizers import GossipOptimizer

    found = {}
    wrapped: dict[str, dict[str, Any]] = {
        "power-gossip": {"learning": "quasi-global-momentum", "num_iterations": 2},
        "choco": {"compressor": "top-k", "keep_ratio": 0.1},
        "dpsgd": {"learning": "gradient-tracking"},
    }
    for method, options in wrapped.items():
        torch.manual_seed(processes().rank)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
        local = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = GossipOptimizer(local, method, **options)
        for _ in range(8):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(
                model(torch.randn(4, 6)), torch.arange(4) % 3
            ).backward()
            optimizer.step()
        found[method] = [p.detach().clone() for p in model.parameters()], optimizer.bits
    folder.mkdir(exist_ok=True)
    torch.save({"x": found}, folder / f"loop-{processes().rank}.pt")


# --- Their results ---


def results(out: Path) -> dict[str, str]:
    """Case → digest of its rows and models, or its error."""
    found = {}
    for number, (name, _, _) in enumerate(cases()):
        folder = out / str(number)
        error = folder / "error.txt"
        text = json.dumps([_rows(folder), _models(folder)])
        found[name] = error.read_text() if error.exists() else _digest(text.encode())
    return found


def _rows(folder: Path) -> list[str]:
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    kept = [row for row in rows if not str(row.get("name")).startswith("phase")]
    return [json.dumps({k: v for k, v in row.items() if k != "seconds"}) for row in kept]


def _models(folder: Path) -> list[str]:
    """Digests of what is called x in the files of tensors."""
    index = folder / "checkpoints" / "index.json"
    last = json.loads(index.read_text())["last"]["folder"] if index.exists() else ""
    files = sorted([*folder.glob("*.pt"), *(folder / "checkpoints" / last).glob("*.pt")])
    return [_digest(_bytes(x)) for f in files for x in _called_x(torch.load(f, weights_only=True))]


def _called_x(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from [value] if key == "x" else _called_x(value)


def _bytes(tree: Any) -> bytes:
    if isinstance(tree, torch.Tensor):
        return tree.contiguous().numpy().tobytes()
    if isinstance(tree, dict):
        return b"".join(_bytes(value) for value in tree.values())
    if isinstance(tree, list | tuple):
        return b"".join(map(_bytes, tree))
    return str(tree).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def main() -> None:
    """Compare this checkout with another one. The exit code is 1 if a run differs."""
    if sys.argv[1] == "carry-out":
        carry_out(int(sys.argv[2]), Path(sys.argv[3]))
        return
    here = Path(__file__).resolve().parents[2]
    digests = []
    for checkout in (Path(sys.argv[1]).resolve(), here):
        with tempfile.TemporaryDirectory() as out:
            environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
            for processes in (1, 2, 4):
                command = [sys.executable, __file__, "carry-out", str(processes), out]
                command = ["mpirun", "-np", str(processes), *command] if processes > 1 else command
                quiet = subprocess.DEVNULL
                subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=quiet)
            digests.append(results(Path(out)))
    before, now = digests
    for name, digest in before.items():
        if digest != now[name]:
            print(f"{name}: {digest[:200]} before, {now[name][:200]} now")
        elif " " in digest:
            print(f"not compared: {digest[:200]}")
    differing = sum(digest != now[name] for name, digest in before.items())
    print(f"{len(before) - differing} of {len(before)} runs are the same to the bit")
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
