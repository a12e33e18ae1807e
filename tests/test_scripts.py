"""Arguments and names of checkpoints, found in the text of scripts that are never run."""

from pathlib import Path

import pytest

from ckptdrill import scripts
from ckptdrill.scripts import Argument


def read(tmp_path: Path, text: str) -> scripts.Script:
    path = tmp_path / "train.py"
    path.write_text(f"raise SystemExit('never run')\n{text}\n")
    return scripts.read(path)


def by_name(script: scripts.Script) -> dict[str, Argument]:
    return {argument.name: argument for argument in script.arguments}


def test_argparse(tmp_path: Path) -> None:
    found = by_name(
        read(
            tmp_path,
            """
parser.add_argument("--out-dir", "-o", required=True, help="where it goes")
parser.add_argument("--resume", default=None)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("data")
parser.add_argument("extra", nargs="*")
parser.add_argument("-n", type=int, default=4)
parser.add_argument(*common)
""",
        )
    )
    assert list(found) == ["out_dir", "resume", "bf16", "data", "extra", "n"]
    assert found["out_dir"] == Argument("--out-dir", "out_dir", True, about="where it goes", line=3)
    assert found["bf16"].switch
    assert (found["data"].flag, found["data"].required) == ("", True)
    assert not found["extra"].required
    assert (found["n"].flag, found["n"].default) == ("-n", "4")


def test_click(tmp_path: Path) -> None:
    found = by_name(
        read(
            tmp_path,
            """
@click.command()
@click.option("--out", required=True)
@click.option("--shuffle/--no-shuffle", default=True)
@click.option("-r", "--resume-from", is_flag=True)
@click.argument("config")
def main(out, shuffle, resume_from, config): ...
""",
        )
    )
    assert found["out"].required
    assert found["shuffle"].flag == "--shuffle"
    assert found["resume_from"].switch
    assert found["config"].required


def test_typer(tmp_path: Path) -> None:
    found = by_name(
        read(
            tmp_path,
            """
def main(
    data: str,
    out_dir: Path = typer.Option(...),
    resume: str = typer.Option("", "--resume-from", help="a folder"),
    steps: Annotated[int, typer.Option(help="how many")] = 100,
    fast: Annotated[bool, typer.Option("--fast/--slow")] = False,
    config: Annotated[Path, typer.Argument()] = ...,
): ...
""",
        )
    )
    assert (found["out_dir"].flag, found["out_dir"].required) == ("--out-dir", True)
    assert (found["resume"].flag, found["resume"].about) == ("--resume-from", "a folder")
    assert (found["steps"].default, found["steps"].required) == ("100", False)
    assert (found["fast"].flag, found["fast"].switch) == ("--fast", True)
    assert (found["config"].flag, found["config"].required) == ("", True)


DATACLASS = """
@dataclass
class Arguments:
    out: str
    lr: float = 1e-3
    betas: list = field(default_factory=list)
    data: str = field(default="c4", metadata={"help": "the corpus"})
    debug: bool = False
"""


def test_dataclasses_that_become_arguments(tmp_path: Path) -> None:
    text = f"{DATACLASS}\nparser = HfArgumentParser((Arguments, TrainingArguments))"
    found = by_name(read(tmp_path, text))
    assert found["out"].required
    assert not found["betas"].required
    assert (found["data"].default, found["data"].about) == ("c4", "the corpus")
    assert found["debug"].switch
    assert {"output_dir", "resume_from_checkpoint", "save_steps"} <= set(found)


def test_dataclasses_of_other_use_are_no_arguments(tmp_path: Path) -> None:
    assert by_name(read(tmp_path, DATACLASS)) == {}


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ('out / f"step-{step}"', "step-{step}"),
        ('f"{args.out}/ckpt_{state.step:07d}.pt"', "ckpt_{step:07d}.pt"),
        ('f"{args.out_dir}/{step}"', None),
        ('os.path.join(out, "checkpoint-%d" % global_step)', "checkpoint-{step}"),
        ('"iter_%07d" % iteration', "iter_{step:07d}"),
        ('"model_{}.pt".format(step)', "model_{step}.pt"),
        ('"model_{:05d}.pt".format(step)', "model_{step:05d}.pt"),
        ('f"step {step} loss {loss}"', None),
        ('f"step-{step}-{rank}"', None),
        ('f"step-*/rank{step}"', None),
        ('f"global_step{engine.global_steps}/"', "global_step{step}"),
        ("f\"checkpoint-{run['step']}\"", "checkpoint-{step}"),
        ('f"checkpoint-{epoch}"', None),
        ('f"../step-{step}"', None),
    ],
)
def test_names_of_checkpoints(tmp_path: Path, code: str, name: str | None) -> None:
    assert read(tmp_path, code).names == ((name,) if name else ())


def test_the_name_that_ends_with_its_step_is_the_likeliest(tmp_path: Path) -> None:
    text = 'f"step-{step}-inside"\nf"step-{step}/rank0.pt"\nf"step-{step}"'
    assert read(tmp_path, text).names[0] == "step-{step}"


def test_the_first_of_the_likeliest_pattern(tmp_path: Path) -> None:
    text = 'p.add_argument("--log-dir")\np.add_argument("--output_dir")'
    script = read(tmp_path, text)
    assert script.first("output_?dir", "log_dir") == script.arguments[1]
    assert script.first("nothing") is None


@pytest.mark.parametrize(
    "text",
    ["add_argument()", "add_argument(*x, **y)", "x.add_argument(3)", "f''", "f'{x}'", "'%' % x"],
)
def test_odd_code_is_no_argument(tmp_path: Path, text: str) -> None:
    script = read(tmp_path, text)
    assert (script.arguments, script.names) == ((), ())
