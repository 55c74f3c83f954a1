"""A run on disk: configuration, output folder, checkpoints, rows, tables, figures."""
