"""Many runs, each carried out once::

runner.py     runs, experiments of several stages, and their folders
launchers.py  runs on this machine, or as Slurm jobs
jobs.py       what launchers have in common
guard.py      a process between a launcher and its command
"""
