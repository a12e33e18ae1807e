"""The verbs of daily use: what comes before the first run, and what goes on every night.

Each is a few lines over the module that does the work, as in `cli`, which takes them over.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from ckptdrill.errors import EXIT_CODE_MEANING, ExitCode
from ckptdrill.manual import page
from ckptdrill.timetables import Kind

_INTERNAL = {ExitCode.INTERNAL: EXIT_CODE_MEANING[ExitCode.INTERNAL]}
_OF_DOCTOR = {
    ExitCode.AS_EXPECTED: "nothing is failing",
    ExitCode.UNSUPPORTED: "something is failing: a run would end there",
    ExitCode.USAGE: "usage error",
    **_INTERNAL,
}
_OF_INIT = {
    ExitCode.AS_EXPECTED: "the matrix is written",
    ExitCode.USAGE: "usage error, no such script or checkpoint, or the file exists already",
    **_INTERNAL,
}
_OF_HISTORY = {
    ExitCode.AS_EXPECTED: "printed",
    ExitCode.USAGE: "usage error, or there is no run",
    **_INTERNAL,
}

app = typer.Typer()

MatrixPath = Annotated[
    Path, typer.Argument(metavar="MATRIX", help="The matrix file (YAML).", show_default=False)
]
Python = Annotated[
    Optional[str],  # noqa: UP045 - typer reads this form
    typer.Option(
        "--python", help="Interpreter of the environment `default`: the one with the job's torch."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
# What only `nightly` takes.
Launcher = Annotated[str, typer.Option(help="As in `ckptdrill run`: auto, warm or torchrun.")]
BudgetS = Annotated[
    Optional[float],  # noqa: UP045 - as above
    typer.Option(
        "--budget-s",
        help="Seconds after which no launch begins or goes on. First come cells never run, "
        "then those that failed last, then the oldest evidence.",
    ),
]
KeepRuns = Annotated[
    int, typer.Option(help="Keep so many of the newest runs; older ones may be removed.")
]
KeepDays = Annotated[
    Optional[float],  # noqa: UP045 - as above
    typer.Option(help="Keep also every run that is not older than so many days."),
]
Keep = Annotated[
    bool, typer.Option("--keep", help="Keep all checkpoints of the runs that are kept.")
]
MetricsFile = Annotated[
    Optional[Path],  # noqa: UP045 - as above
    typer.Option(help="Write metrics of all runs there, for node_exporter (NAME.prom)."),
]
MaxAge = Annotated[
    Optional[str],  # noqa: UP045 - as above
    typer.Option(help="Exit with 3 when no drill-validated resume point is as young: 36h, 7d."),
]
SignKey = Annotated[
    Optional[Path],  # noqa: UP045 - as above
    typer.Option(help="Sign the attestation with this ed25519 key (PEM, unencrypted)."),
]
ImageDigest = Annotated[
    Optional[str],  # noqa: UP045 - as above
    typer.Option(help="Digest of the image that this runs in; `none` without an image."),
]
Printed = Annotated[
    Optional[Kind],  # noqa: UP045 - as above
    typer.Option("--print", help="Print what starts this command every night; run nothing."),
]


@app.command(
    short_help="Drill a matrix from cron: lock, budget, retention.",
    epilog=page(
        "what `ckptdrill run` needs, and a folder of runs that stays.",
        "what `ckptdrill run` prints; then cells that were not run, verdicts that changed since "
        "the run before and what else changed, and the newest drill-validated resume point.",
        EXIT_CODE_MEANING,
        "ckptdrill nightly matrix.yaml --runs /var/lib/ckptdrill \\",
        "  --budget-s 7200 --metrics /var/lib/node_exporter/drills.prom",
        "ckptdrill nightly matrix.yaml --runs /var/lib/ckptdrill --print cron",
    ),
)
def nightly(
    matrix: MatrixPath,
    python: Python = None,
    runs: Annotated[Path, typer.Option(help="Folder that holds all runs.")] = Path("runs"),
    launcher: Launcher = "auto",
    budget_s: BudgetS = None,
    keep_runs: KeepRuns = 30,
    keep_days: KeepDays = None,
    keep: Keep = False,
    metrics: MetricsFile = None,
    max_age: MaxAge = None,
    sign_key: SignKey = None,
    image_digest: ImageDigest = None,
    printed: Printed = None,
) -> None:
    """Drill a matrix once more, unattended: one command for cron, systemd or a build server.

    A second one leaves at once with exit code 75. A run that was killed within the last day is
    continued, if matrix, code and versions are the same. Cells that the budget leaves out are
    `not-run`: the exit code is then 3, and the next night begins with them. Old runs are removed,
    never one with the newest evidence of a cell, one of `ckptdrill run`, or one with foreign files.
    """
    from ckptdrill import nightly as nights
    from ckptdrill.retention import Limits

    options = nights.Options(
        runs=runs,
        python=python,
        launcher=launcher,
        budget_s=budget_s,
        limits=Limits(keep_runs, keep_days),
        keep=keep,
        metrics=metrics,
        max_age=max_age,
        sign_key=sign_key,
        image_digest=image_digest,
    )
    code = nights.printed(printed, matrix, options) if printed else nights.nightly(matrix, options)
    raise typer.Exit(code)


@app.command(
    short_help="What all runs of a matrix found, cell by cell.",
    epilog=page(
        "the folder of a matrix (runs/NAME), of all matrices (runs), or of one run.",
        "the runs, newest first; for each cell its verdicts, newest first, with what else changed "
        "where a verdict did, and FLAKY where nothing else did.",
        _OF_HISTORY,
        "ckptdrill history runs/quickstart",
        "ckptdrill history runs --cell 'two_to_*' --limit 30",
    ),
)
def history(
    runs: Annotated[
        Path,
        typer.Argument(metavar="RUNS", help="runs/NAME, or runs.", show_default=False),
    ],
    cell: Annotated[str, typer.Option(help="Only cells whose id fits this glob.")] = "*",
    limit: Annotated[int, typer.Option(min=1, help="So many of the newest runs.")] = 10,
    as_json: AsJson = False,
) -> None:
    """What all runs of a matrix found, cell by cell, newest first.

    A cell is flaky when two runs in a row judged it differently although the versions, the code,
    the matrix and the node that they recorded are the same. Runs that did not end, or cannot be
    read, are shown as such.
    """
    from ckptdrill import history_text

    raise typer.Exit(history_text.show(runs, cells=cell, limit=limit, as_json=as_json))


@app.command(
    short_help="Write a first matrix for a script.",
    epilog=page(
        "a script, as text; with --checkpoint a checkpoint, which is read and not executed.",
        "where the matrix was written, what was guessed and what is to be filled in.",
        _OF_INIT,
        "ckptdrill init --program train.py",
        "ckptdrill init --program train.py --checkpoint ckpt/step_12000 \\",
        "  --output drill.yaml",
        "ckptdrill plan drill.yaml",
    ),
)
def init(
    program: Annotated[
        Path, typer.Option(help="The training script that torchrun starts.", show_default=False)
    ],
    checkpoint: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads this form
        typer.Option(help="A checkpoint of it: the matrix then starts from that one."),
    ] = None,
    output: Annotated[Path, typer.Option(help="The file to write; never one that exists.")] = Path(
        "drill.yaml"
    ),
) -> None:
    """Write a first matrix for a script, with a comment on everything that was guessed.

    Arguments are looked for where argparse, click, typer or dataclasses declare them, names of
    checkpoints where the script makes them from a step. The script is never run. What only you can
    know is marked FILL IN.
    """
    from ckptdrill import verbs

    raise typer.Exit(verbs.init(program, checkpoint, output))


@app.command(
    short_help="Look the machine over before a run.",
    epilog=page(
        "nothing; --python names the job's interpreter.",
        "a line per finding: ok, warning or failing, what was found, and the next move.",
        _OF_DOCTOR,
        "ckptdrill doctor --python ~/train/.venv/bin/python",
        "ckptdrill doctor --json",
    ),
)
def doctor(
    python: Python = None,
    runs: Annotated[Path, typer.Option(help="Folder that will hold all runs.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Look the machine over before a run: versions, GPUs, room, isolation, ports, limits.

    torch is not imported, nothing is started that trains. A warning costs isolation, speed or room;
    what is failing would end a run.
    """
    from ckptdrill import doctor as doctors

    raise typer.Exit(doctors.examine(python, runs, as_json=as_json))
