#!/usr/bin/env bash
# Checks the benchmark's results that were added since a commit, repeats their quick tier and the tasks
# of RECORDS.md, and prints the tables: those of the pull request, and those of the repetition.
#
#     bash environment/rerun_submissions.sh origin/main
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source .venv/bin/activate
mapfile -t files < <(git diff --name-only --diff-filter=AM "$1...HEAD" -- 'powergossip/benchmark/submissions/*.json')
for file in "${files[@]}"; do
    name=$(basename "$file" .json)
    powergossip-benchmark check "$file"
    printf '# %s\n\n```\n' "$name"
    powergossip-benchmark show "$name" --folder output/none
    printf '```\n\n# %s, again\n\n```\n' "$name"
    powergossip-benchmark run "$file" 1>&2
    tracks=$(jq -r '.tiers.full // {} | keys[] | select(IN("fashion_mnist_sorted", "text_same")) | "--task", .' "$file")
    # shellcheck disable=SC2086
    if [ -n "$tracks" ]; then powergossip-benchmark run "$file" --tier full $tracks 1>&2; fi
    powergossip-benchmark show "$name"
    powergossip-benchmark check "$file"  # also against the repetition
    printf '```\n\n'
done
