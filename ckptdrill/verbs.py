"""What each verb of the command line does, in the order in which it does it.

`run` is the whole program on one screen: load the matrix, plan, carry out, judge, render, say what
came out. The other verbs are parts of it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ckptdrill import (
    __version__,
    documentation,
    drafting,
    drill,
    environments,
    journal,
    judging,
    ledger_text,
    packet,
    progress,
    signing,
)
from ckptdrill import claims as claims_
from ckptdrill import gate as gates
from ckptdrill import ledger as ledger_
from ckptdrill import matrix as matrices
from ckptdrill import plan as plans_
from ckptdrill import run as runs_
from ckptdrill.errors import ExitCode, UserError, worst
from ckptdrill.fact_files import read_launch
from ckptdrill.gate import text as gate_text
from ckptdrill.installed import installed
from ckptdrill.launchers import Mode
from ckptdrill.matrix import Matrix
from ckptdrill.model import Launch, LaunchRecord, Plan, Verdict, VerdictWord, to_json
from ckptdrill.packet import compatibility
from ckptdrill.reasons import EXPLANATIONS
from ckptdrill.schedule import Capacity, Graph, forecast
from ckptdrill.spelling import did_you_mean
from ckptdrill.store import (
    COMPATIBILITY_NAME,
    MANIFEST_NAME,
    RUN_FORMAT_VERSION,
    SOURCE_MANIFEST_NAME,
    RunFolder,
    file_system,
    read_json,
    sha256_of,
    write_atomic,
    write_json,
)

# Where the manifest of a checkpoint lies: in its folder under this name, beside a file of one part.
FOLDER_MANIFEST = "checkpoint.manifest.json"
# Ranks that make sense on a node without GPUs: they share its cores, and 8 still train on 2.
_CPU_RANKS_AT_LEAST = 8


@dataclass(frozen=True)
class Marks:
    """What is written into a packet, or over it, beside what the run finds."""

    sign_key: Path | None = None
    image_digest: str | None = None
    nightly: bool = False  # begun by `ckptdrill nightly`, which may remove it some day


def run(
    path: Path,
    python: str | None,
    runs: Path,
    launcher: str,
    *,
    resume: bool,
    keep: bool,
    marks: Marks = Marks(),
) -> ExitCode:
    """Drill every cell, judge it, render the packet; the exit code of the run."""
    mode = launch_mode(launcher)
    key = signing.private_key(marks.sign_key) if marks.sign_key else None
    matrix, plans = ready(path, python)
    folder = _newest(runs, matrix) if resume else journal.create(runs, matrix.name, _now())
    begin(folder, matrix, resume=resume, marks=marks)
    options = runs_.Options(launcher=mode, resume=resume, keep=keep)
    return carried_out(matrix, plans, folder, options, key)


def ready(path: Path, python: str | None) -> tuple[Matrix, tuple[Plan, ...]]:
    """The matrix at `path` and its plans, with every interpreter in place that they need.

    Raises UserError for what is wrong with any of them.
    """
    matrix = matrices.load(path, python=python, devices=_ranks_that_fit())
    plans = plans_.plan_all(matrix)
    matrix = _built(matrix, plans)
    _check_torch(matrix, plans)
    return matrix, plans


def carried_out(
    matrix: Matrix,
    plans: Sequence[Plan],
    folder: RunFolder,
    options: runs_.Options,
    key: Ed25519PrivateKey | None,
) -> ExitCode:
    """Start what has not ended in a run that has begun, judge, render, print; its exit code."""
    with progress.shown(plans_.steps_of(plans)) as report:
        outcome = runs_.execute(matrix, plans, folder, replace(options, report=report))
    verdicts = judging.judge_run(folder, matrix, plans)
    _conclude(folder, plans)
    runs_.prune(folder, _spent(plans, verdicts))
    packet.write(folder, key, gates.preview)
    _summarise(folder)
    return worst(_tell(folder, plans, verdicts), outcome.code)


def init(program: Path, checkpoint: Path | None, output: Path) -> ExitCode:
    """Write a first matrix for a script, and say what is left to do."""
    matrices.check_script(program)
    text = drafting.draft(program, output.parent, checkpoint, _ranks_that_fit())
    drafting.write(output, text)
    lines = [line.strip() for line in text.splitlines()]
    console = Console(soft_wrap=True)
    console.print(Text(f"{output} is written; the script was read, not run"))
    for word in ("FILL IN", "guess"):
        marked = [number for number, line in enumerate(lines, 1) if word in line and number > 3]
        console.print(Text(f"{word}: lines {', '.join(map(str, marked)) or 'none'}"))
    console.print(Text(f"next: ckptdrill plan {output}"))
    return ExitCode.AS_EXPECTED


def plan(path: Path, python: str | None) -> ExitCode:
    """Print the launches of a run, who shares them, how long they may take, and what does not fit
    this node: the matrix may be meant for another one.
    """
    matrix = matrices.load(path, python=python)
    plans = plans_.plan_all(matrix)
    graph, capacity = Graph.of(plans_.steps_of(plans)), Capacity.detect()
    expected = forecast(graph, capacity)
    sharing = plans_.cells_by_step(plans)
    table = Table("step", "ranks", "on", "after", "starts at", "takes", "cells", title=matrix.name)
    for step_id, (start_s, end_s, devices) in expected.items():
        step = graph.steps[step_id]
        ranks = str(step.topology.world_size) if isinstance(step, Launch) else "-"
        table.add_row(
            step_id,
            ranks,
            ", ".join(devices) or "cpu",
            ", ".join(step.after) or "-",
            f"{start_s:.0f} s",
            f"{end_s - start_s:.0f} s",
            str(len(sharing[step_id])),
        )
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    whole_s = max((end_s for _, end_s, _ in expected.values()), default=0.0)
    gpu_hours = (
        sum((end_s - start_s) * len(gpus) for start_s, end_s, gpus in expected.values()) / 3600
    )
    console.print(
        f"cells: {len(plans)}; steps that they share: {len(expected)}; about {whole_s:.0f} s as "
        f"this node packs them, {gpu_hours:.2f} GPU-hours. These are estimates."
    )
    if any(each.replay for each in plans):
        console.print(
            "A replay adds launches of its own: a restore for each distinct state it finds."
        )
    for line in _misfits(graph, capacity, _ranks_that_fit()):
        console.print(Text(line), soft_wrap=True)
    return ExitCode.AS_EXPECTED


def judge(path: Path, sign_key: Path | None = None) -> ExitCode:
    """Judge a stored run again and render its packet; the exit code its verdicts give."""
    key = signing.private_key(sign_key) if sign_key else None
    folder = _run_folder(path)
    matrix = _stored_matrix(folder)
    _refuse_changed_evidence(folder)
    plans = judging.stored_plans(folder)
    with journal.locked(folder):
        verdicts = judging.judge_run(folder, matrix, plans)
        _conclude(folder, plans)
        packet.write(folder, key, gates.preview)
    _summarise(folder)
    changed = read_json(folder.run_json).get("source_unchanged") is False
    code = ExitCode.SOURCE_CHANGED if changed else ExitCode.AS_EXPECTED
    return worst(code, _tell(folder, plans, verdicts))


def _stored_matrix(folder: RunFolder) -> Matrix:
    """The matrix of a stored run. Raises UserError when this is not a run that can be judged."""
    about = read_json(folder.run_json)
    made = about.get("format", 1) if isinstance(about, dict) else None
    if isinstance(made, int) and made > RUN_FORMAT_VERSION:
        raise UserError(
            f"a newer ckptdrill wrote this run: its form is {made}, known is {RUN_FORMAT_VERSION}",
            where=str(folder.root),
            hint="judge it with that version",
        )
    if not isinstance(made, int) or not isinstance(about.get("matrix_path"), str):
        raise UserError(
            "run.json is not that of a run",
            where=str(folder.root),
            hint="it is torn or was changed; `ckptdrill verify` says what else is",
        )
    return matrices.parse(matrices.text_of(folder.matrix), Path(about["matrix_path"]))


def _refuse_changed_evidence(folder: RunFolder) -> None:
    """Facts that are no longer what was recorded must not be judged, and signed, once more."""
    if not (folder.root / MANIFEST_NAME).exists():
        return  # a run that never came to its end has no list yet
    recorded = ("launches/", "damages/", "replays/", "matrix.yaml", "journal.jsonl", "sources.json")
    changed = [p for p in packet.verify(folder.root) if p.path.startswith(recorded)]
    if changed:
        raise UserError(
            f"the recorded evidence has changed since it was written: {changed[0]}",
            where=str(folder.root),
            hint="`ckptdrill verify` lists every difference; drill again to have new evidence",
            code=ExitCode.UNPROVEN,
        )


def verify(path: Path, public_key: Path | None = None) -> ExitCode:
    """Compare a packet with its checksums and print every difference."""
    trusted = signing.public_key(public_key) if public_key else None
    folder = _run_folder(path)
    problems = packet.verify(folder.root, trusted)
    console = Console()
    for problem in problems:
        console.print(Text(str(problem)))
    console.print(
        "the packet is as it was written" if not problems else f"{len(problems)} problems"
    )
    return ExitCode.UNSUPPORTED if problems else ExitCode.AS_EXPECTED


def list_drills() -> ExitCode:
    """Print the drills and the reasons, both read from the code."""
    console = Console()
    console.print(Text("Drills, and what Pass means in each\n", style="bold"))
    for name in drill.names():
        _show(console, name, _about_drill(drill.load(name)))
    console.print(Text("Reasons of a verdict, in the order of the closed list\n", style="bold"))
    for reason, about in EXPLANATIONS.items():
        _show(console, f"{reason.value} ({about.word.value})", (about.meaning, about.next_move))
    return ExitCode.AS_EXPECTED


def claims(stack: str | None, *, as_json: bool, quotes: bool) -> ExitCode:
    """Print what the pinned documents say, of one stack or of all."""
    chosen = [claims_.stack(stack)] if stack else list(claims_.stacks().values())
    if as_json:
        print(json.dumps(documentation.as_json(chosen), indent=2))  # noqa: T201 - the output
        return ExitCode.AS_EXPECTED
    documentation.show(Console(), chosen, quotes=quotes or stack is not None)
    return ExitCode.AS_EXPECTED


def ledger(path: Path | None, failure: ledger_.Failure, *, as_json: bool) -> ExitCode:
    """Print what restores took in a run, and the bill of a failure where enough is known."""
    found = ledger_.restores(read_json(_run_folder(path).root / "packet.json")) if path else ()
    worst_case = ledger_.slowest(found)
    bills = ledger_.bills(failure, worst_case, optional=path is not None)
    if as_json:
        value = {"restores": to_json(found), "bills": [bill.as_json() for bill in bills]}
        print(json.dumps(value, indent=1))  # noqa: T201 - the output
        return ExitCode.AS_EXPECTED
    console = Console(width=None if sys.stdout.isatty() else 160)
    if path:
        ledger_text.show_restores(console, found)
    if bills:
        origin = (
            f"Where nothing else was given: as measured in {worst_case.cell}."
            if (worst_case)
            else "All figures as given on the command line."
        )
        ledger_text.show_bill(console, bills, origin)
    return ExitCode.AS_EXPECTED


def gate(
    path: Path,
    options: gates.Options,
    approver: str | None,
    sign_key: Path | None,
    *,
    as_json: bool,
) -> ExitCode:
    """Show every condition of a migration; record the approval when all others are held."""
    if (approver is None) != (sign_key is None):
        raise UserError("--approver and --sign-key go together", hint="an approval is signed")
    key = signing.private_key(sign_key) if sign_key else None
    folder = _run_folder(path)
    inputs = gates.gather(folder.root, options, _now().timestamp())
    found = gates.conditions(inputs)
    if approver and key:
        who = (approver, _now().isoformat(timespec="seconds"))
        with journal.locked(folder):
            found = gates.approve(folder.root, inputs, who, key)
    if as_json:
        print(json.dumps(to_json(found), indent=1))  # noqa: T201 - the output
    else:
        gate_text.show(Console(), found)
    return gates.exit_code(inputs, found)


def allow(source: str, target: str, path: Path) -> ExitCode:
    """Say whether a resume is verified. Everything that is not certain is a no: exit code 1."""
    file = path / COMPATIBILITY_NAME if path.is_dir() else path
    decision = _decided(file, source, target)
    print(f"{'allowed' if decision.allowed else 'blocked'}: {decision.why}")  # noqa: T201 - output
    return ExitCode.AS_EXPECTED if decision.allowed else ExitCode.UNSUPPORTED


def _decided(file: Path, source: str, target: str) -> compatibility.Decision:
    """A file that lies in a packet is believed only if the packet is as it was written."""
    problems = packet.verify(file.parent) if (file.parent / MANIFEST_NAME).exists() else []
    if problems:
        return compatibility.Decision(False, f"the packet was changed: {problems[0]}")
    try:
        text = file.read_bytes()
    except OSError as error:
        return compatibility.Decision(False, f"{file} cannot be read: {error.strerror}")
    return compatibility.decide(text, source, target)


def _about_drill(each: drill.Drill) -> Iterator[str]:
    yield " ".join(each.doc.partition("\n\n")[0].split())
    yield f"Pass: the job {each.claim.value}."
    for name, allowed in each.parameters.items():
        yield f"{name}: {drill.words_of(allowed)}"


def _show(console: Console, title: str, lines: Iterable[str]) -> None:
    console.print(Text(title))
    for line in lines:
        console.print(Padding(Text(line), (0, 0, 0, 4)))
    console.print()


# --------------------------------------------------------------------------------------------------
# Before and after the launches


def begin(folder: RunFolder, matrix: Matrix, *, resume: bool, marks: Marks = Marks()) -> None:
    """Write down what is run before anything runs. A resumed run must be of the same matrix."""
    # A run that was killed before this was written has not begun.
    if resume and folder.run_json.exists():
        if folder.matrix.read_bytes() != matrix.text:
            raise UserError(
                "the matrix has changed since this run began",
                where=str(folder.matrix),
                hint="start a new run without --resume",
            )
        return
    write_atomic(folder.matrix, matrix.text)
    _keep_source_manifest(folder, matrix)
    write_json(
        folder.run_json,
        {
            "format": RUN_FORMAT_VERSION,
            "status": "started",
            "matrix": matrix.name,
            "matrix_path": str(matrix.path.absolute()),
            "stack": matrix.job.stack,
            "argv": sys.argv[1:],
            "started_utc": _now().isoformat(timespec="seconds"),
            "git_head": _git_head(matrix),
            "program": matrix.job.program,
            "program_sha256": sha256_of(Path(matrix.job.program)) if matrix.job.program else None,
            "image_digest": marks.image_digest,
            "nightly": marks.nightly,
            "installed": {
                name: installed(environment.python)
                for name, environment in matrix.environments.items()
            },
            "versions": {
                "ckptdrill": __version__,
                "python": sys.version.split()[0],
                **{name: importlib.metadata.version(name) for name in ("pydantic", "jinja2")},
            },
            "node": {
                "cores": os.cpu_count(),
                "gpus": len(Capacity.detect().devices),
                "storage": file_system(folder.root),
            },
        },
    )


def _keep_source_manifest(folder: RunFolder, matrix: Matrix) -> None:
    """Copy the manifest of the checkpoint that the run starts from, where it has one."""
    if matrix.job.start_from is None:
        return
    start = Path(matrix.job.start_from)
    inside, beside = start / FOLDER_MANIFEST, start.with_name(f"{start.name}.manifest.json")
    found = inside if start.is_dir() else beside
    if found.is_file() and not found.is_symlink():
        write_atomic(folder.root / SOURCE_MANIFEST_NAME, found.read_bytes())


def _conclude(folder: RunFolder, plans: Sequence[Plan]) -> None:
    """What only the facts know: the versions that really ran, and that everything is judged."""
    about = read_json(folder.run_json)
    launches = {step.id: step for each in plans for step in each.steps if isinstance(step, Launch)}
    recorded: dict[str, Any] = {}
    for launch in launches.values():
        if launch.environment not in recorded:
            record = read_launch(folder, launch.id, 1)
            recorded |= {launch.environment: _versions(record)} if record.ranks else {}
    ended = about.get("ended_utc") or _now().isoformat(timespec="seconds")
    write_json(
        folder.run_json,
        {**about, "status": "judged", "ended_utc": ended, "environments": recorded},
    )


def _versions(record: LaunchRecord) -> Mapping[str, Any]:
    started = record.of("started")[0].data if record.of("started") else {}
    return {name: started.get(name) for name in ("python", "torch", "cuda", "device")}


def _spent(plans: Sequence[Plan], verdicts: Sequence[Verdict]) -> list[str]:
    """Launches whose checkpoints nobody needs any more: every cell that used them passed."""
    needed = {
        step.id
        for each, verdict in zip(plans, verdicts, strict=True)
        if verdict.word is not VerdictWord.PASS
        for step in each.steps
    }
    return [step_id for step_id in plans_.steps_of(plans) if step_id not in needed]


def _summarise(folder: RunFolder) -> None:
    """Append the packet's page to the summary of a GitHub job, where this is one."""
    target = os.environ.get("GITHUB_STEP_SUMMARY")
    if not target:
        return
    try:
        with Path(target).open("a", encoding="utf-8") as stream:
            stream.write((folder.root / "packet.md").read_text(encoding="utf-8"))
    except OSError as error:
        print(f"ckptdrill: no step summary: {error}", file=sys.stderr)  # noqa: T201 - a warning


