"""The names of the files in the output folder of a run, and of that folder."""

CONFIG_FILE = "config.yaml"
INFO_FILE = "info.json"
FIGURE, SAMPLE = "figure.png", "sample.txt"

CHECKPOINTS, INDEX = "checkpoints", "index.json"

DATE = "{date}"
DATED = f"output/{DATE}"  # a new folder with its date
