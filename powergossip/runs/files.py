"""The names of the files in the output folder of a run, and of that folder, and the keys of a
command."""

CONFIG_FILE = "config.yaml"
INFO_FILE = "info.json"
FIGURE, SAMPLE = "figure.png", "sample.txt"

DATE = "{date}"
DATED = f"output/{DATE}"  # a new folder with its date

# Keys of train.py that change neither the results nor the times of a run, nor its rows.
OF_COMMAND = (
    *("allow_lost_rows", "checkpoint", "checkpoint_interval", "data_dir", "download"),
    *("distributed_init_file", "evaluate_only", "log_verbosity", "overwrite", "rank"),
    *("resume", "tensorboard", "trackers", "worker_timeout"),
)
