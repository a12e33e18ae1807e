"""The first matrix: a plain matrix that `plan` takes as it is, honest about what it guessed."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ckptdrill import drafting, matrix, resources
from ckptdrill.cli import app
from ckptdrill.formats import stacks
from tests.formats import samples

JOBS = sorted(resources.jobs_dir().glob("*.py"))
SCRIPT = """
import argparse
import torch.distributed.checkpoint as dcp
parser = argparse.ArgumentParser()
parser.add_argument("--output-dir", required=True)
parser.add_argument("--data", required=True, help="path of: the corpus # of text")
parser.add_argument("--resume_from_checkpoint")
parser.add_argument("--save-interval", type=int)
parser.add_argument("--max-steps", type=int, default=10)
parser.add_argument("--tensor-parallel-size", type=int, default=1)
args = parser.parse_args()
dcp.save({}, checkpoint_id=f"{args.output_dir}/step_{step:06d}")
"""


def told(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    return result.exit_code, result.output + str(result.exception or "")


@pytest.mark.parametrize("job", JOBS, ids=lambda path: path.name)
def test_the_matrix_of_a_reference_job_can_be_planned_unedited(job: Path, tmp_path: Path) -> None:
    output = tmp_path / "first.yaml"
    code, out = told("init", "--program", job, "--output", output)
    assert code == 0, out
    assert told("plan", output)[0] == 0
    found = matrix.load(output)
    assert found.job.program == str(job)
    assert len(found.cells) == 3


def drafted(tmp_path: Path, text: str = SCRIPT, ranks_that_fit: int = 8) -> str:
    (tmp_path / "train.py").write_text(text)
    return drafting.draft(tmp_path / "train.py", tmp_path, None, ranks_that_fit)


def test_roles_are_guessed_from_names(tmp_path: Path) -> None:
    text = drafted(tmp_path)
    form = yaml.safe_load(text)
    job = form["job"]
    assert job["program"] == "train.py"
    words = job["args"]
    assert words[:4] == ["--output-dir", "{out}", "--save-interval", "4"]
    assert words[words.index("--tensor-parallel-size") + 1] == "{tp}"
    assert words[words.index("--data") + 1] == "FILL IN"
    assert job["resume_args"] == ["--resume_from_checkpoint", "{resume}"]
    assert job["checkpoint"] == "{out}/step_{step:06d}"
    assert form["topologies"] == {"now": {"dp": 2}, "smaller": {"dp": 1}, "larger": {"dp": 4}}


def test_comments_say_what_is_a_guess_and_what_is_not_known(tmp_path: Path) -> None:
    text = drafted(tmp_path)
    assert "# line 6: FILL IN, required: path of: the corpus # of text\n" in text
    assert "# FILL IN: --max-steps is 10; it must be 20 or more." in text
    assert "# line 5: guess: where checkpoints go\n" in text


def test_a_script_without_any_hint_still_makes_a_matrix(tmp_path: Path) -> None:
    text = drafted(tmp_path, "print('hello')\n")
    assert "# FILL IN: how the script is told where to save" in text
    assert "# FILL IN: the arguments that restore a checkpoint" in text
    assert "# FILL IN: where the checkpoint of a step appears" in text
    assert matrix.parse(text.encode(), tmp_path / "m.yaml").cells


def test_only_layouts_that_fit_are_written(tmp_path: Path) -> None:
    form = yaml.safe_load(drafted(tmp_path, ranks_that_fit=1))
    assert form["topologies"] == {"now": {"dp": 1}}
    assert matrix.parse(drafted(tmp_path, ranks_that_fit=1).encode(), tmp_path / "m.yaml").cells


def test_a_checkpoint_tells_its_name_step_and_ranks(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "step_000012"
    samples.dcp_job(checkpoint, samples.training())
    (tmp_path / "train.py").write_text(SCRIPT)
    text = drafting.draft(tmp_path / "train.py", tmp_path, checkpoint, 8)
    job = yaml.safe_load(text)["job"]
    assert (job["start_from"], job["start_step"]) == (str(checkpoint), 12)
    assert job["saves"] == [16, 20, 24]
    assert job["checkpoint"] == "{out}/step_{step:06d}"
    assert stacks.read(checkpoint).form in text
    assert matrix.parse(text.encode(), tmp_path / "m.yaml").cells


def test_an_existing_file_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    output = tmp_path / "drill.yaml"
    output.write_text("mine")
    code, out = told("init", "--program", tmp_path / "train.py", "--output", output)
    assert code != 0
    assert "exists already" in out
    assert output.read_text() == "mine"


@pytest.mark.parametrize("name", ["absent.py", "noise.py", "folder.py", "train.txt"])
def test_what_is_no_script_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "noise.py").write_bytes(bytes(range(256)))
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "train.txt").write_text("")
    output = tmp_path / "drill.yaml"
    code, out = told("init", "--program", tmp_path / name, "--output", output)
    assert code != 0
    assert name in out
    assert not output.exists()


@pytest.mark.parametrize("value", ["yes", "null", "a b", "{out}", "# x", "-", "1e3", "", "é", '"'])
def test_every_text_survives_yaml(value: str) -> None:
    assert yaml.safe_load(drafting._text(value)) == value


def test_the_script_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    text = f"open({str(marker)!r}, 'w')\n{SCRIPT}"
    drafted(tmp_path, text)
    assert not marker.exists()
