"""Fails tests that take more GPU memory than they may, or do not give it back.

    @pytest.mark.limit_gpu_memory("2 GiB")
    @pytest.mark.limit_gpu_leaks("1 MiB")

A test with a limit runs in a process of its own:

    pytest ── gputrace record -- python -m pytest NODEID ──> reports, begin and end of the test, trace
       └── figures of the trace between begin and end ──> passes the reports on, or fails the test
"""
import gc
import glob
import json
import os
import subprocess
import sys
import tempfile
import time

import pytest
from _pytest.runner import runtestprotocol

from .usage import GputraceError, Usage, parse_bytes, printable, program, show_bytes, without_preload

# Names the file for the child's results; set in the child only.
CHILD = "GPUTRACE_PYTEST_CHILD"
MARKERS = {
    "limit_gpu_memory": "limit_gpu_memory(limit): fail if a process of the test holds more on one GPU",
    "limit_gpu_leaks": "limit_gpu_leaks(limit, warmups=1): fail if the test does not give back more than this",
}
N_PLACES = 5


def pytest_configure(config):
    for line in MARKERS.values():
        config.addinivalue_line("markers", line)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    if not any(item.get_closest_marker(name) for name in MARKERS):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = measured(item) if CHILD in os.environ else limited(item)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def measured(item):
    """In the child: runs the test, and notes when it began and ended."""
    for _ in range(limits(item).get("warmups", 0)):
        # The parent for the next item: fixtures of the module and beyond stay, those of the test go.
        reports = runtestprotocol(item, nextitem=item.parent, log=False)
        if any(report.failed for report in reports):
            break
    gc.collect()
    begin = time.time_ns()
    reports = runtestprotocol(item, nextitem=None, log=False)
    gc.collect()
    end = time.time_ns()
    serialized = [item.config.hook.pytest_report_to_serializable(config=item.config, report=report) for report in reports]
    with open(os.environ[CHILD], "w") as results:
        json.dump({"begin": begin, "end": end, "reports": serialized}, results)
    return reports


def limited(item):
    """In the parent: has a child run the test, and looks at its trace."""
    try:
        allowed = limits(item)
        with tempfile.TemporaryDirectory(prefix="gputrace-") as folder:
            results, said = run_child(item, folder)
            reports = [
                item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
                for data in results["reports"]
            ]
            problems = [
                problem
                for trace in sorted(glob.glob(os.path.join(folder, "*.gtr")))
                for problem in beyond(allowed, Usage(trace, results["begin"], results["end"]))
            ]
    except (GputraceError, ValueError, TypeError) as error:
        return [failure(item, f"gputrace: {error}")]
    for report in reports:
        if report.when == "call" and report.passed and problems:
            report.outcome, report.longrepr = "failed", "\n".join(problems)
    return reports


def limits(item):
    """The limits of a test in bytes, by marker, and how often it is to run before."""
    found = {}
    memory, leaks = (item.get_closest_marker(name) for name in MARKERS)
    if memory is not None:
        found["limit_gpu_memory"] = memory_limit(*memory.args, **memory.kwargs)
    if leaks is not None:
        found["limit_gpu_leaks"], found["warmups"] = leak_limit(*leaks.args, **leaks.kwargs)
    return found


def memory_limit(limit):
    return parse_bytes(limit)


def leak_limit(limit, warmups=1):
    return parse_bytes(limit), warmups


def run_child(item, folder):
    results = os.path.join(folder, "results.json")
    config = item.config
    command = [program(), "record", "--output", os.path.join(folder, "%p.%n.gtr"), "--", sys.executable, "-m", "pytest"]
    command += [argument for plugin in config.option.plugins for argument in ("-p", plugin)]
    command += ["-p", "no:cacheprovider", "-q", "--rootdir", str(config.rootpath)]
    if config.inipath is not None:
        command += ["-c", str(config.inipath)]
    command.append(os.path.join(str(config.rootpath), item.nodeid))
    environment = dict(without_preload(), **{CHILD: results})
    # Workers of pytest-xdist say so in the environment; the child is none.
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_XDIST")}
    child = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=str(config.invocation_params.dir))
    if not os.path.exists(results):
        said = (child.stdout + child.stderr).strip()
        raise GputraceError(f"the test's own process ended with {child.returncode} before the test did:\n{said}")
    with open(results) as file:
        return json.load(file), child.stderr


def beyond(allowed, usage):
    """What a process did beyond its limits, in words."""
    if "limit_gpu_memory" in allowed:
        amount, device, holders = usage.peak()
        if amount > allowed["limit_gpu_memory"]:
            yield "\n".join([
                f"gputrace: process {usage.pid} held up to {show_bytes(amount)} on cuda:{device}, the limit is "
                f"{show_bytes(allowed['limit_gpu_memory'])} (limit_gpu_memory)",
                *places(holders),
                *unused(amount - sum(holders.values())),
            ])
    if "limit_gpu_leaks" in allowed:
        leaks = usage.leaks()
        amount = sum(leaks.values())
        if amount > allowed["limit_gpu_leaks"]:
            yield "\n".join([
                f"gputrace: {show_bytes(amount)} allocated by this test were not given back, the limit is "
                f"{show_bytes(allowed['limit_gpu_leaks'])} (limit_gpu_leaks)",
                *places(leaks),
            ])


def places(held):
    for (device, owner, site), amount in held.most_common(N_PLACES):
        yield f"  {show_bytes(amount):>10}  on cuda:{device}, {printable(owner)}, {printable(site)}"
    rest = sum(held.values()) - sum(amount for _, amount in held.most_common(N_PLACES))
    if rest > 0:
        yield f"  {show_bytes(rest):>10}  at {len(held) - N_PLACES} more call sites"


def unused(amount):
    if amount > 0:
        yield f"  {show_bytes(amount):>10}  reserved by PyTorch's cache and used by nobody"


def failure(item, text):
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=text,
        when="call",
    )
