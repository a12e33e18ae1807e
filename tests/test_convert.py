"""A conversion between save and restore: what it is told, what is refused, what counts as whole.

Converters are small scripts in real cages; the checkpoint is whatever they can read. What the judge
makes of a record is in tests/judge/test_conversion.py.
"""

from __future__ import annotations

import shutil
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptdrill import convert, matrix, resources
from ckptdrill import plan as plans
from ckptdrill.errors import UserError
from ckptdrill.model import Convert
from ckptdrill.step import Setting, describe, out_of_reach, restored_path, unmet
from ckptdrill.store import RunFolder, read_json

TEXT = """
version: 1
job:
  module: trainer
  args: [--out, "{out}"]
  resume_args: [--resume, "{resume}"]
  checkpoint: "{out}/step-{step}"
  saves: [4]
topologies:
  two: {dp_shard: 2}
  four: {dp_shard: 4, args: [--wide]}
conversions:
  flip:
    command: ["{python}", SCRIPT, "{source_checkpoint}", "{converted}", --ranks, "{world_size}"]
    resume_args: [--resume, "{resume}", --flipped]
    timeout_s: 20
matrix:
  - {source: two, targets: [two, four]}
  - {source: two, targets: [two, four], conversion: flip}
"""
COPIES = """
import pathlib, sys
source, converted = map(pathlib.Path, sys.argv[1:3])
assert sys.argv[3:] == ["--ranks", "2"]
converted.mkdir()
(converted / "shard").write_bytes((source / "shard").read_bytes()[::-1])
print("converted")
"""


def setting(folder: Path, script: str, **keys: Any) -> Setting:
    """A run whose source has saved step 4, with this converter."""
    folder.mkdir(exist_ok=True)
    path = folder / "converter.py"
    path.write_text(script)
    text = TEXT.replace("SCRIPT", str(path))
    for key, value in keys.items():
        text = text.replace("timeout_s: 20", f"timeout_s: 20\n    {key}: {value}")
    parsed = matrix.parse(text.encode(), folder / "m.yaml")
    run = RunFolder(folder / "run")
    (run.observer_pack / "ckptdrill_observer").mkdir(parents=True)
    for module in resources.observer_dir().glob("*.py"):
        shutil.copy(module, run.observer_pack / "ckptdrill_observer")
    found = Setting(parsed, run, plans.steps_of(plans.plan_all(parsed)))
    shard = run.work("source.two") / "out/step-4/shard"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(bytes(range(64)))
    return found


def step_of(of: Setting) -> Convert:
    (step,) = (each for each in of.steps.values() if isinstance(each, Convert))
    return step


def carried_out(of: Setting) -> tuple[dict[str, Any], str | None]:
    """The record of the conversion, and why nothing can be restored from it."""
    step = step_of(of)
    running = convert.start(of, step)
    end = time.monotonic() + 60
    while not running.poll():
        assert time.monotonic() < end
        time.sleep(0.01)
    lost = convert.close(of, step)
    return read_json(of.run.conversion(step.id)), lost


# --------------------------------------------------------------------------------------------------
# What is planned


def test_cells_of_a_source_share_one_conversion(tmp_path: Path) -> None:
    of = setting(tmp_path, COPIES)
    assert [cell.id for cell in of.matrix.cells if cell.conversion] == [
        "two_to_two.baseline.via-flip",
        "two_to_four.dp-grow.via-flip",
    ]
    step = step_of(of)
    assert (step.id, step.after) == ("convert.flip.two", ("source.two",))
    waiting = [each.id for each in of.steps.values() if step.id in each.after]
    assert waiting == [
        "restore.two_to_two.baseline.via-flip",
        "restore.two_to_four.dp-grow.via-flip",
    ]


def test_the_converted_restore_is_told_so_and_the_native_one_is_not(tmp_path: Path) -> None:
    of = setting(tmp_path, COPIES)
    told = {
        name: describe(of, of.launch(f"restore.{name}"), "torchrun")["args"][2:]
        for name in ("two_to_four.dp-grow", "two_to_four.dp-grow.via-flip")
    }
    native, flipped = told.values()
    assert native[:2] == flipped[:2] == ["--wide", "--resume"]
    assert native[2].endswith("/step-4")
    assert flipped[2].endswith("/step-4_flip")
    assert flipped[3:] == ["--flipped"]


def test_a_source_that_saved_nothing_is_not_converted(tmp_path: Path) -> None:
    of = setting(tmp_path, COPIES)
    shutil.rmtree(of.run.work("source.two") / "out/step-4")
    assert "there is no checkpoint" in str(unmet(of, step_of(of)))


# --------------------------------------------------------------------------------------------------
# What is done


@pytest.mark.e2e
def test_the_result_is_what_the_restore_is_given(tmp_path: Path) -> None:
    of = setting(tmp_path, COPIES)
    record, lost = carried_out(of)
    assert lost is None
    assert (record["ended_badly"], record["refused"], record["problems"]) == (None, False, [])
    assert (record["source_bytes"], record["converted_bytes"]) == (64, 64)
    assert 0 < record["took_s"] < 60
    restore = of.launch("restore.two_to_four.dp-grow.via-flip")
    given = restored_path(of, restore)
    assert given is not None
    assert (given / "shard").read_bytes() == bytes(range(64))[::-1]
    assert not (given.parent / "step-4").exists()  # the copy has served
    for launch in (of.launch("source.two"), restore):
        assert str(given.parent) in out_of_reach(of, launch)


