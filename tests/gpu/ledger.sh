#!/usr/bin/env bash
# ledger.sh FOLDER [WORK]: holds the ledger against the driver on one GPU; FOLDER has `gputrace` and `libgputrace.so`.
exec python3 "$(dirname "$0")/ledger.py" "$@"
