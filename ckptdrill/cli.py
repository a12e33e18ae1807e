"""The command line: verbs only, each a few lines over the module that does the work.

`main` is the program: it turns the one user error into three lines on standard error and an exit
code, and anything unforeseen into exit code 70 with its traceback in a file, not on the screen.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Optional

import typer

from ckptdrill import __version__, daily_cli, manifest_cli
from ckptdrill.errors import EXIT_CODE_MEANING, ExitCode, UserError
from ckptdrill.manual import codes as _codes
from ckptdrill.manual import page as _page

_OF_VERDICTS: dict[ExitCode, str] = {
    c: text for c, text in EXIT_CODE_MEANING.items() if c is not ExitCode.BUSY
}
# What a shell reports of a program that wrote to a pipe nobody reads: 128 + SIGPIPE.
_NO_READER = 141
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_OF_A_QUESTION = {
    ExitCode.AS_EXPECTED: "printed",
    ExitCode.USAGE: "usage error",
    ExitCode.INTERNAL: EXIT_CODE_MEANING[ExitCode.INTERNAL],
}
_OF_A_PLAN = {**_OF_A_QUESTION, ExitCode.USAGE: "usage or matrix error"}
_OF_VERIFY = {
    ExitCode.AS_EXPECTED: "every file is as it was written",
    ExitCode.UNSUPPORTED: "some file is missing, extra or different",
    ExitCode.USAGE: "usage error, or this is not the folder of a run",
    ExitCode.INTERNAL: EXIT_CODE_MEANING[ExitCode.INTERNAL],
}

_OF_INSPECT = {
    ExitCode.AS_EXPECTED: "printed, whatever the class is",
    ExitCode.USAGE: "usage error, or nothing there could be read",
    ExitCode.INTERNAL: EXIT_CODE_MEANING[ExitCode.INTERNAL],
}
_OF_DIFF = {
    ExitCode.AS_EXPECTED: "equal, or within the tolerance; of two runs: the same verdicts",
    ExitCode.UNSUPPORTED: "something differs, is on one side only, or could not be compared",
    ExitCode.USAGE: "usage error, or a checkpoint or run could not be read",
    ExitCode.INTERNAL: EXIT_CODE_MEANING[ExitCode.INTERNAL],
}
_OF_GATE = {
    ExitCode.AS_EXPECTED: "every condition is held: approved",
    ExitCode.UNSUPPORTED: "some condition is not held",
    ExitCode.USAGE: "usage error, or this is not the folder of a run",
    ExitCode.UNPROVEN: "some condition is not known, none contradicted",
    ExitCode.SOURCE_CHANGED: EXIT_CODE_MEANING[ExitCode.SOURCE_CHANGED],
    ExitCode.INTERNAL: EXIT_CODE_MEANING[ExitCode.INTERNAL],
}
_OF_ALLOW = {
    ExitCode.AS_EXPECTED: "verified: the resume is allowed",
    ExitCode.UNSUPPORTED: "not verified, or the file cannot be trusted: blocked",
    ExitCode.USAGE: "usage error: blocked too",
    ExitCode.INTERNAL: EXIT_CODE_MEANING[ExitCode.INTERNAL],
}

app = typer.Typer(
    name="ckptdrill",
    help="Will the next run continue the same training? Restore a real checkpoint with your own, "
    "unedited script under every planned target and fault, and get a verdict per cell.\n\n"
    "`ckptdrill VERB --help` is the manual page of a verb; README.md is the manual.",
    epilog=_codes(EXIT_CODE_MEANING),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

MatrixPath = Annotated[
    Path, typer.Argument(metavar="MATRIX", help="The matrix file (YAML).", show_default=False)
]
RunPath = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="A run folder, or runs/NAME/latest for the newest.", show_default=False
    ),
]
CheckpointPath = Annotated[
    Path,
    typer.Argument(metavar="PATH", help="A checkpoint: a file or a folder.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Python = Annotated[
    Optional[str],  # noqa: UP045 - typer reads this form
    typer.Option(
        "--python", help="Interpreter of the environment `default`: the one with the job's torch."
    ),
]
PublicKey = Annotated[
    Optional[Path],  # noqa: UP045 - typer reads this form
    typer.Option("--public-key", help="The attestation must be signed by this key (PEM)."),
]
SignKey = Annotated[
    Optional[Path],  # noqa: UP045 - typer reads this form
    typer.Option(
        "--sign-key", help="Sign the attestation with this ed25519 key (PEM, unencrypted)."
    ),
]


@app.command(
    short_help="Drill every cell, judge it, write the packet.",
    epilog=_page(
        "a matrix, an interpreter that has torch >= 2.4 (--python; without it, that of ckptdrill), "
        "and space for the checkpoints that the job saves in the drill.",
        "a line per launch on standard error (on a terminal: a live table), then a line per cell "
        "with its verdict and reason, and where the packet is.",
        _OF_VERDICTS,
        "ckptdrill run matrix.yaml --python ~/train/.venv/bin/python",
        "ckptdrill run matrix.yaml --resume",
    ),
)
def run(
    matrix: MatrixPath,
    python: Python = None,
    runs: Annotated[Path, typer.Option(help="Folder that holds all runs.")] = Path("runs"),
    launcher: Annotated[
        str,
        typer.Option(
            help="torchrun: every launch by the production command line. warm: every launch forked "
            "from a process that has torch imported. auto: warm once both recorded the same facts."
        ),
    ] = "auto",
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue the newest run of this matrix: what has ended is kept."
        ),
    ] = False,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep", help="Keep all checkpoints; else those of passed cells are deleted."
        ),
    ] = False,
    sign_key: SignKey = None,
    image_digest: Annotated[
        Optional[str],  # noqa: UP045 - typer reads this form
        typer.Option(help="Digest of the image that this runs in; `none` without an image."),
    ] = None,
) -> None:
    """Drill every cell of a matrix, judge it, and write the evidence packet.

    The script is started under torchrun, saves, and goes on (the reference). Fresh processes then
    restore private copies of its checkpoint at every target and under every fault. Ctrl-C stops
    all launches and leaves a run that --resume continues (exit code 3).
    """
    from ckptdrill import verbs

    marks = verbs.Marks(sign_key, image_digest)
    code = verbs.run(matrix, python, runs, launcher, resume=resume, keep=keep, marks=marks)
    raise typer.Exit(code)


@app.command(
    short_help="Show what a run would start, and start nothing.",
    epilog=_page(
        "a matrix, and all that it names: the program, the interpreters, the checkpoint to start "
        "from.",
        "one row per launch: its ranks, devices, what it waits for, when it starts, and how many "
        "cells share it; then the estimated time and GPU-hours.",
        _OF_A_PLAN,
        "ckptdrill plan matrix.yaml",
    ),
)
def plan(matrix: MatrixPath, python: Python = None) -> None:
    """Show what a run would start: launches, the cells that share them, devices, time.

    The matrix is checked completely. Every mistake in it is reported with line, column, key, what
    was found and what is allowed. Times assume a small job: they are an order, not a promise.
    """
    from ckptdrill import verbs

    raise typer.Exit(verbs.plan(matrix, python))


@app.command(
    short_help="Judge a stored run again, without a launch.",
    epilog=_page(
        "a run folder; neither the job nor its interpreter nor the checkpoints.",
        "a line per cell with its verdict and reason, and where the packet is.",
        _OF_VERDICTS,
        "ckptdrill judge runs/quickstart/latest",
    ),
)
def judge(run_folder: RunPath, sign_key: SignKey = None) -> None:
    """Judge the stored facts of a run again, without a launch, and render the packet anew.

    Use it after an upgrade of ckptdrill. Verdicts and page are replaced, facts never.
    """
    from ckptdrill import verbs

    raise typer.Exit(verbs.judge(run_folder, sign_key))


@app.command(
    short_help="Compare a packet with its list of checksums.",
    epilog=_page(
        "a run folder; neither the job nor its interpreter.",
        "a line per file that differs, is missing or was added, and a closing line.",
        _OF_VERIFY,
        "ckptdrill verify runs/quickstart/latest",
        "(cd runs/quickstart/latest && sha256sum -c *-sha256.txt)",
    ),
)
def verify(packet: RunPath, public_key: PublicKey = None) -> None:
    """Compare every file of a packet with its sha256 lists, and check its signatures.

    `sha256sum -c` in the folder does the same for the lists, except that it does not see files that
    were added. Somebody who may rewrite the whole folder can make new lists, but cannot sign for
    the holder of a key that you name.
    """
    from ckptdrill import verbs

    raise typer.Exit(verbs.verify(packet, public_key))


@app.command(
    short_help="Decide whether a migration may go ahead.",
    epilog=_page(
        "a run folder, the checkpoint that will be resumed, with its manifest, and the interpreter "
        "that will resume it.",
        "a line per condition: held, not held or not known, what was found, what to do.",
        _OF_GATE,
        "ckptdrill gate runs/nightly/latest --checkpoint /ckpt/step_12000 \\",
        "  --python /new/bin/python --image-digest sha256:… \\",
        "  --approver 'your name' --sign-key approver.pem",
        "ckptdrill gate runs/nightly/latest … --public-key approver.pub.pem",
    ),
)
def gate(
    packet: RunPath,
    checkpoint: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads this form
        typer.Option(help="The checkpoint that will be resumed; it is read completely."),
    ] = None,
    python: Annotated[
        Optional[str],  # noqa: UP045 - as above
        typer.Option(help="Interpreter that will run the job."),
    ] = None,
    program: Annotated[
        Optional[Path],  # noqa: UP045 - as above
        typer.Option(help="Training script that will run. Default: the drilled one, where it is."),
    ] = None,
    image_digest: Annotated[
        Optional[str],  # noqa: UP045 - as above
        typer.Option(help="Digest of the image that will run; `none` without an image."),
    ] = None,
    max_age: Annotated[str, typer.Option(help="How old evidence may be: 7d, 12h, 30m.")] = "7d",
    approver: Annotated[
        Optional[str],  # noqa: UP045 - as above
        typer.Option(help="Record this person's approval, if all else is held. Needs --sign-key."),
    ] = None,
    sign_key: Annotated[
        Optional[Path],  # noqa: UP045 - as above
        typer.Option(help="Key of the approver (ed25519, PEM, unencrypted)."),
    ] = None,
    public_key: Annotated[
        Optional[Path],  # noqa: UP045 - as above
        typer.Option(help="A recorded approval counts only if it is signed by this key (PEM)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Decide whether a migration may go ahead: every condition, one by one.

    What the matrix expects plays no part here: only Pass is a pass. What is not known counts as not
    held. Nothing in the packet changes; an approval is written beside its list of checksums.
    """
    from ckptdrill import gate as gates
    from ckptdrill import signing, verbs

    trusted = signing.public_key(public_key) if public_key else None
    options = gates.Options(
        checkpoint, python, program, image_digest, gates.age_s(max_age), trusted
    )
    raise typer.Exit(verbs.gate(packet, options, approver, sign_key, as_json=as_json))


