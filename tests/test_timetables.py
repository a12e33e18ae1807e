"""What starts a night, each read by the program that it is for, or by its grammar."""

import re
import shlex
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from ckptdrill import timetables
from ckptdrill.cli import app
from ckptdrill.timetables import Kind

COMMAND = ["/opt/my tools/ckptdrill", "nightly", "50%.yaml", "--runs", "/var/lib/drills"]
TRICKY = [*COMMAND, "a'b", 'a"b', "a\\b", "$HOME", "a;b", "#x"]
_FIELD = r"(\*|\d{1,2})(-\d{1,2})?(/\d{1,2})?(,\d{1,2})*"
CRON_LINE = re.compile(rf"(?:{_FIELD} ){{5}}\S.*")


def render(kind: Kind, command: list[str] = COMMAND) -> str:
    return timetables.render(kind, command, "nightly", "runs", "trainer")


def job(kind: Kind, command: list[str]) -> Any:
    """The command that a build server gives to its shell, and the whole file."""
    file = yaml.safe_load(render(kind, command))
    if kind is Kind.GITLAB:
        return file["restore-drills"]["script"][0], file
    steps = file["jobs"]["drill"]["steps"]
    return next(step["run"] for step in steps if "run" in step), file


@pytest.mark.parametrize("command", [COMMAND, TRICKY])
def test_a_line_of_cron(command: list[str]) -> None:
    comment, line = render(Kind.CRON, command).splitlines()
    assert comment.startswith("# ")
    assert CRON_LINE.fullmatch(line)
    assert not re.search(r"(?<!\\)%", line)
    said = line.split(maxsplit=5)[5].replace("\\%", "%")
    assert shlex.split(said) == command


@pytest.mark.parametrize("command", [COMMAND, TRICKY])
@pytest.mark.parametrize("kind", [Kind.GITHUB, Kind.GITLAB])
def test_a_job_of_a_build_server(kind: Kind, command: list[str]) -> None:
    script, _ = job(kind, command)
    assert shlex.split(script) == command


def test_what_a_build_server_keeps() -> None:
    _, github = job(Kind.GITHUB, COMMAND)
    _, gitlab = job(Kind.GITLAB, COMMAND)
    assert github[True]["schedule"] == [{"cron": "17 2 * * *"}]  # YAML 1.1 reads `on` as true
    assert github["jobs"]["drill"]["steps"][0]["with"] == {"clean": False}
    assert gitlab["restore-drills"]["artifacts"]["reports"]["junit"] == "junit.xml"


@pytest.mark.parametrize("kind", [Kind.GITHUB, Kind.GITLAB])
def test_the_newest_packet_is_packed_without_its_checkpoints(kind: Kind, tmp_path: Path) -> None:
    _, file = job(kind, COMMAND)
    if kind is Kind.GITLAB:
        pack, *more = file["restore-drills"]["after_script"]
    else:
        (pack,) = [s["run"] for s in file["jobs"]["drill"]["steps"] if "tar " in s.get("run", "")]
        more = []
    for night in ("old", "new"):
        root = tmp_path / "runs" / "nightly" / night
        (root / "work").mkdir(parents=True)
        (root / "work" / "model.pt").write_text("large")
        (root / "junit.xml").write_text(night)
    (tmp_path / "runs" / "nightly" / "latest").symlink_to("new")
    for command in (pack, *more):
        subprocess.run(shlex.split(command), cwd=tmp_path, check=True)
    with tarfile.open(tmp_path / "packet.tgz") as archive:
        assert {m.name for m in archive if m.isfile()} == {"./junit.xml"}
        assert archive.extractfile("./junit.xml").read() == b"new"  # type: ignore[union-attr]
    assert not more or (tmp_path / "junit.xml").read_text() == "new"


def units(folder: Path, command: list[str]) -> list[Path]:
    """The two unit files, split where their comments name them."""
    text = render(Kind.SYSTEMD, command)
    parts = re.split(r"^# /etc/systemd/system/(\S+)\n", text, flags=re.MULTILINE)
    files = [folder / name for name in parts[1::2]]
    for path, text in zip(files, parts[2::2], strict=True):
        path.write_text(text)
    return files


def test_the_units_are_named(tmp_path: Path) -> None:
    names = [path.name for path in units(tmp_path, COMMAND)]
    assert names == ["ckptdrill-nightly.service", "ckptdrill-nightly.timer"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    program = tmp_path / "my tools" / "ckptdrill"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    files = units(tmp_path, [str(program), *TRICKY[1:]])
    files[0].write_text(files[0].read_text().replace("User=trainer", "User=root"))
    done = _verified(files)
    assert done.returncode == 0, done.stderr
    ours = [line for line in done.stderr.splitlines() if "ckptdrill-nightly" in line]
    assert ours == []
    files[0].write_text(files[0].read_text().replace("Type=oneshot", "Type=oneshoot"))
    assert "oneshoot" in _verified(files).stderr


def _verified(files: list[Path]) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", "verify", "--man=no", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("kind", Kind)
def test_nightly_prints_them(kind: Kind, tmp_path: Path, repository: Path) -> None:
    matrix = repository / "matrices" / "quickstart.yaml"
    options = ["--runs", str(tmp_path / "runs"), "--budget-s", "7200", "--keep-runs", "7"]
    options += ["--max-age", "36h", "--metrics", str(tmp_path / "m.prom")]
    result = CliRunner().invoke(app, ["nightly", str(matrix), *options, "--print", kind.value])
    assert result.exit_code == 0, result.output
    for word in (str(matrix), *options):
        assert word in result.output
    assert "quickstart" in result.output
    assert not (tmp_path / "runs").exists()


def test_an_unknown_kind_names_the_known_ones(repository: Path) -> None:
    matrix = str(repository / "matrices" / "quickstart.yaml")
    result = CliRunner().invoke(app, ["nightly", matrix, "--print", "at"])
    assert result.exit_code == 2
    assert all(kind.value in result.output for kind in Kind)
