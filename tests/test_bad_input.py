"""Bad input of every kind, given to every verb: a short text that says what is wrong.

The verbs are those of the program, so that a new one has to be given its bad input here.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from ckptdrill import cli, store
from ckptdrill.errors import ExitCode
from ckptdrill.model import Reason
from tests.stored_runs import night

KINDS = ("missing", "folder", "noise", "torn", "deep", "loop", "device", "refused")
# How a verb is given the thing that is bad; a verb that is given nothing must have None.
GIVEN: dict[str, list[str] | None] = {
    "run": ["run", "BAD"],
    "plan": ["plan", "BAD"],
    "nightly": ["nightly", "BAD"],
    "judge": ["judge", "BAD"],
    "verify": ["verify", "BAD"],
    "gate": ["gate", "BAD"],
    "allow": ["allow", "--from", "fsdp2", "--to", "fsdp4", "--packet", "BAD"],
    "inspect": ["inspect", "BAD"],
    "diff": ["diff", "BAD", "BAD"],
    "ledger": ["ledger", "BAD"],
    "history": ["history", "BAD"],
    "init": ["init", "--program", "BAD", "--output", "new.yaml"],
    "doctor": None,  # it asks the system, and says so of what it cannot ask (test_doctor.py)
    "manifest write": ["manifest", "write", "BAD", "--output", "out.json"],
    "manifest verify": ["manifest", "verify", "BAD"],
    "manifest select": ["manifest", "select", "BAD"],
    "manifest publish": ["manifest", "publish", "BAD", "new"],
    "list": None,
    "claims": None,
    "schema": None,
}
ADVICE = ("run", "plan", "nightly", "judge", "gate", "ledger", "history", "init")
TORN = ["", "[]", "{}", "[" * 3000, None]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str]:
    """The exit code of the program itself, and all that it printed."""
    code: object = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ckptdrill", *arguments])
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
    said = capsys.readouterr()
    return code, said.out + said.err


def bad(kind: str) -> str:
    """A path at which there is something of this kind."""
    path = Path(f"{kind}.yaml")
    contents = {
        "noise": bytes(range(256)) * 20,
        "torn": b'{"a": [1, 2',
        "deep": b"[" * 5000,
        "refused": b"version: 1\n",
    }
    if kind in contents:
        path.write_bytes(contents[kind])
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    return "/dev/null" if kind == "device" else str(path)


def _verbs(group: Any, prefix: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _verbs(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}"


def test_every_verb_is_here() -> None:
    assert set(_verbs(typer.main.get_command(cli.app))) == set(GIVEN)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", [verb for verb, given in GIVEN.items() if given])
def test_bad_input_is_named_and_is_no_defect(
    verb: str, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, given = bad(kind), GIVEN[verb] or []
    if kind == "refused":
        # A test may run as root, who may read everything: the refusal is that of the system call.
        _refuse(monkeypatch, Path(path))
    code, said = called(capsys, *[path if word == "BAD" else word for word in given])
    assert code != ExitCode.INTERNAL, said
    assert "Traceback" not in said
    assert list(Path().glob("ckptdrill-defect-*")) == []
    if verb in ADVICE:
        assert code in (1, 2)
        assert Path(path).name in said
        assert len(said.splitlines()) <= 40


def _refuse(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    opened, read = Path.open, Path.read_bytes

    def refusing_open(self: Path, *arguments: Any, **options: Any) -> Any:
        if self.name == path.name:
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *arguments, **options)

    def refusing_read(self: Path) -> bytes:
        if self.name == path.name:
            raise PermissionError(13, "Permission denied", str(self))
        return read(self)

    monkeypatch.setattr(Path, "open", refusing_open)
    monkeypatch.setattr(Path, "read_bytes", refusing_read)


@pytest.mark.parametrize("text", TORN)
@pytest.mark.parametrize("name", ["run.json", "matrix.yaml", "packet.json", "cells/a/plan.json"])
@pytest.mark.parametrize("verb", ["judge", "gate", "ledger", "diff"])
def test_a_run_that_is_torn_anywhere_is_no_defect(
    verb: str, name: str, text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = night(tmp_path / "quick", 1, {"a": Reason.HELD})
    store.write_json(root / "packet.json", {"run": {}, "cells": []})
    path = root / name
    path.unlink()
    if text is not None:
        path.write_text(text)
    arguments = [str(root)] * (2 if verb == "diff" else 1)
    code, said = called(capsys, verb, *arguments)
    assert code != ExitCode.INTERNAL, said
    assert code != 0 or verb in ("ledger", "history", "diff")


@pytest.mark.parametrize("made", [3, 99])
def test_a_run_of_a_newer_form_is_left_to_its_version(
    made: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = night(tmp_path / "quick", 1, {"a": Reason.HELD}, format=made)
    code, said = called(capsys, "judge", str(root))
    assert code == ExitCode.USAGE
    assert "a newer ckptdrill wrote this run" in said


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["claims", "--stack", "dcp-fspd2"], "dcp-fsdp2"),
        (["run", "x.yaml", "--launcher", "wram"], "warm"),
        (["nightly", "x.yaml", "--budget-s", "soon"], "--budget-s"),
        (["history", "runs", "--limit", "0"], "--limit"),
        (["ledger", "--gpus", "many"], "--gpus"),
        (["list", "drills"], "drills"),
        (["inspct", "x"], "inspct"),
        (["--verison"], "--verison"),
    ],
)
def test_a_mistyped_word_is_named(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = called(capsys, *arguments)
    assert code == ExitCode.USAGE
    assert word in said
