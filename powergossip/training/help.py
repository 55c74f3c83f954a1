"""The text of `train.py --help`: the main keys, a method's keys, or every key."""

import difflib
import re

from omegaconf import DictConfig

from powergossip import presets
from powergossip.errors import BadInput
from powergossip.runs.key_help import Groups, described, every_key, key_groups, keys_about
from powergossip.training import method_keys

MAIN = (
    "n_workers",
    "seed",
    "task",
    "num_epochs",
    "learning_rate",
    "use_decentralized_data",
    "decentralized_data_dirichlet_alpha",
    "optimizer",
    "topology",
    "learning",
)
EXAMPLES = """examples:
  mpirun -np 8 python train.py                     eight processes, one worker each
  torchrun --nproc-per-node 8 train.py             the same without MPI
  python train.py n_workers=8 optimizer=choco      one process hosts all eight workers
  python train.py n_workers=8 task=FashionMNIST use_decentralized_data=true
  python train.py n_workers=8 --config cifar10_resnet20/power-gossip
  python train.py --output-dir output/mine resume=true

"""
MORE = """
more:
  --help choco      the keys of a method, a learning rule, a compressor, or a task
  --help learning   the meaning of a key, or the keys with a word
  --help presets    the names of all presets
  --help all        every key"""


def text(config: DictConfig, name: str) -> str:
    """Return the help about a method, task, key, preset or word. "": the main keys. "all": all.

    Raises:
        BadInput: For a name that occurs nowhere.
    """
    if name == "all":
        return f"{every_key(config)}\n\n{method_keys.task_defaults()}"
    if name == "presets":
        return "\n".join(presets.names())
    if not name:
        keys = {key: entry for group in key_groups(config).values() for key, entry in group.items()}
        bases = " ".join(sorted({preset.partition("/")[0] for preset in presets.names()}))
        main = described({"ten keys with their defaults": {key: keys[key] for key in MAIN}}, 30)
        return f"{EXAMPLES}{main}\n\npresets, most of them with a /METHOD:\n  {bases}\n{MORE}"
    about = name.partition("=")[2] or name
    found = _of_method(about) or "\n\n".join(
        filter(None, [keys_about(config, about), *_of_task(about)])
    )
    if not found:
        known = [*method_keys.summaries(), *map(str, config)]
        close = difflib.get_close_matches(about, known, 3)
        hint = f"did you mean {' or '.join(close)}?" if close else "use --help all"
        raise BadInput(f"--help {name}: there is no such name; {hint}")
    return found


def _of_method(name: str) -> str:
    """The keys of a method or compressor."""
    groups: Groups = {}
    for title, own in method_keys.methods().items():
        if title.partition("=")[2] == name:
            entries = {key: (option.default, option.text) for key, option in own.items()}
            groups[f"{title} ({method_keys.summaries()[name].rstrip('.')})"] = entries
    return described(groups)


def _of_task(name: str) -> list[str]:
    """The defaults of the task of this name, if there is one."""
    lines = re.split(r"\n  (?! )", method_keys.task_defaults())
    return [f"defaults:\n  {line}" for line in lines if line.startswith(f"{name}:")]