@app.command(
    short_help="Ask a packet whether a resume is verified.",
    epilog=_page(
        "resume_compatibility.yaml of a packet, or the folder of a run.",
        "`allowed` or `blocked`, the route, and the cells that decide it.",
        _OF_ALLOW,
        "ckptdrill allow --from fsdp4 --to fsdp2 --packet runs/nightly/latest",
        "ckptdrill allow --from dp_shard=4,tp=2 --to dp_shard=2,tp=2,torch=2.13.0",
    ),
)
def allow(
    source: Annotated[str, typer.Option("--from", help="What wrote the checkpoint.")],
    target: Annotated[str, typer.Option("--to", help="What will resume it.")],
    packet: Annotated[
        Path, typer.Option(help="resume_compatibility.yaml, or the folder of a run.")
    ] = Path("resume_compatibility.yaml"),
) -> None:
    """Ask a packet whether a resume from one topology to another is verified.

    For launchers: exit code 0 only for a drilled, passed route. A missing, torn or changed file, a
    route that was not drilled, or a name that is not known is a no. A topology is a name or short
    name of the packet, or KEY=VALUE pairs: degrees, where those left out are 1, and versions
    (torch, cuda, python), which are compared where you name them.
    """
    from ckptdrill import verbs

    raise typer.Exit(verbs.allow(source, target, packet))


