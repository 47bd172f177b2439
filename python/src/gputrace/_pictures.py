"""Memory over time as a picture for notebooks.

A PNG, because every renderer of notebooks shows one: Jupyter also before a notebook is trusted, VS Code, nbconvert and GitHub, all without
a network. Some of them remove frames and scripts, which the page of `gputrace html` needs, and change SVG.
"""
import json
import os
from typing import Dict, Iterator, List, Tuple

from ._canvas import Canvas
from ._run import PathLike, lines
from ._shown import show_bytes, show_time

# Of memory that others hold, PyTorch's cache, and PyTorch's blocks. Each holds the next.
_SERIES = ("device_bytes", "torch_reserved_bytes", "torch_allocated_bytes")
_LEGEND = ("driver memory", "reserved by PyTorch", "allocated by PyTorch")
_COLOURS = ((0xB8, 0xC4, 0xD4), (0x86, 0xB6, 0xE8), (0x1F, 0x6F, 0xBF))
_PAPER, _INK, _GRID, _BAD = (0xFF, 0xFF, 0xFF), (0x33, 0x33, 0x33), (0xDD, 0xDD, 0xDD), (0xC6, 0x28, 0x28)
# In pixels of the picture, of which two are one of the page.
_WIDTH, _PANEL, _LEFT, _RIGHT, _TOP, _BOTTOM = 1640, 360, 150, 30, 40, 40
_COLUMNS = _WIDTH - _LEFT - _RIGHT
_MOST_PANELS = 8

Amounts = Tuple[int, int, int]


