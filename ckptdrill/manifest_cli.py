"""The verbs of `ckptdrill manifest`, each a few lines over the module that does the work.

What a machine wants of `select` goes to standard output alone: the path. Everything said to people
about it goes to standard error, so that `$(ckptdrill manifest select ROOT)` can be given to a job.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from ckptdrill.errors import EXIT_CODE_MEANING, ExitCode
from ckptdrill.manual import page

_INTERNAL = {ExitCode.INTERNAL: EXIT_CODE_MEANING[ExitCode.INTERNAL]}
_OF_WRITE = {
    ExitCode.AS_EXPECTED: "the manifest is written",
    ExitCode.UNSUPPORTED: "the checkpoint is not whole, or something writes to it",
    ExitCode.USAGE: "usage error, or there is a manifest already",
    **_INTERNAL,
}
_OF_VERIFY = {
    ExitCode.AS_EXPECTED: "everything that was compared is as recorded",
    ExitCode.UNSUPPORTED: "something is not, or there is no usable manifest",
    ExitCode.USAGE: "usage error",
    **_INTERNAL,
}
_OF_SELECT = {
    ExitCode.AS_EXPECTED: "a checkpoint was chosen",
    ExitCode.UNSUPPORTED: "none below ROOT is committed and valid",
    ExitCode.USAGE: "usage error",
    **_INTERNAL,
}
_OF_PUBLISH = {
    ExitCode.AS_EXPECTED: "published, or already published",
    ExitCode.UNSUPPORTED: "the staged checkpoint is not whole, or something writes to it",
    ExitCode.USAGE: "usage error, TARGET is taken, or another publish is at work there",
    **_INTERNAL,
}

app = typer.Typer(
    help="Record what a checkpoint holds, compare it, choose the newest valid one, publish.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="A checkpoint: a folder, or a single file.", show_default=False
    ),
]
FactsPath = Annotated[
    Optional[Path],  # noqa: UP045 - typer reads this form
    typer.Option("--facts", help="JSON with what the files cannot tell: topology, software, …"),
]
Step = Annotated[
    Optional[int],  # noqa: UP045 - typer reads this form
    typer.Option("--step", min=0, help="The last completed step.", show_default=False),
]
Share = Annotated[
    Optional[str],  # noqa: UP045 - typer reads this form
    typer.Option(
        "--sample", metavar="5%", help="Read only this share of the bytes; sizes are all compared."
    ),
]
Seed = Annotated[
    Optional[str],  # noqa: UP045 - typer reads this form
    typer.Option("--seed", help="Draws the sample. Default: today's date (UTC)."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]


@app.command(
    short_help="Record what a checkpoint holds.",
    epilog=page(
        "a checkpoint that its writer has finished, and that nothing writes to.",
        "how much is recorded, where, and what nobody could tell; with --json the manifest.",
        _OF_WRITE,
        "ckptdrill manifest write checkpoints/step-100 --step 100 --facts run.json",
    ),
)
def write(
    checkpoint: Checkpoint,
    facts: FactsPath = None,
    step: Step = None,
    output: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads this form
        typer.Option("--output", help="Write it here, and leave the checkpoint untouched."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the manifest of a checkpoint: keys, shapes, every file with size and SHA-256.

    It goes into the folder (checkpoint.manifest.json), or beside a single file
    (NAME.manifest.json), once all files are durable. No tensor is loaded, nothing is executed.
    """
    from ckptdrill import manifest_verbs

    raise typer.Exit(manifest_verbs.write(checkpoint, facts, step, output, as_json=as_json))


@app.command(
    short_help="Compare a checkpoint with its manifest.",
    epilog=page(
        "a checkpoint with a manifest in it, or one elsewhere (--manifest).",
        "a line per problem, then how much was read; with --json the same as an object.",
        _OF_VERIFY,
        "ckptdrill manifest verify checkpoints/step-100",
        "ckptdrill manifest verify checkpoints/step-100 --sample 5%",
    ),
)
def verify(
    checkpoint: Checkpoint,
    sample: Share = None,
    seed: Seed = None,
    manifest: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads this form
        typer.Option("--manifest", help="The manifest, if it is not with the checkpoint."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare a checkpoint with its manifest, and name every difference.

    Each problem has a name out of a closed list. A file without a recorded checksum is a problem:
    it was not verified. A sample says how much it left unread; it proves nothing of that.
    """
    from ckptdrill import manifest_verbs

    chosen = manifest_verbs.sample_of(sample, seed)
    raise typer.Exit(manifest_verbs.verify(checkpoint, chosen, manifest, as_json=as_json))


@app.command(
    short_help="Choose the newest valid checkpoint.",
    epilog=page(
        "a folder that holds checkpoints with manifests.",
        "the path of the chosen one on standard output; on standard error every other one with "
        "the reason why not, and every pointer with whether it is right. With --json all of it "
        "on standard output.",
        _OF_SELECT,
        "ckptdrill manifest select checkpoints",
        'torchrun train.py --resume "$(ckptdrill manifest select checkpoints)"',
    ),
)
def select(
    root: Annotated[
        Path,
        typer.Argument(metavar="ROOT", help="A folder that holds checkpoints.", show_default=False),
    ],
    sample: Share = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Choose the newest checkpoint below ROOT that is committed and valid.

    Newest is: the highest completed step, then the latest commit, both by the manifests. Names and
    `latest` pointers have no say. Candidates are read in full, from the newest on, until one holds.
    """
    from ckptdrill import manifest_verbs

    chosen = manifest_verbs.sample_of(sample, seed)
    raise typer.Exit(manifest_verbs.select(root, chosen, as_json=as_json))


@app.command(
    short_help="Put a staged checkpoint in its place.",
    epilog=page(
        "a checkpoint that its writer has finished under a name of its own, and a TARGET that "
        "does not exist.",
        "what was published; with --json the manifest.",
        _OF_PUBLISH,
        "ckptdrill manifest publish checkpoints/step-100.tmp checkpoints/step-100",
    ),
)
def publish(
    staged: Annotated[
        Path,
        typer.Argument(metavar="STAGED", help="The finished checkpoint.", show_default=False),
    ],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="Its final path.", show_default=False)
    ],
    facts: FactsPath = None,
    step: Step = None,
    as_json: AsJson = False,
) -> None:
    """Publish a checkpoint in two phases, so that no reader ever takes half of it for whole.

    It is verified, moved (or copied, from another file system), made durable, then its manifest
    says `committed`, then `latest` beside it is moved. Cut off anywhere, the older generation stays
    the selected one, and the same command continues.
    """
    from ckptdrill import manifest_verbs

    raise typer.Exit(manifest_verbs.publish(staged, target, facts, step, as_json=as_json))
