#!/bin/sh
# setup.sh [DIRECTORY]: installs the engines of tests/executors: Ray and Dask into a Python environment in DIRECTORY (default
# target/executors), and Debian's or Ubuntu's Slurm where this user may. What cannot be fetched is said, and skipped by the tests.
set -u
root=${1:-$(cd "$(dirname "$0")/../.." && pwd)/target/executors}
mkdir -p "$root"
if ! "$root/bin/python" -c 'import distributed, ray' 2>/dev/null; then
    python3 -m venv "$root" && "$root/bin/python" -m pip install --quiet --disable-pip-version-check --timeout 15 --retries 1 \
        'ray[default]>=2.40,<3' 'dask>=2025' 'distributed>=2025' >"$root/pip.log" 2>&1 || echo "executors: no Ray or Dask: $(tail -n 1 "$root/pip.log")" >&2
fi
if ! command -v slurmctld >/dev/null || ! command -v slurmd >/dev/null || ! command -v munged >/dev/null; then
    "$(dirname "$0")/../apt.sh" install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge >"$root/apt.log" </dev/null 2>&1 ||
        echo "executors: no Slurm: $(tail -n 1 "$root/apt.log")" >&2
fi
exit 0
