"""Communication of runs that go on without some of their processes.

Modules::

    messages.py                          messages of any length that never block
    heartbeats.py, failure_detector.py   evidence that other processes live or are silent
    collectives.py                       agreement of the surviving processes
    worker_messages.py                   messages between workers, which may be late or lost
"""
