"""The plugin on a driver that ctypes loads: `LD_LIBRARY_PATH` decides whether that is the fake one."""
import pytest

from gputrace.usage import parse_bytes, printable, show_bytes

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
        "gputrace: process * held up to 12.00 MiB on cuda:0, the limit is 8.00 MiB (limit_gpu_memory)",
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
        "gputrace: 2.00 MiB allocated by this test were not given back, the limit is 1.00 MiB (limit_gpu_leaks)",
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
    monkeypatch.delenv("GPUTRACE", raising=False)
    monkeypatch.setenv("PATH", "")
    result = run(pytester, tests, "-k", "dies")
    result.stdout.fnmatch_lines(["*gputrace is not on PATH, and GPUTRACE does not name it*"])


@pytest.mark.parametrize("text, amount", [("2 GiB", 2 << 30), ("512MB", 512 * 10**6), ("1.5k", 1536), (7, 7), ("7", 7)])
def test_amounts(text, amount):
    assert parse_bytes(text) == amount


def test_amounts_read_well():
    assert [show_bytes(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40)] == ["0 B", "1023 B", "1.50 KiB", "5.00 MiB", "3.00 TiB"]


def test_names_in_failures_are_shown_and_not_obeyed():
    assert printable("forward (modèle.py:12) 日本\u3000🚀") == "forward (modèle.py:12) 日本\u3000🚀"
    assert printable("a\x1b[2J\n\u202e\u2028\x9b") == "a\\u{1b}[2J\\u{a}\\u{202e}\\u{2028}\\u{9b}"
