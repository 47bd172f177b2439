"""Fails tests that take more GPU memory than they may, or do not give it back.

    @pytest.mark.limit_gpu_memory("2 GiB")
    @pytest.mark.limit_gpu_leaks("1 MiB")

A test with a limit runs in a process of its own:

    pytest ── gputrace record -- python -m pytest (the same arguments) ──> reports, begin and end of the test, trace
       └── figures of the trace between begin and end ──> passes the reports on, or fails the test

The other tests see nothing of it: here the test takes its turn, without running, as one that was skipped does.
"""
import ctypes
import gc
import glob
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any, Counter, Dict, Iterator, List, Optional, Tuple, Union, cast

import pytest
from _pytest.runner import runtestprotocol

from ._installed import GputraceError, program_path
from ._run import without_preload
from ._shown import printable, show_bytes
from .usage import Place, Usage, parse_bytes

Limits = Dict[str, int]

# Names the file for the child's results, and the test, in the child only.
CHILD = "GPUTRACE_PYTEST_CHILD"
CHILD_TEST = "GPUTRACE_PYTEST_TEST"
MARKERS = {
    "limit_gpu_memory": "limit_gpu_memory(limit): fail if a process of the test holds more on one GPU",
    "limit_gpu_leaks": "limit_gpu_leaks(limit, warmups=1): fail if the test does not give back more than this",
}
N_PLACES = 5
SWITCH = "GPUTRACE"
# With one of these, the library does nothing, or waits for `gputrace attach` (shim/src/config.rs).
DISABLES = {"0", "off", "false", "no"}
DORMANT = "dormant"
# What the session wants of its own recordings. The test's has to be there, and whole.
NOT_FOR_THE_CHILD = {SWITCH, "GPUTRACE_KEEP", "GPUTRACE_MAX_SIZE"}
# Devices of which the driver is asked; no machine has as many.
MOST_DEVICES = 64
# Options that are about the session, which the child is not: what they are there.
OF_THE_SESSION = {
    "cacheclear": False,
    "collectonly": False,
    "failedfirst": False,
    "htmlpath": None,
    "json_report": False,
    "lf": False,
    "maxfail": 0,
    "newfirst": False,
    "pastebin": None,
    "report_log": None,
    "stepwise": False,
    "usepdb": False,
    "xmlpath": None,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--gpu-memory-top` and `--gpu-traces`."""
    group = parser.getgroup("gputrace", "limits on GPU memory")
    group.addoption(
        "--gpu-memory-top", type=int, default=10, metavar="N", help="peaks of so many tests at the end; 0 for none (default: 10)"
    )
    group.addoption(
        "--gpu-traces", metavar="DIR", help="keep traces of failed tests with a limit here (default: in the cache of pytest)"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Registers the markers; in the child, leaves the session's own options out."""
    for line in MARKERS.values():
        config.addinivalue_line("markers", line)
    if CHILD in os.environ:
        for option, value in OF_THE_SESSION.items():
            if hasattr(config.option, option):
                setattr(config.option, option, value)
        config.args = [os.environ[CHILD_TEST]]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: Optional[pytest.Item]) -> Optional[bool]:
    """Runs a test with a limit in a process of its own; the others run as ever."""
    if not any(item.get_closest_marker(name) for name in MARKERS):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = measured(item) if CHILD in os.environ else [*limited(item), *torn_down(item, nextitem)]
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The table at the end: what each test held."""
    top = config.getoption("gpu_memory_top")
    rows = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            properties = dict(getattr(report, "user_properties", ()))
            if getattr(report, "when", None) == "call" and "gpu_memory_peak" in properties:
                rows.append((properties["gpu_memory_peak"], properties.get("gpu_memory_leaked"), report.nodeid))
    if not rows or top <= 0:
        return
    terminalreporter.section("GPU memory of tests with a limit")
    terminalreporter.write_line(f"{'peak':>11}  {'not returned':>12}  test")
    for peak, leaked, nodeid in sorted(rows, key=lambda row: (-row[0], row[2]))[:top]:
        shown = "" if leaked is None else show_bytes(leaked)
        terminalreporter.write_line(f"{show_bytes(peak):>11}  {shown:>12}  {printable(nodeid)}")
    if len(rows) > top:
        terminalreporter.write_line(f"and {len(rows) - top} more (--gpu-memory-top)")


def measured(item: pytest.Item) -> List[pytest.TestReport]:
    """In the child: runs the test, and notes when it began and ended."""
    for _ in range(limits(item).get("warmups", 0)):
        # The parent for the next item: fixtures of the module and beyond stay, those of the test go.
        reports = runtestprotocol(item, nextitem=cast(Optional[pytest.Item], item.parent), log=False)
        if any(report.failed for report in reports):
            break
    gc.collect()
    begin = time.monotonic_ns()
    reports = runtestprotocol(item, nextitem=None, log=False)
    gc.collect()
    end = time.monotonic_ns()
    measurable = {"pid": os.getpid(), "switch": os.environ.get(SWITCH, ""), "has_context": has_context()}
    serialized = [item.config.hook.pytest_report_to_serializable(config=item.config, report=report) for report in reports]
    with open(os.environ[CHILD], "w") as results:
        json.dump({"begin": begin, "end": end, "reports": serialized, **measurable}, results)
    return reports


def has_context() -> bool:
    """Whether this process has a CUDA context: then it has a trace, unless something kept it from being recorded."""
    try:
        # Only if the process has loaded it already.
        cuda = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        current, flags, active = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_int()
        if cuda.cuCtxGetCurrent(ctypes.byref(current)) == 0 and current.value:
            return True
        for device in range(MOST_DEVICES):
            if cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) != 0:
                return False
            if active.value:
                return True
    except (OSError, AttributeError):
        pass
    return False


def unmeasured(results: Dict[str, Any], traces: List[str]) -> Optional[str]:
    """Why the test's process has no trace although it needs one. A process that does not use CUDA needs none."""
    if any(os.path.basename(trace).startswith(f"{results['pid']}.") for trace in traces):
        return None
    switch = results["switch"]
    if switch in DISABLES:
        return f"nothing was measured: {SWITCH}={switch} disables gputrace"
    if switch == DORMANT:
        return f"nothing was measured: with {SWITCH}={switch}, gputrace records only after `gputrace attach`"
    if results["has_context"]:
        return f"nothing was measured: process {results['pid']} used CUDA, but gputrace did not record it; run `gputrace doctor`"
    return None


def torn_down(item: pytest.Item, nextitem: Optional[pytest.Item]) -> List[pytest.TestReport]:
    """Takes down what the tests before this one left for it, and the next does not need. Nothing, or what failed."""
    teardown = pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(nextitem), when="teardown")
    if teardown.excinfo is None:
        return []
    return [item.ihook.pytest_runtest_makereport(item=item, call=teardown)]


def limited(item: pytest.Item) -> List[pytest.TestReport]:
    """In the parent: has a child run the test, and looks at its trace."""
    try:
        allowed = limits(item)
        with tempfile.TemporaryDirectory(prefix="gputrace-") as folder:
            results = run_child(item, folder)
            reports = [
                item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
                for data in results["reports"]
            ]
            traces = sorted(glob.glob(os.path.join(folder, "*.gtr")))
            reason = unmeasured(results, traces)
            if reason and any(report.when == "call" and report.passed for report in reports):
                raise GputraceError(reason)
            usages = [Usage(trace, results["begin"], results["end"]) for trace in traces]
            problems = [problem for usage in usages for problem in beyond(allowed, usage)]
            properties = [] if reason else list(figures(allowed, usages))
            for report in reports:
                report.user_properties += properties
                if report.when == "call" and report.passed and problems:
                    # What is expected to fail may fail by this.
                    report.outcome = "skipped" if hasattr(report, "wasxfail") else "failed"
                    report.longrepr = "\n".join(problems)
            if traces and any(report.failed for report in reports):
                kept = keep(item, traces)
                for report in [report for report in reports if report.failed][:1]:
                    report.sections.append(("gputrace", kept))
    except (GputraceError, OSError, ValueError, TypeError) as error:
        return [failure(item, f"gputrace: {error}")]
    return reports


def figures(allowed: Limits, usages: List[Usage]) -> Iterator[Tuple[str, int]]:
    """What the table at the end and reports in files show."""
    yield "gpu_memory_peak", max((usage.peak()[0] for usage in usages), default=0)
    if "limit_gpu_leaks" in allowed:
        yield "gpu_memory_leaked", sum(sum(usage.leaks().values()) for usage in usages)


def keep(item: pytest.Item, traces: List[str]) -> str:
    """Puts the traces of a failed test where they stay until it fails again, and says what to ask."""
    folder = item.config.getoption("gpu_traces")
    if folder is None and getattr(item.config, "cache", None) is not None:
        folder = item.config.cache.mkdir("gputrace")
    if folder is None:
        folder = os.path.join(tempfile.gettempdir(), f"gputrace-pytest-{os.getuid()}")
    folder = os.path.join(str(item.config.invocation_params.dir), str(folder))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", item.nodeid)[-80:] + "." + hashlib.sha256(item.nodeid.encode()).hexdigest()[:8]
    for old in glob.glob(os.path.join(glob.escape(folder), glob.escape(name) + ".*.gtr")):
        os.remove(old)
    kept = [os.path.join(folder, f"{name}.{os.path.basename(trace)}") for trace in traces]
    for trace, path in zip(traces, kept):
        shutil.move(trace, path)
    return "the trace of this test is kept: gputrace report " + " ".join(shlex.quote(path) for path in kept)


def limits(item: pytest.Item) -> Limits:
    """The limits of a test in bytes, by marker, and how often it is to run before."""
    found: Limits = {}
    memory, leaks = (item.get_closest_marker(name) for name in MARKERS)
    if memory is not None:
        found["limit_gpu_memory"] = memory_limit(*memory.args, **memory.kwargs)
    if leaks is not None:
        found["limit_gpu_leaks"], found["warmups"] = leak_limit(*leaks.args, **leaks.kwargs)
    return found


def memory_limit(limit: Union[int, str]) -> int:
    """The argument of `limit_gpu_memory`, in bytes."""
    return parse_bytes(limit)


def leak_limit(limit: Union[int, str], warmups: int = 1) -> Tuple[int, int]:
    """The arguments of `limit_gpu_leaks`: bytes, and how often the test runs before."""
    return parse_bytes(limit), warmups


def run_child(item: pytest.Item, folder: str) -> Dict[str, Any]:
    """Runs the test alone under `gputrace record`: its reports, and when it began and ended."""
    results = os.path.join(folder, "results.json")
    config = item.config
    # Not `--quiet`: the line at the end comes when the trace is complete, and what is captured ends with it.
    command = [program_path(), "record", "--output", os.path.join(folder, "%p.%n.gtr"), "--"]
    command += [sys.executable, "-m", "pytest", *map(str, config.invocation_params.args)]
    # The last one counts.
    command += ["--basetemp", os.path.join(folder, "basetemp")]
    if config.pluginmanager.hasplugin("xdist"):
        command += ["-n", "0", "--dist", "no"]
    if config.pluginmanager.hasplugin("_cov"):
        command.append("--no-cov")
    test = os.path.join(str(config.rootpath), item.nodeid)
    environment = dict(without_preload(), **{CHILD: results, CHILD_TEST: test})
    # Workers of pytest-xdist say so in the environment; the child is none.
    environment = {
        name: value for name, value in environment.items() if not name.startswith("PYTEST_XDIST") and name not in NOT_FOR_THE_CHILD
    }
    child = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        env=environment,
        cwd=str(config.invocation_params.dir),
    )
    if not os.path.exists(results):
        said = (child.stdout + child.stderr).strip()
        raise GputraceError(f"the test's own process ended with {child.returncode} before the test did:\n{said}")
    with open(results) as file:
        ran: Dict[str, Any] = json.load(file)
    return ran


def beyond(allowed: Limits, usage: Usage) -> Iterator[str]:
    """What a process did beyond its limits, in words."""
    if "limit_gpu_memory" in allowed:
        amount, device, holders = usage.peak()
        if amount > allowed["limit_gpu_memory"]:
            yield "\n".join([
                f"gputrace: process {usage.pid} peaked at {show_bytes(amount)} on cuda:{device}; the limit is "
                f"{show_bytes(allowed['limit_gpu_memory'])} (limit_gpu_memory)",
                *places(holders),
                *unused(amount - sum(holders.values())),
            ])
    if "limit_gpu_leaks" in allowed:
        leaks = usage.leaks()
        amount = sum(leaks.values())
        if amount > allowed["limit_gpu_leaks"]:
            yield "\n".join([
                f"gputrace: {show_bytes(amount)} allocated by this test was not freed; the limit is "
                f"{show_bytes(allowed['limit_gpu_leaks'])} (limit_gpu_leaks)",
                *places(leaks),
            ])


def places(held: Counter[Place]) -> Iterator[str]:
    """The places that hold most, a line each."""
    for (device, owner, site), amount in held.most_common(N_PLACES):
        yield f"  {show_bytes(amount):>10}  on cuda:{device}, {printable(owner)}, {printable(site)}"
    rest = sum(held.values()) - sum(amount for _, amount in held.most_common(N_PLACES))
    if rest > 0:
        yield f"  {show_bytes(rest):>10}  at {len(held) - N_PLACES} more call sites"


def unused(amount: int) -> Iterator[str]:
    """What nobody holds of the amount, as a line."""
    if amount > 0:
        yield f"  {show_bytes(amount):>10}  reserved by PyTorch's cache and used by nobody"


def failure(item: pytest.Item, text: str) -> pytest.TestReport:
    """A report for what could not be measured."""
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=text,
        when="call",
    )
