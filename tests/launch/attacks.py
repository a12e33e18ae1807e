"""Everything that a job may do to a checkpoint that is not its own, each by itself.

Usage: attacks.py FOLDER FILE: tries them on FILE in FOLDER from the working directory, which must
be writable, and leaves in `outcomes.json` there what came of each: "done", or why not.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path


def overwrite(path: Path) -> None:
    """Write a byte in place."""
    with path.open("r+b") as stream:
        stream.write(b"X")


def own(out: Path) -> None:
    """What a job must go on to be able to do: make a file in TMPDIR and move it to its own."""
    made = Path(os.environ["TMPDIR"], "made")
    made.touch()
    made.rename(out / "made")


def main(folder: Path, file: Path, out: Path) -> None:
    """Try everything; the gravest last."""
    out.mkdir(exist_ok=True)
    (out / "link").symlink_to(folder)
    acts: dict[str, Callable[[], object]] = {
        "write": lambda: overwrite(file),
        "write through a link": lambda: overwrite(out / "link" / file.name),
        "touch": lambda: os.utime(file),
        "chmod": lambda: file.chmod(0o777),
        "hard link": lambda: (out / "alias").hardlink_to(file),
        "write through a hard link": lambda: overwrite(out / "alias"),
        "add": (folder / "added").touch,
        "truncate": lambda: os.truncate(file, 0),
        "rename": lambda: file.rename(file.with_name("renamed")),
        "delete": file.unlink,
        "replace": lambda: (out / "alias").replace(file),
        "move the folder": lambda: folder.rename(folder.with_name("moved")),
        "remove the folder": lambda: shutil.rmtree(folder),
        "own": lambda: own(out),
    }
    outcomes = {}
    for name, act in acts.items():
        try:
            act()
            outcomes[name] = "done"
        except OSError as error:
            outcomes[name] = os.strerror(error.errno or 0)
    (out.parent / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[1], sys.argv[2]), Path.cwd() / "out")
