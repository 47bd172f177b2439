#!/usr/bin/env bash
# On one GPU: does gputrace answer at the failure, know what waited for Python's collector, and tell parameters from gradients?
# usage: answers.sh FOLDER [PYTHON]     the folder of gputrace and libgputrace.so; LAUNCHER may stand before PYTHON (the fake CUDA)
set -u
gputrace=$1/gputrace
python=${2:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$(dirname "$0")" || exit 2
exec "$python" answers.py "$gputrace" "$folder" "$python"
