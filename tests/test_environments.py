"""Environments made from requirements: what they are keyed by, and that only whole ones count."""

import dataclasses
import fcntl
import json
import os
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ckptdrill import environments
from ckptdrill.errors import UserError
from ckptdrill.model import Environment

OLD = Environment("old", sys.executable, ("torch==2.12.0",))


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that a build would run, with an empty environment as what they leave."""
    commands: list[list[str]] = []

    def run(command: list[str], environment: Environment, log: Path) -> None:
        commands.append(command)
        if "venv" in command:
            (Path(command[-1]) / "bin").mkdir(parents=True)
            (Path(command[-1]) / "lib/python3.11/site-packages").mkdir(parents=True)

    monkeypatch.setattr(environments, "_logged", run)
    return commands


def built(cache: Path, *wanted: Environment) -> dict[str, Environment]:
    named = {each.name: each for each in wanted}
    return environments.built(named, named, lambda _: None, cache)


def test_one_without_requirements_stays_as_it_is(
    tmp_path: Path, pretended: list[list[str]]
) -> None:
    plain = Environment("plain", "/opt/python")
    assert built(tmp_path, plain) == {"plain": plain}
    assert pretended == []


def test_what_is_made_of_the_same_is_built_once(tmp_path: Path, pretended: list[list[str]]) -> None:
    ready = built(tmp_path, OLD, dataclasses.replace(OLD, name="same"))
    again = built(tmp_path, OLD)
    assert ready["old"].python == ready["same"].python == again["old"].python
    assert [c[2] for c in pretended] == ["venv", "pip"]
    assert Path(ready["old"].python).is_relative_to(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"requirements": ("torch==2.13.0",)},
        {"no_deps": True},
        {"inherits": True},
    ],
)
def test_whatever_it_is_made_of_makes_another(
    tmp_path: Path, pretended: list[list[str]], change: dict[str, Any]
) -> None:
    other = dataclasses.replace(OLD, name="other", **change)
    ready = built(tmp_path, OLD, other)
    assert ready["old"].python != ready["other"].python


def test_a_changed_local_package_makes_another(tmp_path: Path, pretended: list[list[str]]) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "a.py").write_text("1")
    local = Environment("local", sys.executable, (str(package),))
    before = built(tmp_path / "cache", local)["local"].python
    (package / "a.py").write_text("2")
    assert built(tmp_path / "cache", local)["local"].python != before


def test_one_that_was_interrupted_is_made_again(tmp_path: Path, pretended: list[list[str]]) -> None:
    python = Path(built(tmp_path, OLD)["old"].python)
    marker = python.parents[1] / "ckptdrill.json"
    assert json.loads(marker.read_bytes())["requirements"] == ["torch==2.12.0"]
    marker.unlink()
    (python.parents[1] / "half").write_text("")
    built(tmp_path, OLD)
    assert len(pretended) == 4
    assert not (python.parents[1] / "half").exists()


def test_two_runs_do_not_build_at_once(tmp_path: Path, pretended: list[list[str]]) -> None:
    threads = [threading.Thread(target=built, args=(tmp_path, OLD)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pretended) == 2


def test_a_run_that_waits_for_another_says_so(tmp_path: Path, pretended: list[list[str]]) -> None:
    folder = Path(built(tmp_path, OLD)["old"].python).parents[1]
    said: list[str] = []
    with folder.with_suffix(".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def tell(text: str) -> None:
            said.append(text)
            fcntl.flock(lock, fcntl.LOCK_UN)

        environments.built({"old": OLD}, ["old"], tell, tmp_path)
    assert said == ["environment old: another run builds it"]


def test_it_lies_over_the_packages_of_its_interpreter(
    tmp_path: Path, pretended: list[list[str]]
) -> None:
    over = dataclasses.replace(OLD, inherits=True)
    python = Path(built(tmp_path, over)["old"].python)
    (lines,) = python.parents[1].glob("lib/*/site-packages/inherited.pth")
    here = [p for p in sys.path if p.endswith("site-packages")]
    assert all(repr(path) in lines.read_text() for path in here)
    assert pretended[0][0] == sys.executable


def test_no_deps_is_handed_to_pip(tmp_path: Path, pretended: list[list[str]]) -> None:
    built(tmp_path, dataclasses.replace(OLD, no_deps=True))
    assert pretended[1][-2:] == ["--no-deps", "torch==2.12.0"]


def stub(tmp_path: Path, lines: str) -> str:
    """An interpreter that answers what it is asked, and does `lines` for all else."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then exec {sys.executable} "$@"; fi\n{lines}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_failed_build_shows_the_end_of_its_log_and_where_it_is(tmp_path: Path) -> None:
    python = stub(tmp_path, "echo 'ERROR: No matching distribution found for torch==9'; exit 1")
    broken = Environment("broken", python, ("torch==9",), inherits=True)
    with pytest.raises(UserError, match="No matching distribution found for torch==9") as caught:
        built(tmp_path / "cache", broken)
    assert caught.value.where is not None
    assert "No matching" in Path(caught.value.where).read_text()
    assert "offline" in (caught.value.hint or "")
    assert not list((tmp_path / "cache").rglob("ckptdrill.json"))


def test_an_interpreter_that_does_not_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not run"):
        built(tmp_path, Environment("x", str(tmp_path / "none"), ("a",), inherits=True))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot write the cache"):
        built(tmp_path / "cache", OLD)


def test_the_cache_lies_where_the_desktop_rules_say() -> None:
    where = environments.cache_folder({"XDG_CACHE_HOME": "/cache"})
    assert where == Path("/cache/ckptdrill/venvs")
    assert environments.cache_folder({}) == Path.home() / ".cache/ckptdrill/venvs"
