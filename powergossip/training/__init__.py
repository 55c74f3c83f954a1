"""Training runs: the Trainer, settings, local optimizers, evaluation, measurements.

Modules::

    trainer.py            Trainer: a training run from a checked configuration
    config_checks.py      accepted values of the keys, and options of the chosen method
    resuming.py           conditions for resuming a run
    local_optimizers.py   SGD, AdamW and Muon over the flat buffer
    muon.py               Muon for hidden matrices, AdamW for all other parameters
    schedule.py           learning rate of a step
    late_message_checks.py  accepted configurations with late messages or lost workers
    asynchronous/         training by exchanges of edges: in processes, or on the virtual clock
    recorder.py           the output folder of a run: rows, checkpoints, table and figure
    evaluation.py         metrics of the workers' models and of their mean
    measurements.py       rows for the hooks, divergence
"""
