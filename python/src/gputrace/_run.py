"""What the program says: its standard output, whole or line by line."""
import os
import subprocess
import tempfile
from typing import Dict, Iterator, Union

from ._installed import GputraceError, program_path

PathLike = Union[str, "os.PathLike[str]"]


def said(*arguments: str, columns: int = 0) -> str:
    """What gputrace writes on its standard output, wrapped at `columns` unless that is 0."""
    command = [program_path(), *arguments]
    environment = without_preload()
    if columns:
        environment["COLUMNS"] = str(columns)
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", env=environment)
    if result.returncode != 0:
        raise GputraceError(_without_name(result.stderr) or f"{' '.join(command)} ended with {result.returncode}")
    return result.stdout


def lines(*arguments: str) -> Iterator[str]:
    """The same, one line after the other, so that the whole is never in memory."""
    command = [program_path(), *arguments]
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8", errors="replace",
            env=without_preload()
        )
        assert child.stdout is not None
        try:
            # Names may have characters at which Python's `splitlines` splits, and files do not.
            yield from child.stdout
        finally:
            # Of a reader that had enough.
            child.stdout.close()
            status = child.wait()
        if status != 0:
            errors.seek(0)
            message = _without_name(errors.read().decode("utf-8", "replace"))
            raise GputraceError(message or f"{' '.join(command)} ended with {status}")


def _without_name(message: str) -> str:
    """A message of the program without its name, which the exception has already."""
    message = message.strip()
    return message[len("gputrace: "):] if message.startswith("gputrace: ") else message


def without_preload() -> Dict[str, str]:
    """The environment without a preloaded libgputrace: gputrace itself is not to be traced."""
    entries = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    others = [entry for entry in entries if os.path.basename(entry) != "libgputrace.so"]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return dict(environment, LD_PRELOAD=":".join(others)) if others else environment