def _tell(folder: RunFolder, plans: Sequence[Plan], verdicts: Sequence[Verdict]) -> ExitCode:
    """Print one line per cell, the worst last where the eye is, and where the packet lies."""
    console = Console(soft_wrap=True)
    codes = []
    for each, verdict in zip(plans, verdicts, strict=True):
        met = verdict.meets(each.cell.expect)
        codes.append(ExitCode.AS_EXPECTED if met else _code(verdict))
        why = each.cell.expect.why if met and each.cell.expect else ""
        mark = "as expected" if met else "NOT as expected"
        console.print(
            Text(f"{verdict.word.value:<11} {verdict.reason.value:<16} {verdict.cell_id}")
        )
        if verdict.word is not VerdictWord.PASS:
            console.print(Text(f"            {verdict.explanation}"))
            console.print(Text(f"            {mark}{': ' + why if why else ''}"))
    counts = Counter(verdict.word.value for verdict in verdicts)
    unmet = sum(code is not ExitCode.AS_EXPECTED for code in codes)
    console.print(
        Text(
            f"{', '.join(f'{n} {word}' for word, n in counts.items())}; "
            f"{unmet or 'none'} against expectation"
        )
    )
    changes = read_json(folder.run_json).get("source_changes") or []
    if changes:
        console.print(Text(f"VOID: a source checkpoint changed under the run ({changes[0]})"))
    console.print(Text(f"packet: {folder.root / 'index.html'}"))
    return worst(*codes)


