"""`python -m gputrace`, and the command `gputrace` of a wheel: becomes the program."""
import os
import sys

from ._installed import GputraceError, program_path


def main() -> None:
    """Becomes the program `gputrace`, with this process's arguments."""
    try:
        program = program_path()
    except GputraceError as error:
        sys.exit(f"gputrace: {error}")
    sys.stdout.flush()
    os.execv(program, ["gputrace", *sys.argv[1:]])


if __name__ == "__main__":
    main()
