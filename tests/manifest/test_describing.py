"""What a manifest says of a checkpoint: from its files, from its owner, and what nobody could."""

import hashlib
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from ckptdrill import manifest
from ckptdrill.errors import ExitCode, UserError
from ckptdrill.manifest import files, hashing
from ckptdrill.manifest.record import Facts, Software, Topology
from tests.manifest.folders import FILES, make


def test_every_file_with_the_checksum_of_sha256sum(tmp_path: Path) -> None:
    folder = make(tmp_path / "step-7")
    described = manifest.describe(folder)
    assert [(file.path, file.size_bytes) for file in described.files] == [
        (name, len(data)) for name, data in sorted(FILES.items())
    ]
    lines = "".join(f"{file.sha256}  {file.path}\n" for file in described.files)
    command = ["sha256sum", "--check", "--strict"]
    done = subprocess.run(command, input=lines, cwd=folder, text=True, check=False)
    assert done.returncode == 0


def test_a_checkpoint_of_one_file(torch_save_file: Path) -> None:
    described = manifest.describe(torch_save_file)
    assert [file.path for file in described.files] == [torch_save_file.name]
    assert described.format == "torch.save"
    assert described.commit_marker is None
    assert "commit_marker" not in described.unknown


def test_what_the_files_of_dcp_tell(dcp_folder: Path) -> None:
    described = manifest.describe(dcp_folder)
    marker = described.commit_marker
    assert described.format == "dcp"
    assert marker is not None
    assert marker.file == ".metadata"
    assert marker.sha256 == hashlib.sha256((dcp_folder / ".metadata").read_bytes()).hexdigest()
    keys = b"model.bias\nmodel.weight\n"
    shapes = b"model.bias\tfloat32\t3\nmodel.weight\tfloat32\t3x2\n"
    assert described.state_keys_sha256 == hashlib.sha256(keys).hexdigest()
    assert described.shapes_sha256 == hashlib.sha256(shapes).hexdigest()


def test_the_same_tensors_in_another_format_have_the_same_digests(
    dcp_folder: Path, torch_save_file: Path
) -> None:
    one, other = manifest.describe(dcp_folder), manifest.describe(torch_save_file)
    assert one.state_keys_sha256 == other.state_keys_sha256
    assert one.shapes_sha256 == other.shapes_sha256


def test_what_nobody_could_tell_is_null_and_named(tmp_path: Path) -> None:
    described = manifest.describe(make(tmp_path / "step-7"))
    value = json.loads(described.to_json())
    for name in value["unknown"]:
        item = value
        for part in name.split("."):
            item = item[part]
        assert item is None
    assert {"topology.tp", "software.torch", "rng.policy", "format"} <= set(value["unknown"])
    assert "storage.durable_commit_time_utc" in value["unknown"]
    assert "completed_step" not in value["unknown"]


def test_what_the_owner_tells(tmp_path: Path) -> None:
    facts = Facts(
        checkpoint_id="run-5/7",
        software=Software.model_validate({"torch": "2.13.0", "apex": "24.04"}),
        topology=Topology(world_size=8, dp=4, tp=2),
        omitted_state=("rng",),
        relaxations=({"padded": "embedding"},),
    )
    value = json.loads(manifest.describe(make(tmp_path / "step-7"), facts).to_json())
    assert value["checkpoint_id"] == "run-5/7"
    assert value["software"] | {"torch": "2.13.0", "apex": "24.04"} == value["software"]
    assert value["topology"]["tp"] == 2
    assert value["omitted_state"] == ["rng"]
    assert value["relaxations"] == [{"padded": "embedding"}]
    assert "topology.tp" not in value["unknown"]
    assert "topology.pp" in value["unknown"]


def test_the_step_of_the_trainer_and_a_contradiction(tmp_path: Path) -> None:
    folder = make(tmp_path / "step-7")
    assert manifest.describe(folder).completed_step == 7
    assert manifest.describe(folder, Facts(completed_step=7)).completed_step == 7
    with pytest.raises(UserError, match="step 8 was given"):
        manifest.describe(folder, Facts(completed_step=8))


@pytest.mark.parametrize(
    ("epoch", "expected"), [("2.5", 2.5), ("3", 3.0), ("-1", None), ("NaN", None), ('"2"', None)]
)
def test_the_epoch_of_the_trainer(tmp_path: Path, epoch: str, expected: float | None) -> None:
    state = f'{{"global_step": 7, "epoch": {epoch}}}'.encode()
    described = manifest.describe(make(tmp_path / "step-7", {"trainer_state.json": state}))
    assert described.training_state.epoch == expected
    assert ("training_state.epoch" in described.unknown) == (expected is None)


@pytest.mark.parametrize("text", [b"{", b"[1]", b'{"global_step": true}', b"[" * 100_000])
def test_a_trainer_state_that_tells_no_step(tmp_path: Path, text: bytes) -> None:
    folder = make(tmp_path / "step-7", {**FILES, "trainer_state.json": text})
    assert manifest.describe(folder).completed_step is None


