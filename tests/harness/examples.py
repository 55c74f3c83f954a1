"""The training loops of examples/, and their output."""

from dataclasses import dataclass

PROCESSES = 4
MEAN_MODEL = r"accuracy of the mean model: (\d+\.\d)%"


@dataclass
class Shown:
    """The output of an example, printed once."""

    together: str  # pattern in the output of PROCESSES
    accuracy: str = MEAN_MODEL  # pattern with one group: % of the final model
    alone: str = r"^sent by each worker: 0\.0 kB$"  # pattern in the output of one process
    least: float = 90.0  # %
    slow: bool = True  # the run of PROCESSES
    launcher: str = "mpirun"
    needs: str | None = None  # a package of the extra `trainers`


# 20 · 11 steps: 2 · 4 · 220 · (64 + 128 + 128 + 10 + 128 + 10)
OF_A_TRAINER = r"^sent by each worker: 823\.7 kB$"


EXAMPLES = {
    "accelerate_loop.py": Shown(OF_A_TRAINER, launcher="torchrun", needs="accelerate"),
    "huggingface_trainer.py": Shown(OF_A_TRAINER, launcher="torchrun", needs="transformers"),
    "lightning_trainer.py": Shown(OF_A_TRAINER, needs="lightning"),
    "compressed_gradients.py": Shown(
        accuracy=r"accuracy: (\d+\.\d)%",
        # 240 steps of all-reduces, 2 · 3/4 · 4 bytes per element: 2 · (rows + columns) of each
        # matrix, and all biases: 240 · 1.5 · 4 · (2 · (192 + 256 + 138) + 266)
        together=r"^sent by each worker: 2070\.7 kB$",
    ),
    "gossip.py": Shown(
        # 240 steps, two neighbors, 4 bytes per element: both sides of each matrix, and all biases:
        # 2 · 4 · 240 · (64 + 128 + 128 + 128 + 128 + 10 + 128 + 128 + 10), and a merge of
        # 2 · 3/4 · 4 · 26,122
        together=r"^sent by each worker: 1792\.6 kB$",
        slow=False,
    ),
    "gpt.py": Shown(
        # 8 rounds, two neighbors, 4 bytes per element: each side of each matrix four times, and all
        # vectors: 8 · 2 · 4 · (4 · (256 + 64 + 3 · 2 · (4 · 64 + 256 + 64)) + 7 · 64). And a merge
        # of 2 · 3/4 · 4 · 164,288
        together=r"^sent by each worker: 1981\.1 kB$",
        least=40.0,
    ),
    "ddp_hook.py": Shown(
        together=r"^sent by each worker: 1635\.8 kB$",  # as gossip.py before its merge
    ),
    "plain_loop.py": Shown(
        # 20 · 11 steps: 2 · 4 · 220 · (64 + 128 + 128 + 10 + 128 + 128 + 128 + 10)
        together=r"^sent by each worker: 1274\.2 kB$",
    ),
}
