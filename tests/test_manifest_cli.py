"""The verbs of `ckptdrill manifest` as typed: what they print, where, and the exit code."""

import json
import os
import sys
from pathlib import Path

import pytest

from ckptdrill import cli, manifest
from ckptdrill.manifest import ProblemKind
from ckptdrill.manifest.record import Status
from tests.manifest.folders import FILES, make


class Typed:
    """Runs one command line; keeps what it printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self.out = ""
        self.err = ""

    def __call__(self, *arguments: str | Path) -> int:
        line = ["ckptdrill", "manifest", *map(str, arguments)]
        self._monkeypatch.setattr(sys, "argv", line)
        with pytest.raises(SystemExit) as left:
            cli.main()
        self.out, self.err = self._capsys.readouterr()
        return int(left.value.code or 0)


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    return Typed(monkeypatch, capsys)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path / "checkpoints/step-7")


def test_write_then_verify(typed: Typed, folder: Path) -> None:
    assert typed("write", folder) == 0
    assert typed.out.startswith("3 files, 7.018 kB, recorded in ")
    assert "unknown, hence null: data_cursor.consumed_samples, " in typed.out
    assert typed("verify", folder) == 0
    assert typed.out == "valid: 3 files, 7.018 kB, all read and as recorded\n"


def test_verify_names_every_problem(typed: Typed, folder: Path) -> None:
    typed("write", folder)
    (folder / "part-0.bin").write_bytes(b"zer0" * 1000)
    (folder / "new").write_bytes(b"")
    assert typed("verify", folder) == 1
    extra, differs, closing = typed.out.splitlines()
    assert extra == "extra: new: there, but not recorded"
    assert differs.startswith("checksum-differs: part-0.bin: recorded ")
    assert closing == "INVALID: 2 problems"


def test_verify_as_json(typed: Typed, folder: Path) -> None:
    typed("write", folder)
    (folder / "part-0.bin").unlink()
    assert typed("verify", folder, "--json", "--sample", "50%", "--seed", "x") == 1
    said = json.loads(typed.out)
    assert (said["valid"], said["sample"]) == (False, {"share": 0.5, "seed": "x"})
    assert said["problems"] == [
        {"kind": "missing", "path": "part-0.bin", "explanation": "recorded, but not there"}
    ]
    assert said["read_bytes"] + said["unread_bytes"] == 3018
    assert said["read_files"] + said["unread_files"] == 2


def test_a_sample_says_what_it_left_out(typed: Typed, folder: Path) -> None:
    typed("write", folder)
    assert typed("verify", folder, "--sample", "0%", "--seed", "x") == 0
    assert typed.out == (
        "sample of 0 of the bytes, seed 'x': 1 file, 18 bytes read and as recorded; "
        "2 files, 7 kB NOT read, only their sizes are as recorded\n"
    )


def test_a_manifest_elsewhere(typed: Typed, folder: Path, tmp_path: Path) -> None:
    before = sorted(folder.rglob("*"))
    assert typed("write", folder, "--output", tmp_path / "kept.json") == 0
    assert sorted(folder.rglob("*")) == before
    assert typed("verify", folder) == 1
    assert typed.out.startswith("manifest-missing: ")
    assert typed("verify", folder, "--manifest", tmp_path / "kept.json") == 0
    (tmp_path / "kept.json").write_text("{")
    assert typed("verify", folder, "--manifest", tmp_path / "kept.json") == 1


def test_write_never_replaces_a_record(typed: Typed, folder: Path) -> None:
    typed("write", folder)
    (folder / "part-0.bin").write_bytes(b"damaged")
    assert typed("write", folder) == 2
    assert "there is a manifest already" in typed.err
    assert typed("verify", folder) == 1


def test_facts_and_step(typed: Typed, folder: Path, tmp_path: Path) -> None:
    facts = tmp_path / "facts.json"
    facts.write_text('{"topology": {"dp": 4, "tp": 2}, "rng": {"policy": "continued"}}')
    assert typed("write", folder, "--facts", facts, "--step", "7", "--json") == 0
    said = json.loads(typed.out)
    assert (said["topology"]["dp"], said["rng"], said["completed_step"]) == (
        4,
        {"policy": "continued"},
        7,
    )
    assert said["storage"]["durable_commit_time_utc"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Invalid JSON"),
        ('{"topology": {"dp": -1}}', "topology.dp: "),
        ('{"topologie": {}}', "topologie: Extra inputs are not permitted"),
        ('{"status": "committed"}', "status: Extra inputs are not permitted"),
        ('{"completed_step": 5}', "--step 7, but the facts say 5"),
    ],
)
def test_facts_that_are_none(
    typed: Typed, folder: Path, tmp_path: Path, text: str, said: str
) -> None:
    facts = tmp_path / "facts.json"
    facts.write_text(text)
    assert typed("write", folder, "--facts", facts, "--step", "7") == 2
    assert said in typed.err
    assert not manifest.path_of(folder).exists()


@pytest.mark.parametrize("share", ["5", "101%", "-1%", "x%", "%", ""])
def test_a_share_that_is_none(typed: Typed, folder: Path, share: str) -> None:
    typed("write", folder)
    assert typed("verify", folder, f"--sample={share}") == 2
    assert "is no percentage" in typed.err


def test_a_seed_needs_a_sample(typed: Typed, folder: Path) -> None:
    assert typed("verify", folder, "--seed", "x") == 2


@pytest.mark.parametrize("verb", ["write", "verify", "select"])
def test_nothing_there(typed: Typed, tmp_path: Path, verb: str) -> None:
    assert typed(verb, tmp_path / "nothing") == 2
    assert typed.err.startswith("ckptdrill: no ")


def test_a_checkpoint_that_was_never_committed(typed: Typed, dcp_shard: Path) -> None:
    assert typed("write", dcp_shard) == 1
    assert "a DCP shard without .metadata" in typed.err


@pytest.fixture
def dcp_shard(tmp_path: Path) -> Path:
    return make(tmp_path / "step-1", {"__0_0.distcp": b"x"})


def test_publish_then_select(typed: Typed, folder: Path) -> None:
    root = folder.parent
    staged = folder.rename(root / "step-7.tmp")
    assert typed("publish", staged, root / "step-7") == 0
    assert typed.out.startswith(f"3 files, 7.018 kB, committed as {root / 'step-7'}\n")
    assert "latest names it\n" in typed.out
    make(root / "step-9")
    assert typed("select", root) == 0
    assert typed.out == f"{root / 'step-7'}\n"
    missing = "manifest-missing: checkpoint.manifest.json: no such file"
    assert typed.err.splitlines() == [
        f"chosen        {root / 'step-7'} (step 7): the newest that is committed and valid",
        f"no-manifest   {root / 'step-9'} (step ?): {missing}",
        f"pointer       {root / 'latest'} names 'step-7': right",
    ]
    assert typed("publish", root / "step-9", root / "step-7") == 2


def test_select_as_json(typed: Typed, folder: Path) -> None:
    typed("write", folder)
    (folder.parent / "latest").write_text("step-9")
    assert typed("select", folder.parent, "--json") == 0
    said = json.loads(typed.out)
    assert said["chosen"] == str(folder)
    assert [(g["standing"], g["completed_step"]) for g in said["generations"]] == [("chosen", 7)]
    assert said["pointers"] == [
        {"path": str(folder.parent / "latest"), "names": "step-9", "pointing": "nothing-there"}
    ]


def test_select_finds_none(typed: Typed, folder: Path) -> None:
    typed("write", folder)
    os.truncate(folder / "part-0.bin", 1)
    assert typed("select", folder.parent) == 1
    assert typed.out == ""
    assert typed.err.endswith("nothing below is committed and valid\n")
    assert typed("select", folder.parent, "--json") == 1
    assert json.loads(typed.out)["chosen"] is None


def test_select_by_a_sample_says_so(typed: Typed, folder: Path) -> None:
    typed("write", folder)
    assert typed("select", folder.parent, "--sample", "5%", "--seed", "x") == 0
    assert "read          0.05 of the bytes only, seed 'x'" in typed.err


def test_the_kinds_of_problems_are_words_of_one_form() -> None:
    assert all(kind.value == kind.name.lower().replace("_", "-") for kind in ProblemKind)
    assert len(FILES) == 3


@pytest.mark.parametrize(
    ("part", "key", "meant"),
    [
        ("topology", "wrold_size", "world_size"),
        ("topology", "World_Size", "world_size"),
        ("topology", "zerostage", "zero_stage"),
        ("fingerprints", "model_confg", "model_config"),
        ("data_cursor", "consumed_sample", "consumed_samples"),
    ],
)
def test_a_misspelt_key_of_a_part_is_refused(
    typed: Typed, folder: Path, part: str, key: str, meant: str
) -> None:
    facts = folder.with_name("facts.json")
    facts.write_text(json.dumps({part: {key: None}}))
    assert typed("write", folder, "--facts", facts) == 2
    assert f"{part}.{key}: not a key of the record (did you mean {meant!r}?)" in typed.err


def test_keys_of_the_owner_are_kept(typed: Typed, folder: Path) -> None:
    facts = folder.with_name("facts.json")
    facts.write_text('{"software": {"apex": "0.1", "cudnn": "9"}, "rng": {"sampler": "own"}}')
    assert typed("write", folder, "--facts", facts) == 0


def test_a_manifest_elsewhere_is_not_written_into_the_checkpoint(
    typed: Typed, folder: Path
) -> None:
    before = sorted(folder.iterdir())
    assert typed("write", folder, "--output", folder / "notes" / "m.json") == 2
    assert "would lie in the checkpoint" in typed.err
    assert sorted(folder.iterdir()) == before
    assert typed("write", folder, "--output", folder.parent / "m.json") == 0


def test_a_step_that_contradicts_the_record_is_not_published(typed: Typed, folder: Path) -> None:
    staged = manifest.describe(folder, manifest.Facts(completed_step=7), status=Status.IN_PROGRESS)
    manifest.write(manifest.path_of(folder), staged)
    target = folder.with_name("published")
    assert typed("publish", folder, target, "--step", "8") == 2
    assert "the writer recorded step 7" in typed.err
    assert not target.exists()
    assert typed("publish", folder, target, "--step", "7") == 0
