"""The defaults of train.py's keys that depend on the task, and the keys that it ignores."""

from collections.abc import Mapping
from typing import Any

from powergossip.tasks import cifar, fashion_mnist, imagenet, language, named_task, text
from powergossip.tasks.registry import check_name
from powergossip.user_functions import is_name

# The defaults of these keys for any task, and the different ones of single tasks.
GENERAL_DEFAULTS: Mapping[str, Any] = {
    "task_architecture": "CNN",
    "batch_size": 16,
    "num_epochs": 40,
    "learning_rate": 0.02,
    "lr_schedule_milestones": [[30.0, 0.1]],
    "momentum": 0.9,
    "weight_decay": 0.0001,
    "gradient_clipping": None,
}
DEFAULTS: dict[str, Mapping[str, Any]] = {
    "Digits": {},
    "FashionMNIST": fashion_mnist.DEFAULTS,
    "Cifar": cifar.DEFAULTS,
    "Cifar100": cifar.DEFAULTS,
    "ImageNet": imagenet.DEFAULTS,
    "LSTM": language.DEFAULTS,
    "Text": text.DEFAULTS,
}
# The keys of train.py that have no effect on a task, by task.
IGNORED: dict[str, tuple[str, ...]] = {"LSTM": ("reshuffle_data", "use_decentralized_data")}


def defaults(name: str) -> dict[str, Any]:
    """Key of train.py → its default for a task.

    For a user's task, task_architecture is None: the task's first architecture.

    Raises:
        ValueError: For an unknown name.
    """
    if is_name(name):
        given = named_task.defaults(name, GENERAL_DEFAULTS)
        return {**GENERAL_DEFAULTS, "task_architecture": None, **given}
    check_name(name)
    return {**GENERAL_DEFAULTS, **DEFAULTS.get(name, {})}
