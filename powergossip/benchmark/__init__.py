"""Methods side by side on fixed tasks, each tuned with the same number of runs::

tasks.py         tasks, and what an entry may tune
entries.py       entries: the library's, and files of users
entry_runs.py    the runs of an entry on a task
data.py          data of the tasks
campaign.py      all runs of an entry, and its results
results.py       files of results
comparison.py    measures of several entries, and pairs of them
verdict.py       the answer in sentences
page.py          tables, figures, the page
command_line.py  powergossip-benchmark
templates/       files that `new` writes
"""
