"""Gossip without learning: a sweep of averaging algorithms over grids of settings::

    methods.py       the averaging algorithms by the names of the published experiment
    config.py        the configuration
    data.py          starting matrices
    config_checks.py checks of the configuration
    grids.py         grids of settings, numbers of steps
    sweep.py         the sweep: many settings at once, a row for each measurement

The experiment follows Vogels, Karimireddy & Jaggi (2020), arXiv:2008.01425. gossip_run.py is its
entry point.
"""
