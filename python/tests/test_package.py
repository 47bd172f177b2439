"""The package beside the plugin: marks, tables, and where things are."""
import ctypes
import json
import os
import subprocess
import sys

import pytest

import gputrace

MARKS = """
import ctypes, sys, threading
import gputrace

cuda = ctypes.CDLL("libcuda.so.1")
made, address = ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(made), 0) == 0
assert cuda.cuCtxSetCurrent(made) == 0

@gputrace.range("in a function")
def take(n):
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(n)) == 0
    return "taken"

for step in range(2):
    with gputrace.range(f"step {step}"):
        assert take(1 << 20) == "taken"
        gputrace.mark("modèle")
gputrace.mark(7)
"""


def recorded(folder, program, *options):
    trace = str(folder / "a.gtr")
    command = [gputrace.program_path(), "record", "-q", "-o", trace, *options, "--", sys.executable, "-c", program]
    subprocess.run(command, check=True, env=dict(os.environ, PYTHONIOENCODING="utf-8"))
    return trace


def asked(*arguments):
    command = [gputrace.program_path(), *arguments]
    return subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout


def test_ranges_reach_the_trace_without_nvtx(tmp_path):
    trace = recorded(tmp_path, MARKS)
    phases = asked("tree", "--group-by", "phase", "--end", "--min-bytes", "1", trace)
    assert "step > in a function" in phases, phases
    # Ranges that differ by a number are steps: the second begins with what the first took.
    assert "held 2.00 MiB" in asked("tree", "--step", "1", trace)


def test_each_mark_is_an_event(tmp_path):
    def events(text):
        (tmp_path / "a.gtr").unlink(missing_ok=True)
        return json.loads(asked("summary", "--json", recorded(tmp_path, MARKS + text)))["processes"][0]["events"]

    assert events("for _ in range(3): gputrace.mark('modèle')") == events("") + 3


def test_marks_without_a_recording_do_nothing():
    subprocess.run([sys.executable, "-c", "import gputrace\nwith gputrace.range('a'): gputrace.mark('b')"], check=True)


def test_a_trace_is_rows_or_a_table(tmp_path):
    trace = recorded(tmp_path, MARKS)
    rows = gputrace.load(trace, to="rows")
    taken = [row for row in rows if row["action"] == "alloc" and row["bytes"] == 1 << 20]
    assert len(taken) == 2
    with pytest.raises(ValueError, match="one of 'arrow', 'pandas', 'rows', not 'polars'"):
        gputrace.load(trace, to="polars")
    with pytest.raises(gputrace.GputraceError, match="^cannot read no-such"):
        gputrace.load("no-such.gtr", to="rows")
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        with pytest.raises(gputrace.GputraceError, match="pip install pyarrow"):
            gputrace.load(trace)
    else:
        table = gputrace.load(trace)
        assert table.num_rows == len(rows) and sum(n == 1 << 20 for n in table["bytes"].to_pylist()) == 2


def test_the_module_is_the_program():
    said = subprocess.run([sys.executable, "-m", "gputrace", "--version"], check=True, capture_output=True, text=True)
    assert said.stdout == f"gputrace {gputrace.__version__}\n"
    assert ctypes.CDLL(gputrace.library_path()).InitializeInjectionNvtx2
