#!/usr/bin/env bash
# stacks.sh FOLDER [GROUNDTRUTH.py]: what stacks cost, and what they name, on a machine with a GPU and PyTorch. See stacks.py.
exec python3 "$(dirname "$0")/stacks.py" "$@"
