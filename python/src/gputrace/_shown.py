"""How amounts, names and tables are shown, in text and in notebooks.

Names come from recorded programs and may be hostile: nothing of them reaches a page but as text.
"""
import html
import unicodedata
from typing import Any, Iterable, List, Mapping


def show_bytes(amount: float) -> str:
    """1536 is `1.50 KiB`."""
    if abs(amount) < 1024:
        return f"{amount} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        amount /= 1024
        if abs(amount) < 1024:
            break
    return f"{amount:.2f} {unit}"


def show_time(nanoseconds: float) -> str:
    """1500000 is `1.500 ms`."""
    for unit, size in (("s", 10**9), ("ms", 10**6), ("µs", 10**3)):
        if abs(nanoseconds) >= size:
            return f"{nanoseconds / size:.3f} {unit}"
    return f"{nanoseconds} ns"


def printable(name: object) -> str:
    """A name as part of a line: what a terminal would obey, or draws nothing for, is spelled out, as gputrace itself does."""
    obeyed = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join(f"\\u{{{ord(c):x}}}" if unicodedata.category(c) in obeyed else c for c in str(name))


def text(value: object) -> str:
    """A name or a sentence as HTML."""
    return html.escape(printable(value))


def table(names: List[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as HTML without scripts or styles of their own, which renderers would remove."""
    head = "".join(f"<th>{text(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(_cell(name, row.get(name)) for name in names) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(name: str, value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f'<td align="right">{_number(name, value)}</td>'
    return f'<td align="left">{"" if value is None else text(value)}</td>'


def _number(name: str, value: float) -> str:
    """By the unit that ends the name (docs/JSON.md)."""
    if name == "bytes" or name.endswith("_bytes") or name.startswith("bytes_"):
        return show_bytes(value)
    if name.endswith("_ns"):
        return show_time(value)
    if name in ("addr", "stream"):
        return f"{value:#x}"
    if "share" in name.split("_"):
        return f"{value:.1%}"
    return str(value)
