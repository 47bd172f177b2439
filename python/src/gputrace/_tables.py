"""A trace as a table: the program writes it, pyarrow or pandas reads it."""
import csv
import os
import subprocess
import tempfile
from typing import Any, Union

from ._installed import GputraceError, program_path
from .usage import without_preload

KINDS = ("arrow", "pandas", "rows")


def load(trace: Union[str, "os.PathLike[str]"], to: str = "arrow") -> Any:
    """Every change of memory in a trace, a row each.

    `to="arrow"` is a `pyarrow.Table`, `to="pandas"` a `pandas.DataFrame`, and `to="rows"` a list of dictionaries of texts,
    which needs no other package. The columns are those of `gputrace export --format parquet` (csv for rows).
    """
    if to not in KINDS:
        raise ValueError(f"to={to!r} is none of {', '.join(KINDS)}")
    if to == "rows":
        with tempfile.TemporaryDirectory(prefix="gputrace-") as folder:
            with open(_export(trace, "csv", folder), newline="", encoding="utf-8") as file:
                return list(csv.DictReader(file))
    try:
        from pyarrow import parquet
    except ImportError:
        if to == "arrow":
            raise GputraceError("pyarrow is not installed: pip install pyarrow, or gputrace.load(trace, to='rows')") from None
        return _by_csv(trace)
    with tempfile.TemporaryDirectory(prefix="gputrace-") as folder:
        # Not mapped: the file goes before the table does.
        table = parquet.read_table(_export(trace, "parquet", folder), memory_map=False)
    return table.to_pandas() if to == "pandas" else table


def _by_csv(trace: Any) -> Any:
    try:
        import pandas
    except ImportError:
        raise GputraceError("pandas is not installed: pip install pandas, or gputrace.load(trace, to='rows')") from None
    with tempfile.TemporaryDirectory(prefix="gputrace-") as folder:
        return pandas.read_csv(_export(trace, "csv", folder))


def _export(trace: Any, kind: str, folder: str) -> str:
    path = os.path.join(folder, f"trace.{kind}")
    command = [program_path(), "export", "--format", kind, "--output", path, os.fspath(trace)]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", env=without_preload())
    if result.returncode != 0:
        raise GputraceError(result.stderr.strip() or f"gputrace export ended with {result.returncode}")
    return path