class Timeline:
    """Memory over time, a panel for each device of each process. `.png` is the file; a notebook shows it."""

    def __init__(self, trace: PathLike) -> None:
        self.trace = os.fspath(trace)
        curves = _curves(self.trace)
        #: The highest amount of each panel in bytes, by (pid, device).
        self.peaks: Dict[Tuple[int, int], int] = {key: curve.peak[0] for key, curve in curves.items()}
        highest = sorted(curves.items(), key=lambda item: -item[1].peak[0])[:_MOST_PANELS]
        with_pid = len({pid for pid, _ in curves}) > 1
        panels = [(f"pid {pid} cuda:{device}" if with_pid else f"cuda:{device}", curve) for (pid, device), curve in sorted(highest)]
        #: The picture, as a PNG file.
        self.png: bytes = _drawn(panels, len(curves) - len(panels))
        self._size = (_WIDTH // 2, _height(len(panels)) // 2)
        self._lines = [f"{title}: peak {show_bytes(curve.peak[0])} at {show_time(curve.peak[1])}" for title, curve in panels]

    def save(self, path: PathLike) -> None:
        """Writes the PNG file."""
        with open(path, "wb") as file:
            file.write(self.png)

    def __repr__(self) -> str:
        return "\n".join([f"memory over time of {self.trace}", *("  " + line for line in self._lines)])

    def _repr_png_(self) -> Tuple[bytes, Dict[str, int]]:
        return self.png, dict(zip(("width", "height"), self._size))


def timeline(trace: PathLike) -> Timeline:
    """Memory over time of a trace, a PyTorch snapshot, or a folder of them, as a picture.

    Light blue is what PyTorch reserved, dark blue what it had allocated of that, grey what the driver had handed out in all. Red lines
    are PyTorch's out-of-memory errors. Each column of pixels shows the most that was held in its time, so peaks are exact.
    """
    return Timeline(trace)


class _Curve:
    """The highest amounts in each of so many spans of time, which grow as time goes on."""

    def __init__(self, start: int) -> None:
        self.start, self.end, self.span = start, start, 1
        self.spans: Dict[int, Amounts] = {}
        self.lasts: Dict[int, Amounts] = {}
        self.errors: List[int] = []
        self.peak = (0, start)

    def add(self, time: int, amounts: Amounts) -> None:
        self.end = max(self.end, time)
        if max(amounts) > self.peak[0]:
            self.peak = (max(amounts), time)
        while (self.end - self.start) // self.span >= 4 * _COLUMNS:
            self._widen()
        at = (time - self.start) // self.span
        self.spans[at] = _higher(self.spans.get(at, amounts), amounts)
        self.lasts[at] = amounts

    def _widen(self) -> None:
        spans, lasts, self.span = self.spans, self.lasts, self.span * 2
        self.spans, self.lasts = {}, {}
        for at in sorted(spans):
            self.spans[at // 2] = _higher(self.spans.get(at // 2, spans[at]), spans[at])
            self.lasts[at // 2] = lasts[at]

    def columns(self, start: int, end: int) -> Iterator[Amounts]:
        """The highest amounts in each column of pixels, which begins with what was held before it."""
        length, held, at = max(end - start, 1), (0, 0, 0), 0
        known = sorted(self.spans)
        for column in range(_COLUMNS):
            until, highest = start + length * (column + 1) // _COLUMNS, held
            while at < len(known) and (self.start + known[at] * self.span < until or column == _COLUMNS - 1):
                highest, held = _higher(highest, self.spans[known[at]]), self.lasts[known[at]]
                at += 1
            yield highest


def _higher(one: Amounts, other: Amounts) -> Amounts:
    return max(one[0], other[0]), max(one[1], other[1]), max(one[2], other[2])


def _curves(trace: str) -> Dict[Tuple[int, int], _Curve]:
    """By process and device."""
    curves: Dict[Tuple[int, int], _Curve] = {}
    for line in lines("export", "--format", "jsonl", trace):
        row = json.loads(line)
        if row["device"] < 0:
            continue
        key, time = (row["pid"], row["device"]), row["time_ns"]
        curve = curves.get(key) or curves.setdefault(key, _Curve(time))
        driver, reserved, allocated = (row.get(name, 0) for name in _SERIES)
        curve.add(time, (driver, reserved, allocated))
        if row["action"] == "oom":
            curve.errors.append(time)
    return curves


def _height(n_panels: int) -> int:
    return _TOP + max(n_panels, 1) * _PANEL


def _drawn(panels: List[Tuple[str, _Curve]], n_left_out: int) -> bytes:
    canvas = Canvas(_WIDTH, _height(len(panels)), [_PAPER, _INK, _GRID, _BAD, *_COLOURS])
    x = _LEFT
    for colour, name in enumerate(_LEGEND, start=4):
        canvas.fill(x, 12, x + 14, 26, colour)
        x = canvas.write(x + 22, 12, name, 1) + 40
    if n_left_out:
        canvas.write(x, 12, f"{n_left_out} more with lower peaks", 1)
    if not panels:
        canvas.write(_LEFT, _TOP + 20, "no memory of a device", 1)
        return canvas.png()
    start = min(curve.start for _, curve in panels)
    end = max(curve.end for _, curve in panels)
    for number, (title, curve) in enumerate(panels):
        _panel(canvas, _TOP + number * _PANEL, title, curve, start, end)
    return canvas.png()


def _panel(canvas: Canvas, top: int, title: str, curve: _Curve, start: int, end: int) -> None:
    floor, ceiling = top + _PANEL - _BOTTOM, top + 30
    most = max(curve.peak[0], 1)

    def y(amount: float) -> int:
        return floor - int((floor - ceiling) * amount / most)

    for amount in range(0, most + 1, _step(most, 1024)):
        canvas.fill(_LEFT, y(amount), _WIDTH - _RIGHT, y(amount) + 1, 2)
        canvas.write_before(_LEFT - 12, y(amount) - 7, _round(show_bytes(amount)), 1)
    for column, amounts in enumerate(curve.columns(start, end)):
        for colour, amount in enumerate(amounts, start=4):
            if amount:
                canvas.fill(_LEFT + column, y(amount), _LEFT + column + 1, floor, colour)
    for time in curve.errors:
        column = _LEFT + min(_COLUMNS - 2, (time - start) * _COLUMNS // max(end - start, 1))
        canvas.fill(column, ceiling, column + 2, floor, 3)
    canvas.fill(_LEFT, floor, _WIDTH - _RIGHT, floor + 2, 1)
    step = _step(end - start, 1000)
    for moment in range(-(-start // step) * step, end + 1, step):
        column = _LEFT + (moment - start) * _COLUMNS // max(end - start, 1)
        canvas.fill(column, floor, column + 2, floor + 8, 1)
        label = _round(show_time(moment))
        canvas.write_before(min(column + canvas.width_of(label) // 2, _WIDTH), floor + 14, label, 1)
    canvas.write(_LEFT, top + 8, f"{title}: peak {show_bytes(curve.peak[0])} at {show_time(curve.peak[1])}", 1)


def _step(most: int, base: int) -> int:
    """An even number that is two to five times in another, in units of a power of `base`."""
    unit = 1
    while unit * base <= most:
        unit *= base
    return next((unit * step for n in (1, 10, 100) for step in (n, 2 * n, 5 * n) if most < 5 * unit * step), unit * 1000)


def _round(amount: str) -> str:
    number, unit = amount.split(" ")
    return f"{float(number):g} {unit}"