def _code(verdict: Verdict) -> ExitCode:
    if verdict.word is VerdictWord.UNSUPPORTED:
        return ExitCode.UNSUPPORTED
    return ExitCode.UNPROVEN


# --------------------------------------------------------------------------------------------------
# Finding things


def launch_mode(launcher: str) -> Mode:
    """The launcher that the command line names. Raises UserError for an unknown one."""
    try:
        return Mode(launcher)
    except ValueError:
        names = [mode.value for mode in Mode]
        raise UserError(
            f"--launcher {launcher!r} is unknown{did_you_mean(launcher, names)}",
            hint=f"choose one of {', '.join(names)}",
        ) from None


def _built(matrix: Matrix, plans: Sequence[Plan]) -> Matrix:
    """The matrix with every interpreter that its launches need in place."""
    console = Console(stderr=True, soft_wrap=True)
    steps = plans_.steps_of(plans).values()
    used = {step.environment for step in steps if isinstance(step, Launch)}
    ready = environments.built(matrix.environments, used, lambda text: console.print(Text(text)))
    return replace(matrix, environments=ready)


def _check_torch(matrix: Matrix, plans: Sequence[Plan]) -> None:
    """Every interpreter in use has torch: better said now than by a launch that dies."""
    steps = plans_.steps_of(plans).values()
    for name in sorted({step.environment for step in steps if isinstance(step, Launch)}):
        python = matrix.environments[name].python
        look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
        try:
            found = subprocess.run(
                [python, "-c", look], capture_output=True, check=False, timeout=60
            )
        except (OSError, subprocess.TimeoutExpired):
            found = None
        if found is None or found.returncode != 0:
            raise UserError(
                f"{python} has no torch",
                where=f"environment {name!r}",
                hint="name the interpreter that runs the job: --python PATH, or environments.NAME",
            )