def test_an_identifier_of_the_content(tmp_path: Path) -> None:
    one = manifest.describe(make(tmp_path / "one"))
    same = manifest.describe(make(tmp_path / "same"))
    other = manifest.describe(make(tmp_path / "other", {**FILES, "part-0.bin": b"x"}))
    assert one.checkpoint_id == same.checkpoint_id != other.checkpoint_id


def test_describing_writes_nothing(tmp_path: Path) -> None:
    folder = make(tmp_path / "step-7")
    before = files.listing(folder)
    manifest.describe(folder)
    assert files.listing(folder) == before
    assert list(tmp_path.iterdir()) == [folder]


def test_a_manifest_does_not_list_itself(tmp_path: Path) -> None:
    folder = make(tmp_path / "step-7")
    manifest.commit(folder, manifest.describe(folder))
    assert len(manifest.describe(folder).files) == len(FILES)


def test_a_dcp_save_that_was_never_committed(dcp_folder: Path) -> None:
    (dcp_folder / ".metadata").unlink()
    with pytest.raises(UserError, match="a DCP shard without") as raised:
        manifest.describe(dcp_folder)
    assert raised.value.code is ExitCode.UNSUPPORTED


@pytest.mark.parametrize("name", ["7.orbax-checkpoint-tmp-123", "step-7.in-progress", "step.tmp"])
def test_a_name_of_a_save_in_progress(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="the name of a save in progress"):
        manifest.describe(make(tmp_path / name))


def test_a_pipe_is_refused_and_not_opened(tmp_path: Path) -> None:
    folder = make(tmp_path / "step-7")
    os.mkfifo(folder / "pipe")
    with pytest.raises(UserError, match="pipe is neither a file nor a folder"):
        manifest.describe(folder)


@pytest.mark.parametrize("target", ["/etc/passwd", "../secret", "sub/../../secret"])
def test_a_link_that_leads_out_is_refused(tmp_path: Path, target: str) -> None:
    folder = make(tmp_path / "step-7")
    (tmp_path / "secret").write_text("x")
    (folder / "link").symlink_to(target)
    with pytest.raises(UserError, match="the link link leads out of the checkpoint"):
        manifest.describe(folder)


def test_a_link_inside_is_recorded_by_its_text(tmp_path: Path) -> None:
    folder = make(tmp_path / "step-7")
    (folder / "link").symlink_to("sub/part-1.bin")
    described = manifest.describe(folder)
    assert [(link.path, link.target) for link in described.links] == [("link", "sub/part-1.bin")]
    assert len(described.files) == len(FILES)


def test_names_that_cannot_be_written_down(tmp_path: Path) -> None:
    folder = make(tmp_path / "step-7")
    (folder / "a\nb").write_bytes(b"")
    with pytest.raises(UserError, match=r"the name a\\nb cannot be written down"):
        manifest.describe(folder)
    (folder / "a\nb").unlink()
    (folder / os.fsdecode(b"\xff")).write_bytes(b"")
    with pytest.raises(UserError, match="cannot be written down"):
        manifest.describe(folder)


@pytest.mark.parametrize("what", ["nothing", "empty", "pipe"])
def test_no_checkpoint_there(tmp_path: Path, what: str) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError):
        manifest.describe(tmp_path / what)


def test_a_file_that_changes_while_it_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "step-7")
    real = hashing._sha256

    def hashed(descriptor: int, size_bytes: int, stop: threading.Event) -> tuple[str, int]:
        result = real(descriptor, size_bytes, stop)
        with (folder / "part-0.bin").open("ab") as stream:
            stream.write(b"more")
        return result

    monkeypatch.setattr(hashing, "_sha256", hashed)
    with pytest.raises(UserError, match="changed-while-read: part-0"):
        manifest.describe(folder, workers=1)


def test_a_file_that_appears_while_others_are_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "step-7")
    real = hashing._sha256

    def hashed(descriptor: int, size_bytes: int, stop: threading.Event) -> tuple[str, int]:
        (folder / "late.bin").write_bytes(b"late")
        return real(descriptor, size_bytes, stop)

    monkeypatch.setattr(hashing, "_sha256", hashed)
    with pytest.raises(UserError, match="changed while the checkpoint was hashed"):
        manifest.describe(folder)


def test_a_copy_has_the_same_manifest_but_for_the_time_of_its_marker(tmp_path: Path) -> None:
    folder = make(tmp_path / "step-7")
    copy = shutil.copytree(folder, tmp_path / "copy")
    one, other = manifest.describe(folder), manifest.describe(copy)
    assert one.files == other.files
    assert one.model_copy(update={"commit_marker": None}) == other.model_copy(
        update={"commit_marker": None}
    )