@app.command(
    short_help="Say what a checkpoint holds and what it is good for.",
    epilog=_page(
        "a checkpoint: a file, its folder, or a root whose generations a pointer chooses from; "
        "neither torch nor the framework that wrote it.",
        "the format, the class (model-only, resumable, universal, incomplete) with the evidence, "
        "the versions of its writers, every tensor, every other value.",
        _OF_INSPECT,
        "ckptdrill inspect checkpoints/step-400",
        "ckptdrill inspect model.safetensors --json",
    ),
)
def inspect(checkpoint: CheckpointPath, as_json: AsJson = False) -> None:
    """Say what a checkpoint holds and what it is good for.

    Formats are recognised by content. Pickles are read, never executed; what asks for a class that
    no reader knows is named and left unread.
    """
    from ckptdrill import inspecting

    raise typer.Exit(inspecting.inspect(checkpoint, as_json=as_json))


@app.command(
    short_help="Compare two checkpoints, or two runs.",
    epilog=_page(
        "two checkpoints of any formats and layouts, or the folders of two runs.",
        "a line per tensor or value that differs, with digests and the largest difference, and a "
        "closing line; with --json every tensor. Of two runs: verdicts that changed, with reason "
        "and blame, and what ran in another version.",
        _OF_DIFF,
        "ckptdrill diff checkpoints/step-400 resumed/step-400",
        "ckptdrill diff global_step8 model.safetensors --tolerance 1e-3",
        "ckptdrill diff runs/nightly/2026-11-29T02-17-01Z runs/nightly/latest",
    ),
)
def diff(
    a: Annotated[
        Path, typer.Argument(metavar="A", help="A checkpoint, or a run.", show_default=False)
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    as_json: AsJson = False,
    tolerance: Annotated[
        Optional[float],  # noqa: UP045 - typer reads this form
        typer.Option(help="Largest absolute difference that still counts as equal, dtypes aside."),
    ] = None,
) -> None:
    """Compare two checkpoints by logical tensor, whatever their formats and layouts; or two runs.

    Without --tolerance, equal means equal bits. Shards are put together in blocks, so memory stays
    bounded; names are compared without what DDP, FSDP and torch.compile add to them.
    """
    from ckptdrill import diffing, history, history_text

    if history.is_run(a) or history.is_run(b):
        raise typer.Exit(history_text.diff(a, b, tolerance=tolerance, as_json=as_json))
    raise typer.Exit(diffing.diff(a, b, tolerance=tolerance, as_json=as_json))


@app.command(
    "list",
    short_help="Drills and reasons, explained.",
    epilog=_page(
        "nothing.",
        "every drill with what Pass means and its parameters, then every reason with the verdict "
        "it comes with, its meaning and the next move.",
        _OF_A_QUESTION,
        "ckptdrill list",
    ),
)
def list_() -> None:
    """The drills, what each claims, its parameters; and every reason a verdict can have.

    Both come from the code that runs: a drill is a file in drills/, found by its name.
    """
    from ckptdrill import verbs

    raise typer.Exit(verbs.list_drills())


@app.command(
    short_help="What a failure costs: lost steps, replay, GPU-hours.",
    epilog=_page(
        "figures of your cluster, or a run folder that measured them.",
        "for a run, the restore of every cell in its five phases; then, when a failure is given, "
        "lost steps, replay, recovery time and point and occupied GPU-hours of each tier.",
        {**_OF_A_QUESTION, ExitCode.USAGE: "usage error, or a figure is missing"},
        "ckptdrill ledger runs/quickstart/latest",
        "ckptdrill ledger --gpus 512 --committed-step 123456 \\",
        "  --failed-step 123576 --step-s 9.5 --restore-h 0.6",
    ),
)
def ledger(
    run_folder: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads this form
        typer.Argument(metavar="[RUN]", help="A run folder.", show_default=False),
    ] = None,
    gpus: Annotated[
        Optional[int],  # noqa: UP045 - as above
        typer.Option(help="GPUs that wait. Default with RUN: the ranks of the slowest restore."),
    ] = None,
    committed_step: Annotated[
        Optional[int],  # noqa: UP045 - as above
        typer.Option(help="Last step that was durable when training failed."),
    ] = None,
    failed_step: Annotated[
        Optional[int],  # noqa: UP045 - as above
        typer.Option(help="Step at which training failed."),
    ] = None,
    step_s: Annotated[
        Optional[float],  # noqa: UP045 - as above
        typer.Option(help="Seconds per training step. Default with RUN: as measured."),
    ] = None,
    restore_h: Annotated[
        Optional[float],  # noqa: UP045 - as above
        typer.Option(help="Wall hours of the restore. Default with RUN: as measured."),
    ] = None,
    memory_committed_step: Annotated[
        Optional[int],  # noqa: UP045 - as above
        typer.Option(help="Last whole step in the memory tier, which is billed apart."),
    ] = None,
    memory_restore_h: Annotated[
        Optional[float],  # noqa: UP045 - as above
        typer.Option(help="Wall hours of a restore from the memory tier."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """What a failure costs: lost steps, replay, recovery time, occupied GPU-hours.

    Lost steps are those between the last durable commit and the failure; replay is lost steps times
    seconds per step. GPU-hours of restore and replay are occupied, not productive.
    """
    from ckptdrill import verbs
    from ckptdrill.ledger import Failure

    failure = Failure(
        gpus,
        failed_step,
        step_s,
        (committed_step, restore_h),
        (memory_committed_step, memory_restore_h),
    )
    raise typer.Exit(verbs.ledger(run_folder, failure, as_json=as_json))


@app.command(
    short_help="What the documentation of each stack claims.",
    epilog=_page(
        "nothing.",
        "stacks against migration cases, each cell Documented, Limit or Unproven; for one stack, "
        "or with --quotes, every claim with its quote, source, version and the date it was read.",
        _OF_A_QUESTION,
        "ckptdrill claims",
        "ckptdrill claims --stack deepspeed-native",
    ),
)
def claims(
    stack: Annotated[
        Optional[str],  # noqa: UP045 - typer reads this form
        typer.Option(help="Only this stack, with its quotes: dcp-fsdp2, deepspeed-native, s3 …"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    quotes: Annotated[bool, typer.Option("--quotes", help="Print every quote as well.")] = False,
) -> None:
    """What the pinned documents state, restrict or leave out, per stack and migration case.

    Nothing here was drilled. A packet shows these claims beside the verdicts of its cells when the
    matrix names its stack (job.stack).
    """
    from ckptdrill import verbs

    raise typer.Exit(verbs.claims(stack, as_json=as_json, quotes=quotes))


@app.command(
    short_help="Print the JSON Schema of a matrix.",
    epilog=_page(
        "nothing.",
        "the schema, as JSON.",
        _OF_A_QUESTION,
        "ckptdrill schema > matrix.schema.json",
    ),
)
def schema() -> None:
    """Print the JSON Schema of a matrix file, for editors.

    With `# yaml-language-server: $schema=matrix.schema.json` as the first line of a matrix, editors
    that know that line complete its keys and mark mistakes.
    """
    from ckptdrill import matrix

    print(json.dumps(matrix.json_schema(), indent=2))  # noqa: T201 - the output of the verb


app.add_typer(manifest_cli.app, name="manifest")
app.registered_commands += daily_cli.app.registered_commands


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
        sys.stdout.flush()
    except UserError as error:
        print(f"ckptdrill: {error}", file=sys.stderr)  # noqa: T201 - errors go to standard error
        sys.exit(error.code)
    except SystemExit as end:
        # typer ends with 1 then, which would read as a verdict.
        sys.exit(_NO_READER if isinstance(end.__context__, BrokenPipeError) else end.code)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            sys.exit(_report_defect())
        sys.exit(_report_no_room(error))
    except Exception:  # noqa: BLE001 - a defect of ckptdrill must still end in a known exit code
        sys.exit(_report_defect())


def _report_no_room(error: OSError) -> ExitCode:
    """What was to be printed had no room; nothing of it may be tried again when Python ends."""
    print(f"ckptdrill: cannot write: {error.strerror}", file=sys.stderr)  # noqa: T201 - as above
    print("  next:  free some space, or print elsewhere", file=sys.stderr)  # noqa: T201 - as above
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.UNPROVEN


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
