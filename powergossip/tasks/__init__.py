"""Tasks: data sets, their partition over the workers, models, losses and evaluation.

- registry.py: the tasks by name; task_defaults.py: defaults of train.py's keys that depend on them.
- task.py: the protocol `Task`, and the `TaskOptions` of all tasks.
- named_task.py, dataset_task.py: a task of the user, made of data sets; loading.py: its samples;
  losses.py, sample_values.py: default losses of its data sets, and their labels.
- digits.py, fashion_mnist.py, cifar.py, imagenet.py, language.py: the tasks, a module each.
- images.py, augmentation.py, models.py: image classification, random crops, image models.
- texts.py, language_models.py: texts as word indices, language models.
- text.py, documents.py: language modeling on documents, and their files; tokenizers.py,
  token_files.py: their tokens.
- data_files.py, idx.py: finding, downloading and reading the files of a data set.
- shards.py: the samples of each worker, IID or non-IID.
- option_checks.py, modules.py: options of single tasks, construction of models.

A new task of the library is its module, its row in `TASKS`, and maybe a row in `DEFAULTS`.
"""

from powergossip.tasks.dataset_task import Datasets, DatasetTask
from powergossip.tasks.registry import TASKS, is_in_library, make
from powergossip.tasks.task import Batch, MainMetric, Split, Task, TaskOptions, main_metric
from powergossip.tasks.task_defaults import DEFAULTS, IGNORED, defaults
from powergossip.user_functions import is_name

__all__ = [
    "DEFAULTS",
    "IGNORED",
    "TASKS",
    "Batch",
    "DatasetTask",
    "Datasets",
    "MainMetric",
    "Split",
    "Task",
    "TaskOptions",
    "defaults",
    "is_in_library",
    "is_name",
    "main_metric",
    "make",
]
