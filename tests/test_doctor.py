"""The look over a machine: each thing that can be wrong is found, and a good machine passes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ckptdrill import doctor
from ckptdrill.cli import app
from ckptdrill.doctor import Machine, Standing

GIB = 1 << 30
GOOD = Machine(
    platform="linux",
    python="/opt/train/bin/python",
    packages={"python": "3.11.7", "torch": "2.13.0+cpu", "numpy": "2.4.0"},
    gpus=("NVIDIA H200, 580.1", "NVIDIA H200, 580.1"),
    gpu_error=None,
    devices=("0", "1"),
    cores=16,
    memory_bytes=64 * GIB,
    runs="/var/lib/drills",
    runs_error=None,
    free_bytes=500 * GIB,
    clones=True,
    shm_bytes=8 * GIB,
    limits={"files": 1 << 20, "file size": None, "processor time": None},
    port_error=None,
    bind_error=None,
)
LIMITS = {"files": 1024, "file size": 1 << 20, "processor time": 60}


def standings(machine: Machine) -> dict[str, Standing]:
    return {each.name: each.standing for each in doctor.findings(machine)}


def test_a_good_machine_has_nothing_to_mend() -> None:
    found = doctor.findings(GOOD)
    assert {each.standing for each in found} == {Standing.OK}
    assert {each.next_move for each in found} == {""}
    assert list(doctor.page(found))[-1] == "failing: nothing; warnings: none"


@pytest.mark.parametrize(
    ("changes", "name", "standing"),
    [
        ({"platform": "darwin"}, "system", "failing"),
        ({"packages": None}, "job python", "failing"),
        ({"packages": {"python": "3.8.1", "torch": "2.4.0"}}, "job python", "failing"),
        ({"packages": {"python": "3.11.7"}}, "job torch", "failing"),
        ({"packages": {"python": "3.11.7", "torch": "2.3.1"}}, "job torch", "failing"),
        ({"gpu_error": "nvidia-smi: no driver", "gpus": ()}, "GPUs", "warning"),
        ({"devices": ()}, "GPUs", "warning"),
        ({"gpus": (), "devices": ()}, "GPUs", "ok"),
        ({"cores": 1}, "cores", "warning"),
        ({"memory_bytes": GIB}, "memory", "warning"),
        ({"memory_bytes": None}, "memory", "warning"),
        ({"runs_error": "Permission denied"}, "runs folder", "failing"),
        ({"free_bytes": 1000}, "runs folder", "failing"),
        ({"free_bytes": GIB}, "runs folder", "warning"),
        ({"clones": False}, "copies", "warning"),
        ({"bind_error": "Operation not permitted"}, "isolation", "warning"),
        ({"shm_bytes": 64 << 20}, "shared memory", "warning"),
        ({"shm_bytes": None}, "shared memory", "warning"),
        ({"port_error": "Cannot assign requested address"}, "ports", "failing"),
        ({"limits": LIMITS}, "open files", "warning"),
        ({"limits": LIMITS}, "file size", "warning"),
        ({"limits": LIMITS}, "processor time", "warning"),
    ],
)
def test_what_is_wrong_is_found_with_a_next_move(
    changes: dict[str, Any], name: str, standing: str
) -> None:
    machine = replace(GOOD, **changes)
    (found,) = [each for each in doctor.findings(machine) if each.name == name]
    assert found.standing == standing
    assert bool(found.next_move) is (standing != "ok")


@pytest.mark.parametrize("version", ["2.10.0", "2.4.0a0+git1234", "3.0"])
def test_versions_are_compared_as_numbers(version: str) -> None:
    machine = replace(GOOD, packages={"python": "3.11.7", "torch": version})
    assert standings(machine)["job torch"] is Standing.OK


def test_this_machine(tmp_path: Path) -> None:
    """Really asked: the interpreter of the tests has torch, and the folder can be written."""
    runs = tmp_path / "not" / "there"
    result = CliRunner().invoke(
        app, ["doctor", "--python", sys.executable, "--runs", str(runs), "--json"]
    )
    found = {each["name"]: each for each in json.loads(result.output)}
    assert found["job torch"]["standing"] == "ok"
    assert found["ports"]["standing"] == "ok"
    assert str(tmp_path) in found["runs folder"]["found"]
    assert not runs.exists()
    assert list(tmp_path.iterdir()) == []
    failing = any(each["standing"] == "failing" for each in found.values())
    assert result.exit_code == int(failing)


def test_an_interpreter_that_does_not_exist_is_failing(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--python", "/nowhere/python"])
    assert result.exit_code == 1
    assert "/nowhere/python cannot be asked" in result.output
    assert "next: name the job's interpreter" in result.output


def test_a_folder_that_cannot_be_written_is_failing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "NamedTemporaryFile", refuse)
    assert doctor._try_folder(tmp_path) == ("Permission denied", False)


@pytest.mark.parametrize(
    ("code", "text", "gpus", "error"),
    [
        (0, "NVIDIA H200, 580.1\nNVIDIA H200, 580.1\n", 2, None),
        (9, "No devices were found\n", 0, "nvidia-smi: No devices were found"),
        (9, "", 0, "nvidia-smi: exit code 9"),
    ],
)
def test_gpus_are_those_of_nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, code: int, text: str, gpus: int, error: str | None
) -> None:
    done = subprocess.CompletedProcess([], code, text, "")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: done)
    found, said = doctor._gpus()
    assert (len(found), said) == (gpus, error)
