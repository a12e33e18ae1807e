"""The command line, as `ckptdrill` and as `python -m ckptdrill`, for a chosen interpreter.

Its modules take a moment to import. Ctrl-C in that moment is as ordinary as at any other.
"""

import sys

# What a shell reports of a program that Ctrl-C has ended.
INTERRUPTED = 130


def main() -> None:
    """Import the command line, run it, and leave with its exit code."""
    try:
        from ckptdrill.cli import main as run
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    run()


if __name__ == "__main__":
    main()
