"""The plugin on a driver that ctypes loads: `LD_LIBRARY_PATH` decides whether that is the fake one."""
import pytest

from gputrace._shown import printable, show_bytes
from gputrace.usage import parse_bytes

pytest_plugins = ["pytester"]

CUDA = """
import ctypes
import pytest

MIB = 1 << 20
cuda = ctypes.CDLL("libcuda.so.1")


def context():
    made = ctypes.c_void_p()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(made), 0) == 0
    assert cuda.cuCtxSetCurrent(made) == 0


def take(n_bytes):
    context()
    address = ctypes.c_uint64()
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(n_bytes)) == 0
    return address


def give(address):
    assert cuda.cuMemFree_v2(address) == 0
"""


def run(pytester, tests, *arguments):
    pytester.makepyfile(CUDA + tests)
    return pytester.runpytest(*arguments)


def test_limits_that_hold(pytester):
    result = run(pytester, """
@pytest.mark.limit_gpu_memory("8 MiB")
@pytest.mark.limit_gpu_leaks("1 MiB")
def test_gives_back():
    give(take(6 * MIB))

@pytest.mark.limit_gpu_memory(0)
def test_uses_no_gpu():
    pass

def test_has_no_limit():
    take(100 * MIB)
""")
    result.assert_outcomes(passed=3)


def test_a_peak_beyond_its_limit_fails_with_the_lines_that_held_it(pytester):
    result = run(pytester, """
def large():
    return take(6 * MIB)

@pytest.mark.limit_gpu_memory("8 MiB")
def test_takes_too_much():
    first = large()
    second = large()
    give(first)
    give(second)
""")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([
        "gputrace: process * peaked at 12.00 MiB on cuda:0; the limit is 8.00 MiB (limit_gpu_memory)",
        "*12.00 MiB  on cuda:0, *take (*.py:*)*",
    ])


def test_memory_that_stays_fails_with_the_line_that_took_it(pytester):
    result = run(pytester, """
kept = []

@pytest.mark.limit_gpu_leaks("1 MiB")
def test_keeps():
    give(take(50 * MIB))
    kept.append(take(2 * MIB))
""")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([
        "gputrace: 2.00 MiB allocated by this test was not freed; the limit is 1.00 MiB (limit_gpu_leaks)",
        "*2.00 MiB  on cuda:0, *",
    ])


def test_what_is_taken_once_is_no_leak_unless_no_warm_up_is_wanted(pytester):
    result = run(pytester, """
workspace = []

def step():
    if not workspace:
        workspace.append(take(4 * MIB))

@pytest.mark.limit_gpu_leaks("1 MiB")
def test_with_a_warm_up():
    step()

@pytest.mark.limit_gpu_leaks("1 MiB", warmups=0)
def test_without():
    step()
""", "-v")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*test_with_a_warm_up PASSED*", "*test_without FAILED*"])


def test_fixtures_parameters_and_failures_are_the_tests_own(pytester):
    result = run(pytester, """
@pytest.fixture
def block():
    address = take(2 * MIB)
    yield address
    give(address)

@pytest.mark.limit_gpu_leaks("1 MiB")
@pytest.mark.parametrize("fails", [False, True])
def test_with_a_fixture(block, fails):
    assert not fails, "what the test itself says"

@pytest.mark.limit_gpu_memory("1 MiB")
def test_is_skipped():
    pytest.skip("not today")
""")
    result.assert_outcomes(passed=1, failed=1, skipped=1)
    result.stdout.fnmatch_lines(["*what the test itself says*"])


def test_what_cannot_be_measured_fails_and_says_why(pytester, monkeypatch):
    tests = """
@pytest.mark.limit_gpu_memory("1 parsec")
def test_wrong_unit():
    pass

@pytest.mark.limit_gpu_memory("1 MiB")
def test_dies():
    import os
    os._exit(7)
"""
    result = run(pytester, tests)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*'1 parsec' is no amount of memory*", "*the test's own process ended with 7*"])
    monkeypatch.delenv("GPUTRACE_PROGRAM", raising=False)
    monkeypatch.setenv("PATH", "")
    result = run(pytester, tests, "-k", "dies")
    result.stdout.fnmatch_lines(["*program gputrace is not on PATH, and GPUTRACE_PROGRAM does not name it*"])


