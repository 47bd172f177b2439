"""gputrace for Python: where the program and its library are, marks in a trace, and traces as reports, tables and pictures.

    with gputrace.range("step 3"):          # a range of the program in the trace, without NVTX
        ...
    gputrace.report("train.gtr")            # the report; .verdict, .json and .tables
    gputrace.timeline("train.gtr")          # memory over time, a picture in notebooks
    table = gputrace.load("train.gtr")      # every change of memory, one row per change: pyarrow, or to="pandas"

Limits on GPU memory in tests: `gputrace.pytest_plugin`.
"""
from ._installed import GputraceError, library_path, program_path
from ._marks import mark, range
from ._pictures import Timeline, timeline
from ._reports import Report, Table, Verdict, report
from ._tables import Row, Rows, load

__all__ = [
    "GputraceError", "Report", "Row", "Rows", "Table", "Timeline", "Verdict", "library_path", "load", "mark", "program_path", "range",
    "report", "timeline",
]
__version__ = "0.1.0"
