#!/bin/sh
# setup.sh [DIRECTORY]: installs the programs that tests hold exports and answers against, into DIRECTORY (default target/consumers): a Python
# environment and a few packages of npm, and the two files of PyTorch that read snapshots. What is there is not fetched again; what cannot be
# fetched is said on stderr, and its test says that it is skipped.
set -u
root=${1:-$(cd "$(dirname "$0")/../.." && pwd)/target/consumers}
mkdir -p "$root" || exit 3
status=0
say() {
    echo "consumers: $*" >&2
    status=3
}

# Several tests ask for the same: one installs, and the others wait for it.
exec 9>"$root/lock"
flock 9

python=$root/bin/python
if ! "$python" -c 'import duckdb, google.protobuf, jsonschema, opentelemetry.proto, pandas, perfetto, prometheus_client, pyarrow' 2>/dev/null; then
    log=$root/pip.log
    if ! python3 -m venv "$root" >"$log" 2>&1; then
        say "no environment of Python: $(tail -n 1 "$log") (Debian: python3-venv)"
    elif ! "$python" -m pip install --quiet --disable-pip-version-check --timeout 15 --retries 1 \
        'duckdb>=1.4,<2' 'jsonschema>=4,<5' 'opentelemetry-proto>=1.30,<2' 'pandas>=2,<4' 'perfetto==0.59.*' 'prometheus_client>=0.20,<1' 'protobuf>=6' 'pyarrow>=20' >"$log" 2>&1; then
        say "no packages of Python: $(tail -n 1 "$log")"
    fi
fi

# By itself: it needs a newer Python than the others.
if ! "$python" -c 'import mcp' 2>/dev/null && ! "$python" -m pip install --quiet --disable-pip-version-check --timeout 15 --retries 1 \
    'mcp>=2,<3' >"$root/mcp.log" 2>&1; then
    say "no client of the Model Context Protocol: $(tail -n 1 "$root/mcp.log")"
fi

if [ ! -d "$root/node_modules/speedscope" ] || [ ! -d "$root/node_modules/pprof-format" ] ||
    [ ! -d "$root/node_modules/@firefox-devtools/profiler-cli" ]; then
    if ! command -v npm >/dev/null; then
        say "no npm, so neither speedscope, pprof-format nor Firefox's profiler-cli"
    elif ! (cd "$root" && npm install --silent --no-audit --no-fund --no-save speedscope@1.25.0 pprof-format@2.3.2 \
        @firefox-devtools/profiler-cli@0.10.0 >npm.log 2>&1); then
        say "no packages of npm: $(tail -n 1 "$root/npm.log")"
    fi
fi

# `go tool pprof` itself: Go's package of Debian and Ubuntu has it as a program of its own, which is taken out and not installed.
if ! command -v go >/dev/null && [ ! -x "$root/pprof" ]; then
    package=$(apt-cache depends golang-go 2>/dev/null | sed -n 's/.*Depends: \(golang-[0-9.]*-go\)$/\1/p' | head -n 1)
    work=$root/go
    mkdir -p "$work"
    if [ -z "$package" ] || ! (cd "$work" && apt-get download "$package" && dpkg -x "$package"_*.deb .) >"$root/go.log" 2>&1 ||
        ! mv "$work"/usr/lib/go-*/pkg/tool/linux_*/pprof "$root/" 2>>"$root/go.log"; then
        say "no Go, so no go tool pprof"
    fi
    rm -rf "$work"
fi

# Prometheus, out of Debian's and Ubuntu's package in the same way: one program, which needs nothing of the rest.
if ! command -v prometheus >/dev/null && [ ! -x "$root/prometheus" ]; then
    work=$root/unpacked
    mkdir -p "$work"
    if ! (cd "$work" && apt-get download prometheus && dpkg -x prometheus_*.deb . && mv usr/bin/prometheus ..) >"$root/prometheus.log" 2>&1; then
        say "no Prometheus: $(tail -n 1 "$root/prometheus.log")"
    fi
    rm -rf "$work"
fi

# Two files of PyTorch. The first is in its wheels, of which only this file is read; the second is in its repository alone.
if [ ! -f "$root/_memory_viz.py" ]; then
    if python3 "$(dirname "$0")/../wheel.py" torch==2.9.1 "$root/wheel" torch/cuda/_memory_viz.py; then
        mv "$root/wheel/torch/cuda/_memory_viz.py" "$root/" && rm -r "$root/wheel"
    else
        say "no torch/cuda/_memory_viz.py"
    fi
fi
if [ ! -f "$root/MemoryViz.js" ]; then
    python3 -c 'import sys, urllib.request
data = urllib.request.urlopen(sys.argv[1], timeout=20).read()
open(sys.argv[2], "wb").write(data)' \
        https://raw.githubusercontent.com/pytorch/pytorch/v2.9.1/torch/utils/viz/MemoryViz.js "$root/MemoryViz.js" 2>/dev/null ||
        say "no MemoryViz.js: GitHub cannot be reached"
fi
exit $status