def _misfits(graph: Graph, capacity: Capacity, fit: int) -> Iterator[str]:
    """Topologies that `run` refuses here (over `fit` ranks), and those that run alone."""
    launches = (step for step in graph.steps.values() if isinstance(step, Launch))
    sizes = {each.topology.name: each.topology.world_size for each in launches}
    kind = f"{len(capacity.devices)} GPUs" if capacity.devices else "no GPU"
    large = sorted(name for name, size in sizes.items() if size > fit)
    alone = sorted(name for name, size in sizes.items() if fit >= size > capacity.ranks)
    if large:
        yield (
            f"Do not fit this node ({kind}, {fit} ranks at most), and `run` refuses them: "
            f"{', '.join(large)}."
        )
    if alone:
        yield (
            f"Larger than what runs at once here ({kind}, {capacity.ranks} ranks), so that each "
            f"runs alone: {', '.join(alone)}."
        )


def _ranks_that_fit() -> int:
    """GPUs if there are any; else what the cores can carry."""
    devices = len(Capacity.detect().devices)
    return devices or max(_CPU_RANKS_AT_LEAST, 4 * (os.cpu_count() or 1))


def _newest(runs: Path, matrix: Matrix) -> RunFolder:
    latest = runs / matrix.name / "latest"
    if not latest.exists():
        raise UserError(
            f"there is no run of {matrix.name!r} to continue",
            where=str(latest.parent),
            hint="start one without --resume, or name its folder with --runs",
        )
    return RunFolder(latest.resolve())


def _run_folder(path: Path) -> RunFolder:
    root = path.parent if path.is_file() else path
    if not (root / "run.json").is_file():
        raise UserError(
            f"{path} is not the folder of a run",
            hint="it must hold run.json: name runs/NAME/latest, or a folder beside that",
        )
    return RunFolder(root.resolve())


def _git_head(matrix: Matrix) -> str | None:
    """The commit of the training code, if it is in a git checkout."""
    folder = Path(matrix.job.program).parent if matrix.job.program else Path(matrix.job.cwd)
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


def _now() -> datetime:
    return datetime.now(UTC)