def test_a_program_that_is_not_there_is_said_and_fails_only_tests_with_a_limit(pytester, monkeypatch):
    monkeypatch.setenv("GPUTRACE_PROGRAM", "/nonexist")
    result = run(pytester, """
def test_before():
    pass

@pytest.mark.limit_gpu_memory("1 MiB")
def test_limited():
    pass

def test_after():
    pass
""")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["gputrace: GPUTRACE_PROGRAM names /nonexist, which is not a program"])
    result.stdout.no_fnmatch_line("*INTERNALERROR*")


TAKES_TOO_MUCH = """
@pytest.mark.limit_gpu_memory("8 MiB")
def test_takes_too_much():
    take(12 * MIB)

@pytest.mark.limit_gpu_memory(0)
def test_uses_no_gpu():
    pass
"""


@pytest.mark.parametrize("name, value", [("GPUTRACE", "0"), ("GPUTRACE", "dormant"), ("GPUTRACE_KEEP", "1s")])
def test_a_session_that_is_not_recorded_measures_its_limits_all_the_same(pytester, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    result = run(pytester, TAKES_TOO_MUCH)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["gputrace: process * peaked at 12.00 MiB on cuda:0; *"])


@pytest.mark.parametrize("switch, reason", [
    ("off", "GPUTRACE=off disables gputrace"),
    ("dormant", "with GPUTRACE=dormant, gputrace records only after `gputrace attach`"),
])
def test_no_limit_passes_if_the_tests_themselves_disable_gputrace(pytester, switch, reason):
    pytester.makeconftest(f"import os\nos.environ['GPUTRACE'] = '{switch}'")
    result = run(pytester, TAKES_TOO_MUCH)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines([f"gputrace: nothing was measured: {reason}"])
    result.stdout.no_fnmatch_line("*GPU memory of tests with a limit*")


def test_no_limit_passes_if_a_context_was_not_recorded(pytester):
    pytester.makeconftest("import os\nos.environ['GPUTRACE'] = '0'")
    result = run(pytester, """
@pytest.mark.limit_gpu_memory("8 MiB")
def test_hides_the_switch():
    import os
    take(12 * MIB)
    del os.environ["GPUTRACE"]

@pytest.mark.limit_gpu_memory("8 MiB")
def test_fails_by_itself():
    take(MIB)
    assert False, "what the test itself says"
""")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines([
        "gputrace: nothing was measured: process * used CUDA, but gputrace did not record it; run `gputrace doctor`",
        "*what the test itself says*",
    ])


SHARED = """
import pytest
log = []

@pytest.fixture(scope="module")
def module():
    yield "module"
    assert not {fails}, "what the teardown says"

@pytest.mark.parametrize("n", [1, 2])
def test_before(module, n):
    pass

@pytest.mark.limit_gpu_memory("1 MiB")
def test_limited(module):
    pass
"""


def test_tests_before_and_after_are_as_without_a_limit(pytester):
    pytester.makepyfile(test_1=SHARED.format(fails=False), test_2=SHARED.format(fails=False), test_3="def test_plain(): pass")
    pytester.runpytest().assert_outcomes(passed=7)


def test_a_teardown_that_fails_behind_a_test_with_a_limit_is_reported(pytester):
    # Once here, where test_before set it up, and once in the process of the test with a limit.
    pytester.makepyfile(test_1=SHARED.format(fails=True), test_2="def test_plain(): pass")
    result = pytester.runpytest()
    result.assert_outcomes(passed=4, errors=2)
    result.stdout.fnmatch_lines(["*what the teardown says*"])


CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--dev")
    parser.addini("model", "which", default="none")
"""


def test_options_settings_and_working_folder_are_handed_on(pytester):
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmodel = large\naddopts = --strict-markers\nmarkers = slow: takes long")
    pytester.mkdir("sub")
    result = run(pytester, """
import os, sys

@pytest.mark.slow
@pytest.mark.limit_gpu_memory("1 MiB")
def test_asks(request, tmp_path):
    assert request.config.getoption("dev") == "cuda"
    assert request.config.getini("model") == "large"
    assert request.config.getini("xfail_strict") is True
    assert request.config.getoption("markexpr") == "slow"
    assert not sys.flags.optimize and os.path.basename(os.getcwd()) != "sub"

@pytest.mark.limit_gpu_memory("1 MiB")
def test_is_deselected():
    assert False
""", "--dev", "cuda", "-m", "slow", "-o", "xfail_strict=true", "-x", "--lf", "--junitxml=of-the-session.xml", "--cache-clear")
    result.assert_outcomes(passed=1, deselected=1)
    report = (pytester.path / "of-the-session.xml").read_text()
    assert report.count("<testcase") == 1 and "gpu_memory_peak" in report


def test_the_end_shows_peaks_and_a_failure_keeps_its_trace(pytester):
    tests = """
@pytest.mark.limit_gpu_memory("8 MiB")
def test_small():
    give(take(MIB))

@pytest.mark.limit_gpu_leaks("1 MiB", warmups=0)
def test_large():
    give(take(6 * MIB))
    take(3 * MIB)

@pytest.mark.xfail
@pytest.mark.limit_gpu_memory("1 MiB")
def test_expected():
    give(take(2 * MIB))
"""
    for _ in range(2):
        result = run(pytester, tests, "-p", "cacheprovider")
        result.assert_outcomes(passed=1, failed=1, xfailed=1)
    result.stdout.fnmatch_lines([
        "*the trace of this test is kept: gputrace report *",
        "*GPU memory of tests with a limit*",
        "       peak  not returned  test",
        "   6.00 MiB      3.00 MiB  *::test_large",
        "   2.00 MiB                *::test_expected",
        "   1.00 MiB                *::test_small",
    ])
    # The second run took the place of the first.
    kept = list((pytester.path / ".pytest_cache").rglob("*.gtr"))
    assert len(kept) == 1 and str(kept[0]) in result.stdout.str()
    result = run(pytester, tests, "--gpu-traces", "traces", "--gpu-memory-top", "1")
    result.stdout.fnmatch_lines(["*::test_large", "and 2 more (--gpu-memory-top)"])
    assert len(list((pytester.path / "traces").glob("*.gtr"))) == 1


def test_workers_of_xdist_measure_as_one_process_does(pytester):
    pytest.importorskip("xdist")
    result = run(pytester, """
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.limit_gpu_memory("2 MiB")
def test_takes(n):
    give(take(n * MIB))

def test_plain():
    pass
""", "-n", "2")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["   3.00 MiB * *test_takes?3?", "   2.00 MiB *", "   1.00 MiB *"])


@pytest.mark.parametrize("text, amount", [("2 GiB", 2 << 30), ("512MB", 512 * 10**6), ("1.5k", 1536), (7, 7), ("7", 7)])
def test_amounts(text, amount):
    assert parse_bytes(text) == amount


def test_amounts_read_well():
    assert [show_bytes(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40)] == ["0 B", "1023 B", "1.50 KiB", "5.00 MiB", "3.00 TiB"]


def test_names_in_failures_are_shown_and_not_obeyed():
    assert printable("forward (modèle.py:12) 日本\u3000🚀") == "forward (modèle.py:12) 日本\u3000🚀"
    assert printable("a\x1b[2J\n\u202e\u2028\x9b") == "a\\u{1b}[2J\\u{a}\\u{202e}\\u{2028}\\u{9b}"
