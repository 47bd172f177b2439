"""mypy, strictly, on the package itself and on a program that uses it."""
import os
import subprocess
import sys

import pytest

pytest.importorskip("mypy")
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
USER = """
from typing import List, Optional
import gputrace

rows: gputrace.Rows = gputrace.load("train.gtr", to="rows")
taken: int = sum(row["bytes"] for row in rows)
owners: List[Optional[str]] = [row["owner"] for row in rows]
verdict: Optional[gputrace.Verdict] = gputrace.report("train.gtr").verdict

@gputrace.range("step")
def step(n: int) -> str:
    return str(n)

text: str = step(7)
"""


def mypy(*arguments):
    command = [sys.executable, "-m", "mypy", "--cache-dir", os.devnull, "--strict", *arguments]
    return subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True)


def test_the_package_is_typed_strictly():
    checked = mypy()
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_program_that_uses_the_package_is_checked_by_its_types(tmp_path):
    (tmp_path / "right.py").write_text(USER)
    checked = mypy(str(tmp_path / "right.py"))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    (tmp_path / "wrong.py").write_text(USER.replace("taken: int", "taken: str").replace('"bytes"', '"byte"').replace("step(7)", "step('7')"))
    wrong = mypy(str(tmp_path / "wrong.py")).stdout
    assert wrong.count("error:") >= 2 and "typeddict-item" in wrong and "arg-type" in wrong, wrong
