"""`ckptdrill inspect`: page and JSON say what is there, and no file can act on a terminal."""

import json
import sys
from pathlib import Path

import pytest

from ckptdrill import cli, inspecting
from ckptdrill.errors import ExitCode, UserError
from ckptdrill.formats import stacks
from ckptdrill.formats.classify import classify

torch = pytest.importorskip("torch")
samples = pytest.importorskip("tests.formats.samples")


def page(path: Path) -> str:
    checkpoint = stacks.read(path)
    return "\n".join(inspecting.page(checkpoint, classify(checkpoint)))


def test_the_page_names_format_class_versions_tensors_and_values(tmp_path: Path) -> None:
    said = page(samples.write(tmp_path, "deepspeed/global_step3"))
    for words in ("deepspeed", "resumable", "4 weights, and moments of 4", "ds_version 0.19.8"):
        assert words in said
    assert "optimizer.state.a.weight.exp_avg" in said
    assert "[5, 7]" in said
    assert "global_steps = 3" in said


def test_the_json_says_where_the_bytes_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    t = samples.training()
    path = samples.dcp_sharded(tmp_path / "c", t.weights, 2, 0)
    assert inspecting.inspect(path, as_json=True) is ExitCode.AS_EXPECTED
    said = json.loads(capsys.readouterr().out)
    assert (said["format"], said["class"]) == ("dcp", "model-only")
    (tensor,) = (each for each in said["tensors"] if each["name"] == "a.weight")
    raw = b""
    for chunk in tensor["chunks"]:
        content = (path / chunk["file"]).read_bytes()
        start, count = chunk["payload_offset"], 4 * chunk["sizes"][0] * chunk["sizes"][1]
        raw += content[start : start + count]
    assert raw == t.weights["a.weight"].numpy().tobytes()
    assert {"path": "__1_0.distcp", "role": "data", "rank": 1} in said["files"]


def test_control_characters_of_a_file_are_shown_as_text(tmp_path: Path) -> None:
    evil = {"model": {"\x1b[2Jw": torch.ones(1)}, "note\u202e": "\x07bell\nline"}
    torch.save(evil, tmp_path / "a.pt")
    said = page(tmp_path / "a.pt")
    assert "\x1b" not in said
    assert "\\x1b[2Jw" in said
    assert "\\x07bell\\nline" in said


def test_a_class_off_the_list_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    path = samples.write(tmp_path, "hf-trainer/checkpoint-3")
    torch.save(torch.nn.Linear(1, 1), path / "training_args.bin")
    said = page(path)
    assert "torch.nn.modules.linear.Linear" in said
    assert "resumable" in said


def test_nothing_readable_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(
        samples.torch_zip(tmp_path / "b.pt", samples.training()).read_bytes()[:900]
    )
    with pytest.raises(UserError, match="no part of the checkpoint could be read"):
        inspecting.inspect(tmp_path / "a.pt", as_json=False)


def test_the_verbs_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a = samples.write(tmp_path / "a", "dcp/step-3")
    b = samples.write(tmp_path / "b", "dcp/step-3", seed=1)
    for arguments, code in (
        (["inspect", str(a)], 0),
        (["diff", str(a), str(a)], 0),
        (["diff", str(a), str(b)], 1),
        (["diff", str(a), str(b), "--tolerance", "100", "--json"], 0),
        (["diff", str(a), str(b), "--tolerance", "nan"], 2),
        (["diff", str(a), str(tmp_path / "missing")], 2),
    ):
        monkeypatch.setattr(sys, "argv", ["ckptdrill", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert left.value.code == code, arguments
    assert "no such file" in capsys.readouterr().err
