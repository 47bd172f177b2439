"""gputrace for Python: where the program and its library are, marks in a trace, and traces as tables.

    with gputrace.range("step 3"):          # a range of the program in the trace, without NVTX
        ...
    table = gputrace.load("train.gtr")      # every change of memory, a row each: pyarrow, or to="pandas"

Limits on GPU memory in tests: `gputrace.pytest_plugin`.
"""
from ._installed import GputraceError, library_path, program_path
from ._marks import mark, range
from ._tables import load

__all__ = ["GputraceError", "library_path", "load", "mark", "program_path", "range"]
__version__ = "0.1.0"
