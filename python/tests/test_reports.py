"""Reports, tables and pictures as objects, of traces whose figures are known."""
import ast
import glob
import inspect
import json
import os
import struct
import zlib

import gputrace
from gputrace._shown import show_bytes, show_time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TRACE = f"{ROOT}/tests/golden/caught-oom.gtr"
JOB = f"{ROOT}/tests/golden/owners"


def test_a_report_is_its_text_with_its_verdict_and_its_figures():
    report = gputrace.report(TRACE)
    text = str(report)
    assert repr(report) == text.rstrip("\n") and text.startswith(f"{TRACE} (pid 1980): python3 train.py\nVerdict: ")
    assert report.verdict.kind == "out_of_memory" and report.verdict.where == "train_step (/job/caught-oom/train.py:20)"
    assert "32.00 MiB" in report.verdict.what and report.verdict.also == ()
    assert str(report.verdict).startswith("Verdict: out of memory: tensors kept by a caught exception\n  what   PyTorch")
    assert report.json["schema"] == "gputrace.report/1"


def test_a_verdict_prints_the_first_line_of_the_report():
    for trace in [TRACE, f"{ROOT}/tests/golden/kept-losses.gtr", f"{ROOT}/tests/golden/empty-cache-loop.gtr"]:
        report = gputrace.report(trace)
        assert str(report).split("\n")[1] == str(report.verdict).split("\n")[0]


def test_tables_of_a_report_have_numbers_as_numbers():
    [device] = gputrace.report(TRACE).tables["devices"]
    assert device["peak_bytes"] == 526649344 and type(device["peak_share"]) is float
    for table in gputrace.report(TRACE).tables.values():
        for row in table:
            for name, value in row.items():
                assert not name.endswith(("_bytes", "_ns")) or value is None or type(value) is int, (name, value)


def test_a_folder_has_a_verdict_for_each_process_and_tables_that_name_it():
    report = gputrace.report(JOB)
    assert len(report.verdicts) == len(report.json["processes"]) == 5
    assert {row["pid"] for row in report.tables["devices"]} == {process["pid"] for process in report.json["processes"]}


def test_rows_have_the_types_that_they_promise():
    rows = gputrace.load(TRACE, to="rows")
    numbers = {name for name, kind in gputrace.Row.__annotations__.items() if "int" in str(kind)}
    assert {"time_ns", "addr", "bytes", "stream"} < numbers and "owner" not in numbers
    for row in rows:
        assert list(row) == list(gputrace.Row.__annotations__)
        for name, value in row.items():
            assert value is None or type(value) is (int if name in numbers else str), (name, value)


def test_rows_are_those_of_the_export_with_nothing_left_out():
    from gputrace._run import said

    exported = [json.loads(line) for line in said("export", "--format", "jsonl", TRACE).split("\n") if line]
    for row, known in zip(gputrace.load(TRACE, to="rows"), exported):
        assert {name for name, value in row.items() if value is not None} == set(known)
        assert row["addr"] == ("addr" in known and int(known["addr"], 16) or None) and row["owner"] == known["owner"]


def test_a_name_of_a_trace_stays_text_in_a_notebook():
    hostile = "<img src=x onerror=alert(1)>\x1b[2J\u202e&"
    for shown in (gputrace.Table([{"owner": hostile}]), gputrace.Rows([{"owner": hostile, "call_site": hostile}])):
        page = shown._repr_html_()
        assert "&lt;img src=x onerror=alert(1)&gt;\\u{1b}[2J\\u{202e}&amp;" in page
        assert "<img" not in page and "\x1b" not in page and "\u202e" not in page
    for field in ("title", "what", "where", "fix"):
        verdict = gputrace.report(TRACE).verdict._replace(**{field: hostile})
        assert "<img" not in verdict._repr_html_() and "&lt;img" in verdict._repr_html_()


def test_a_long_list_of_rows_shows_its_first_and_last():
    rows = gputrace.load(TRACE, to="rows")
    page = rows._repr_html_()
    assert page.count("<tr>") == 22 and f"{len(rows) - 20:,} more rows" in page
    assert page.count(show_time(rows[0]["time_ns"])) and page.count(show_time(rows[-1]["time_ns"]))
    assert show_time(rows[15]["time_ns"]) not in page


