"""How a command ends that cannot print: its reader has gone, the disk is full, somebody hit Ctrl-C.

None of them may look like a verdict (exit codes 0 to 4 speak of cells), none shows a traceback.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

COMMAND = Path(sys.executable).with_name("ckptdrill")
VERBS = [["list"], ["claims", "--quotes"], ["schema"], ["run", "--help"]]


def started(arguments: list[str], **streams: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([COMMAND, *arguments], stderr=subprocess.PIPE, **streams)


@pytest.mark.parametrize("arguments", VERBS[:2])
def test_a_reader_that_goes_away_is_no_verdict(arguments: list[str]) -> None:
    process = started(arguments, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate()
    assert (process.returncode, err) == (141, b"")


@pytest.mark.parametrize("arguments", VERBS[1:3])
def test_a_full_disk_is_said(arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        process = started(arguments, stdout=full.fileno())
        _, err = process.communicate()
    assert process.returncode == 3
    assert b"cannot write: No space left on device" in err
    assert b"Traceback" not in err
    assert b"internal error" not in err


def test_ctrl_c_is_an_ordinary_end(tmp_path: Path) -> None:
    """The matrix is a pipe, which the command has opened once the pipe can be opened here."""
    pipe = tmp_path / "matrix.yaml"
    os.mkfifo(pipe)
    process = started(["plan", str(pipe)], stdout=subprocess.PIPE)
    with pipe.open("wb"):
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err
