"""The shipped files are found from a checkout and from an installed wheel, whatever the folder."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from ckptdrill import resources

_SHOW = (
    "import ckptdrill.resources as r\n"
    "for f in (r.drills_dir(), r.matrices_dir(), r.jobs_dir(), r.observer_dir()): print(f)\n"
)


def test_a_checkout_uses_its_own_root_folders(repository: Path) -> None:
    assert resources.drills_dir() == repository / "drills"
    assert resources.matrices_dir() == repository / "matrices"
    assert resources.jobs_dir() == repository / "drills/jobs"
    assert resources.observer_dir() == repository / "ckptdrill/observer"


def _run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed_python(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with ckptdrill from a freshly built wheel, and none of its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    offline = ("--no-deps", "--no-index", "--quiet")
    _run(*pip, "wheel", *offline, "--no-build-isolation", "-w", folder, repository, cwd=folder)
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv/bin/python"
    (wheel,) = folder.glob("ckptdrill-*.whl")
    _run(*pip, "--python", python, "install", *offline, wheel, cwd=folder)
    return python


def _files_below(folder: Path) -> set[Path]:
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path for path in files if "__pycache__" not in path.parts}


@pytest.mark.e2e
def test_an_installed_ckptdrill_brings_drills_and_matrices(
    installed_python: Path, repository: Path, tmp_path: Path
) -> None:
    shown = _run(installed_python, "-I", "-c", _SHOW, cwd=tmp_path)
    drills, matrices, jobs, observer = map(Path, shown.split())
    for folder in (drills, matrices, jobs, observer):
        assert folder.is_relative_to(installed_python.parent.parent)
    assert _files_below(drills) == _files_below(repository / "drills")
    ours = {path for path in _files_below(repository / "matrices") if path.suffix != ".png"}
    assert _files_below(matrices) == ours  # the picture of the README stays at home
    assert _files_below(observer) == _files_below(repository / "ckptdrill/observer")


@pytest.mark.e2e
def test_the_installed_command_starts_in_any_folder(installed_python: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    script = installed_python.parent / "ckptdrill"
    assert "Usage" in _run(script, "--help", cwd=tmp_path, env=env)
