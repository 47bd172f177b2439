"""Where the program and its library are: in this package if it is a wheel's, else where the environment says, else on PATH."""
import os
import platform
import shutil
from typing import Optional

_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin")
# Not `GPUTRACE`, which switches the library.
PROGRAM = "GPUTRACE_PROGRAM"


class GputraceError(Exception):
    """gputrace is not there, or could not do its part."""


def program_path() -> str:
    """Where the program `gputrace` is: GPUTRACE_PROGRAM if it is set, this package, PATH."""
    named = os.environ.get(PROGRAM)
    if named:
        if not os.access(named, os.X_OK) or os.path.isdir(named):
            raise GputraceError(f"{PROGRAM} names {named}, which is not a program")
        return named
    ours = os.path.join(_FOLDER, "gputrace")
    if os.path.isfile(ours):
        return ours
    found = shutil.which("gputrace", path=_without_us())
    if not found:
        raise GputraceError(f"the program gputrace is not on PATH, and {PROGRAM} does not name it")
    return found


def library_path() -> str:
    """Where `libgputrace.so` is, for LD_PRELOAD: GPUTRACE_LIBRARY, this package, beside the program or in ../lib."""
    named = os.environ.get("GPUTRACE_LIBRARY")
    if named:
        if not os.path.isfile(named):
            raise GputraceError(f"GPUTRACE_LIBRARY names {named}, which is not a file")
        return os.path.abspath(named)
    folders = [_FOLDER]
    try:
        beside = os.path.dirname(os.path.realpath(program_path()))
        # The last is Debian's for each processor.
        for place in ("", "lib", "lib/gputrace", f"lib/{platform.machine()}-linux-gnu"):
            folders.append(os.path.join(beside, "..", place) if place else beside)
    except GputraceError:
        pass
    for folder in folders:
        path = os.path.join(folder, "libgputrace.so")
        if os.path.isfile(path):
            return os.path.realpath(path)
    raise GputraceError("libgputrace.so is not in " + ", ".join(folders))


def _without_us() -> Optional[str]:
    """PATH without scripts that only come back here: `python -m gputrace` where the wheel's program is missing."""
    def is_script(folder: str) -> bool:
        try:
            with open(os.path.join(folder, "gputrace"), "rb") as file:
                return file.read(2) == b"#!"
        except OSError:
            return False

    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if not is_script(folder))
