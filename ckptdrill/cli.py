"""The command line: verbs only, each a few lines over the module that does the work.

`main` is the program: it turns the one user error into three lines on standard error and an exit
code, and anything unforeseen into exit code 70 with its traceback in a file, not on the screen.
"""

from __future__ import annotations

import json
import sys
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Optional

import typer

from ckptdrill import __version__
from ckptdrill.errors import EXIT_CODE_MEANING, ExitCode, UserError

_EXIT_CODES = "\n".join(f"{code.value:>3}  {text}" for code, text in EXIT_CODE_MEANING.items())

app = typer.Typer(
    name="ckptdrill",
    help="Will the next run continue the same training? Restore a real checkpoint with your own, "
    "unedited script under every planned target and fault, and get a verdict per cell.",
    epilog=f"Exit codes:\n\n{_EXIT_CODES}",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

MatrixPath = Annotated[Path, typer.Argument(help="The matrix file.", show_default=False)]
RunPath = Annotated[Path, typer.Argument(help="A run folder, or `latest` in runs/<matrix>/.")]
Python = Annotated[
    Optional[str],  # noqa: UP045 - typer reads this form
    typer.Option(
        "--python", help="Interpreter of the environment `default` (has the job's torch)."
    ),
]


@app.command()
def run(
    matrix: MatrixPath,
    python: Python = None,
    runs: Annotated[Path, typer.Option(help="Folder that holds all runs.")] = Path("runs"),
    launcher: Annotated[
        str, typer.Option(help="auto, warm or torchrun (cold: the production command line).")
    ] = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the newest run of this matrix.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the checkpoints that the drills restored.")
    ] = False,
) -> None:
    """Drill every cell of a matrix, judge it, and write the evidence packet."""
    from ckptdrill import verbs

    raise typer.Exit(verbs.run(matrix, python, runs, launcher, resume=resume, keep=keep))


@app.command()
def plan(matrix: MatrixPath, python: Python = None) -> None:
    """Show what a run would start: launches, the cells that share them, devices, time."""
    from ckptdrill import verbs

    raise typer.Exit(verbs.plan(matrix, python))


@app.command()
def judge(run_folder: RunPath) -> None:
    """Judge the stored facts of a run again, without a launch, and render the packet anew."""
    from ckptdrill import verbs

    raise typer.Exit(verbs.judge(run_folder))


@app.command()
def verify(packet: RunPath) -> None:
    """Compare every file of a packet with its sha256 list. Needs no job environment."""
    from ckptdrill import verbs

    raise typer.Exit(verbs.verify(packet))


@app.command("list")
def list_() -> None:
    """The drills, what each claims, its parameters; and every reason a verdict can have."""
    from ckptdrill import verbs

    raise typer.Exit(verbs.list_drills())


@app.command()
def schema() -> None:
    """Print the JSON Schema of a matrix file, for editors."""
    from ckptdrill import matrix

    print(json.dumps(matrix.json_schema(), indent=2))  # noqa: T201 - the output of the verb


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"ckptdrill {__version__}")  # noqa: T201 - the output of the option
        raise typer.Exit


def main() -> None:
    """Run the command line and leave with its exit code."""
    try:
        app(standalone_mode=True)
    except UserError as error:
        print(f"ckptdrill: {error}", file=sys.stderr)  # noqa: T201 - errors go to standard error
        sys.exit(error.code)
    except Exception:  # noqa: BLE001 - a defect of ckptdrill must still end in a known exit code
        sys.exit(_report_defect())


def _report_defect() -> ExitCode:
    name = f"ckptdrill-defect-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.txt"
    text = traceback.format_exc()
    last = text.strip().splitlines()[-1]
    print(f"ckptdrill: internal error: {last}", file=sys.stderr)  # noqa: T201 - as above
    try:
        Path(name).write_text(f"ckptdrill {__version__} {sys.argv}\n\n{text}", encoding="utf-8")
        print(f"  next:  please report it with {name}", file=sys.stderr)  # noqa: T201 - as above
    except OSError:
        print(text, file=sys.stderr)  # noqa: T201 - as above
    return ExitCode.INTERNAL
