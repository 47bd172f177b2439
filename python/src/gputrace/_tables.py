"""A trace as a table: the program writes it, and this module, pyarrow or pandas reads it."""
import json
import os
import tempfile
from typing import TYPE_CHECKING, Any, List, Literal, Optional, TypedDict, Union, overload

from ._installed import GputraceError
from ._run import PathLike, lines, said
from ._shown import table as shown_table

if TYPE_CHECKING:
    import pandas
    import pyarrow

KINDS = ("arrow", "pandas", "rows")
# Texts in JSON, where numbers above 2^53 do not survive every reader.
_ADDRESSES = ("addr", "stream")


class Row(TypedDict):
    """One change of memory. `None`: not known, or not of this kind of memory."""

    time_ns: int
    rank: Optional[int]
    pid: int
    tid: Optional[int]
    action: str
    device: int
    kind: str
    addr: Optional[int]
    bytes: int
    requested_bytes: Optional[int]
    stream: Optional[int]
    owner: Optional[str]
    call_site: Optional[str]
    stack: Optional[int]
    device_bytes: Optional[int]
    torch_allocated_bytes: Optional[int]
    torch_reserved_bytes: Optional[int]


class Rows(List[Row]):
    """A list of `Row`, which a notebook shows as a table: the first and the last rows."""

    _SHOWN = 20

    def _repr_html_(self) -> str:
        names = list(Row.__annotations__)
        if len(self) <= self._SHOWN:
            return shown_table(names, self)
        half = self._SHOWN // 2
        between = f"… {len(self) - 2 * half:,} more rows …"
        return shown_table(names, self[:half]) + f"<p>{between}</p>" + shown_table(names, self[-half:])


@overload
def load(trace: PathLike, to: Literal["arrow"] = "arrow") -> "pyarrow.Table": ...
@overload
def load(trace: PathLike, to: Literal["pandas"]) -> "pandas.DataFrame": ...
@overload
def load(trace: PathLike, to: Literal["rows"]) -> Rows: ...
def load(trace: PathLike, to: str = "arrow") -> Union["pyarrow.Table", "pandas.DataFrame", Rows]:
    """Every change of memory in a trace, one row per change.

    `to="arrow"` is a `pyarrow.Table`, `to="pandas"` a `pandas.DataFrame`, and `to="rows"` a list of dictionaries (`Row`), which
    needs no other package. The columns are those of `gputrace export --format parquet`; rows lack `frames`. Numbers are integers in
    all three, addresses too, and what is not known is null: `pandas.NA` in pandas' own integer types, `None` in rows.
    """
    if to not in KINDS:
        raise ValueError(f"to must be one of {', '.join(map(repr, KINDS))}, not {to!r}")
    if to == "rows":
        return _rows(trace)
    try:
        from pyarrow import parquet
    except ImportError:
        if to == "arrow":
            raise GputraceError("pyarrow is not installed: pip install pyarrow, or gputrace.load(trace, to='rows')") from None
        return _without_pyarrow(trace)
    with tempfile.TemporaryDirectory(prefix="gputrace-") as folder:
        path = os.path.join(folder, "trace.parquet")
        said("export", "--format", "parquet", "--output", path, os.fspath(trace))
        # Not mapped: the file goes before the table does.
        table = parquet.read_table(path, memory_map=False)
    return table.to_pandas(types_mapper=_pandas_type) if to == "pandas" else table


def _rows(trace: PathLike) -> Rows:
    unknown: Any = dict.fromkeys(Row.__annotations__)
    rows = Rows()
    for line in lines("export", "--format", "jsonl", os.fspath(trace)):
        row: Any = {**unknown, **json.loads(line)}
        for name in _ADDRESSES:
            if row[name] is not None:
                row[name] = int(row[name], 16)
        rows.append(row)
    return rows


def _pandas_type(column: "pyarrow.DataType") -> Any:
    """pandas' integers that can be missing. Its others would make floats of a column in which one is."""
    import pandas

    return {"int64": pandas.Int64Dtype(), "uint64": pandas.UInt64Dtype()}.get(str(column))


def _without_pyarrow(trace: PathLike) -> "pandas.DataFrame":
    try:
        import pandas
    except ImportError:
        raise GputraceError("pandas is not installed: pip install pandas, or gputrace.load(trace, to='rows')") from None
    rows = _rows(trace)

    def column(name: str, kind: Any) -> Any:
        values = [row[name] for row in rows]  # type: ignore[literal-required]
        if kind not in (int, Optional[int]):
            return pandas.Series(values, dtype="object")
        return pandas.Series(values, dtype="UInt64" if name in _ADDRESSES else "Int64")

    return pandas.DataFrame({name: column(name, kind) for name, kind in Row.__annotations__.items()})