@pytest.mark.e2e
def test_a_converter_that_stops_has_refused_in_its_own_words(tmp_path: Path) -> None:
    record, lost = carried_out(setting(tmp_path, "raise ValueError('stage 0 has no shards')"))
    assert (record["refused"], record["message"]) == (True, "ValueError: stage 0 has no shards")
    assert lost == "ended with exit code 1"


@pytest.mark.e2e
def test_a_converter_that_is_not_there_has_refused_nothing(tmp_path: Path) -> None:
    record, lost = carried_out(setting(tmp_path, "import a_converter_nobody_has"))
    assert (record["refused"], lost) == (False, "ended with exit code 1")
    assert "No module named" in record["message"]


@pytest.mark.e2e
def test_a_converter_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    script = "import subprocess\nsubprocess.run(['sleep', '600'])"
    of = setting(tmp_path, script)
    hasty = of.matrix.conversions["flip"]
    object.__setattr__(hasty, "timeout_s", 0.5)
    record, lost = carried_out(of)
    assert (record["timed_out"], record["refused"]) == (True, False)
    assert "exceeded its time limit" in str(lost)


@pytest.mark.e2e
@pytest.mark.parametrize("lost", ["", "head.bias/exp_avg.pt"])
def test_a_converter_that_ends_well_is_not_believed(tmp_path: Path, lost: str) -> None:
    """One that leaves a file out ends as the one that leaves none out does."""
    script = COPIES.partition("converted.mkdir()")[0] + (
        "import shutil\nshutil.copytree(source, converted)\n"
        f"(converted / 'zero' / {lost!r}).unlink() if {lost!r} else None\n"
        "(converted.parent / 'latest_universal').write_text(converted.name)\n"
    )
    of = setting(tmp_path, script)
    universal(of.run.work("source.two") / "out/step-4", None)
    record, why = carried_out(of)
    assert record["ended_badly"] is None
    missing = ["head.bias has no exp_avg.pt, which other parameters have"] if lost else []
    assert (record["problems"], record["problem_count"]) == (missing, len(missing))
    assert why == (f"left no whole checkpoint: {missing[0]}" if lost else None)


@pytest.mark.e2e
def test_the_source_is_out_of_the_converters_reach(tmp_path: Path) -> None:
    """It changes what it is given, a private copy; the original stays as it was."""
    script = COPIES + "(source / 'shard').write_bytes(b'')\n"
    of = setting(tmp_path, script)
    _, lost = carried_out(of)
    assert lost is None
    shard = of.run.work("source.two") / "out/step-4/shard"
    assert shard.read_bytes() == bytes(range(64))


def test_too_little_room_is_refused_before_anything_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")(1000, 873, 127)  # noqa: PYI024 - as shutil's
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda _: usage)
    of = setting(tmp_path, COPIES)
    with pytest.raises(UserError, match=r"64 bytes needs 128 bytes, 127 are free"):
        convert.start(of, step_of(of))
    assert not (of.run.work("convert.flip.two") / "step-4").exists()
    enough = setting(tmp_path / "other", COPIES, space_factor=1.5)
    convert._require_room(enough.run.work("source.two"), tmp_path, 1.5)


# --------------------------------------------------------------------------------------------------
# What is whole


def universal(folder: Path, pointer: str | None, *, lost: str = "") -> Path:
    """A universal checkpoint of three parameters, with its pointer at `pointer` from there."""
    for parameter in ("embed.weight", "head.bias", "norm"):
        place = folder / "zero" / parameter
        place.mkdir(parents=True)
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            if f"{parameter}/{state}" != lost:
                torch.save({"param": torch.ones(2, 3)}, place / f"{state}.pt")
    if pointer is not None:
        (folder / pointer).write_text(folder.name)
    return folder


BESIDE = f"../{convert.POINTER}"


def test_a_whole_universal_checkpoint_has_no_problem(tmp_path: Path) -> None:
    folder = universal(tmp_path / "step-4_uni", BESIDE)
    looked = convert._looked_at(folder)
    assert looked == {"form": "deepspeed-universal", "problems": []}


def test_a_trailing_slash_is_diagnosed(tmp_path: Path) -> None:
    folder = universal(tmp_path / "step-4_uni", convert.POINTER)
    (problem,) = convert._looked_at(folder)["problems"]
    assert "trailing slash" in problem


@pytest.mark.parametrize(
    ("text", "said"), [(None, "there is no latest_universal"), ("step-9", "names 'step-9'")]
)
def test_the_pointer_must_name_the_result(tmp_path: Path, text: str | None, said: str) -> None:
    folder = universal(tmp_path / "step-4_uni", None)
    if text is not None:
        (tmp_path / convert.POINTER).write_text(text)
    (problem,) = convert._looked_at(folder)["problems"]
    assert said in problem


@pytest.mark.parametrize("state", ["exp_avg", "exp_avg_sq"])
def test_a_parameter_without_one_of_its_files_is_named(tmp_path: Path, state: str) -> None:
    folder = universal(tmp_path / "step-4_uni", BESIDE, lost=f"head.bias/{state}")
    problems = convert._looked_at(folder)["problems"]
    assert problems == [f"head.bias has no {state}.pt, which other parameters have"]


def test_nothing_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert convert._looked_at(tmp_path / "empty")["problems"] == ["nothing is at empty"]


def test_the_last_exception_is_the_word_of_the_stack(tmp_path: Path) -> None:
    said = "Traceback\n  File x\nAssertionError: DS universal wants stage 1\n\nwarned again\n"
    (tmp_path / "launcher.err").write_text(said)
    assert convert._message(tmp_path) == "AssertionError: DS universal wants stage 1"