def pixels(png):
    """Width, palette and rows of a PNG as `Canvas` writes it."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, parts = 8, {}
    while at < len(png):
        (length,), kind = struct.unpack(">I", png[at : at + 4]), png[at + 4 : at + 8]
        parts[kind] = png[at + 8 : at + 8 + length]
        assert struct.unpack(">I", png[at + 8 + length : at + 12 + length])[0] == zlib.crc32(png[at + 4 : at + 8 + length])
        at += 12 + length
    width, height = struct.unpack(">II", parts[b"IHDR"][:8])
    raw = zlib.decompress(parts[b"IDAT"])
    assert len(raw) == height * (width + 1)
    return [raw[y * (width + 1) + 1 : (y + 1) * (width + 1)] for y in range(height)]


# In the palette of a timeline.
PAPER, INK, GRID, RED, DRIVER, RESERVED, ALLOCATED = range(7)


def test_a_timeline_draws_the_peak_at_full_height_and_each_out_of_memory_error():
    timeline = gputrace.timeline(TRACE)
    assert timeline.peaks == {(1980, 0): 526649344}
    assert repr(timeline).endswith("cuda:0: peak 502.25 MiB at 174.694 ms")
    rows = pixels(timeline.png)
    plot = [row[150:1610] for row in rows[70:360]]
    assert DRIVER in plot[0] and PAPER in plot[0]
    assert all(pixel not in (PAPER, GRID) for pixel in plot[-1])
    assert 2 <= plot[100].count(RED) <= 4
    # After the errors and before the end nothing changes: what the driver had handed out, of that PyTorch's, of that its blocks.
    changes = gputrace.load(TRACE, to="rows")
    start, end = changes[0]["time_ns"], changes[-1]["time_ns"]
    last = [row for row in changes if row["time_ns"] <= start + (end - start) * 0.9][-1]
    column = [row[int(1460 * 0.9)] for row in plot]
    for colours, name in [((4, 5, 6), "device_bytes"), ((5, 6), "torch_reserved_bytes"), ((6,), "torch_allocated_bytes")]:
        drawn = sum(pixel in colours for pixel in column) * 526649344 / 290
        assert abs(drawn - last[name]) <= 526649344 / 290 * 2, (name, drawn, last[name])


def test_a_timeline_has_a_panel_for_each_device_of_each_process(tmp_path):
    timeline = gputrace.timeline(JOB)
    assert len(timeline.peaks) == 5 and repr(timeline).count("\n  pid ") == 5
    timeline.save(tmp_path / "job.png")
    png, size = timeline._repr_png_()
    assert (tmp_path / "job.png").read_bytes() == png and size["height"] * 2 == len(pixels(png))


def test_peaks_are_kept_where_spans_of_time_are_merged():
    from gputrace._pictures import _COLUMNS, _Curve

    curve = _Curve(0)
    for time in range(0, 10**9, 10**6 + 7):
        curve.add(time, (time % 977, 0, 0))
    curve.add(10**9, (5000, 1, 1))
    curve.add(10**9 + 3, (1, 1, 1))
    columns = list(curve.columns(0, curve.end))
    assert len(columns) == _COLUMNS and columns[-1] == (5000, 1, 1)
    assert max(column[0] for column in columns[:-1]) == max(time % 977 for time in range(0, 10**9, 10**6 + 7))


def test_amounts_and_times_are_shown_with_their_units():
    assert [show_bytes(n) for n in (0, 1023, 1536, -1536, 3 << 40)] == ["0 B", "1023 B", "1.50 KiB", "-1.50 KiB", "3.00 TiB"]
    assert [show_time(n) for n in (7, 1500, 1500000, 61 * 10**9)] == ["7 ns", "1.500 µs", "1.500 ms", "61.000 s"]


def test_each_public_name_says_what_it_is():
    for name in gputrace.__all__:
        public = getattr(gputrace, name)
        assert inspect.getdoc(public), name
        for part, value in vars(public).items() if inspect.isclass(public) else ():
            if not part.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                assert inspect.getdoc(value), f"{name}.{part}"


def test_the_sources_are_of_the_oldest_python():
    for path in glob.glob(f"{ROOT}/python/src/gputrace/*.py"):
        with open(path, encoding="utf-8") as file:
            ast.parse(file.read(), path, feature_version=(3, 8))
