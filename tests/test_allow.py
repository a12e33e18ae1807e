"""`ckptdrill allow` and the step summary, on a stored packet: closed unless everything is right."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckptdrill import cli, store, verbs
from ckptdrill.packet import StoredCell, write
from ckptdrill.store import RunFolder
from tests.packet.conftest import RUN, make_plan, make_verdict, stored

ROUTE = ("--from", "fsdp4", "--to", "fsdp2")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    plan = make_plan("a")
    cell: StoredCell = stored(plan, make_verdict(plan))
    store.write_json(folder.run_json, RUN)
    store.write_json(folder.cell("a") / "plan.json", cell.plan)
    store.write_json(folder.cell("a") / "verdict.json", cell.verdict)
    write(folder)
    return folder


def allow(path: Path, *route: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["allow", *(route or ROUTE), "--packet", str(path)])
    return done.exit_code, done.output


def test_a_verified_route_is_allowed(run: RunFolder) -> None:
    assert allow(run.root) == (0, "allowed: fsdp4 -> fsdp2: verified: a Pass (held)\n")
    assert allow(run.root / "resume_compatibility.yaml")[0] == 0


def test_another_route_is_blocked(run: RunFolder) -> None:
    assert allow(run.root, "--from", "fsdp2", "--to", "fsdp4")[0] == 1


def damage(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


@pytest.mark.parametrize(
    "edit",
    [Path.unlink, damage(""), lambda path: path.write_bytes(path.read_bytes() + b"\n")],
    ids=["missing", "empty", "changed"],
)
def test_a_file_that_is_not_as_it_was_written_is_a_no(
    run: RunFolder, edit: Callable[[Path], object]
) -> None:
    edit(run.root / "resume_compatibility.yaml")
    assert allow(run.root)[0] == 1


def test_any_other_file_of_the_packet_counts_too(run: RunFolder) -> None:
    (run.cell("a") / "verdict.json").write_text("{}")
    code, said = allow(run.root / "resume_compatibility.yaml")
    assert (code, said.startswith("blocked: the packet was changed")) == (1, True)


def test_no_file_is_a_no(tmp_path: Path) -> None:
    assert allow(tmp_path / "none")[0] == allow(tmp_path)[0] == 1


def test_the_step_summary_of_a_github_job(
    run: RunFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    verbs._summarise(run)
    assert summary.read_text() == "before\n" + (run.root / "packet.md").read_text()
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "no" / "such"))
    verbs._summarise(run)
    assert "no step summary" in capsys.readouterr().err
