"""What each verb of `ckptdrill manifest` does: read what was typed, do it, say what came out."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ckptdrill import manifest as manifests
from ckptdrill.errors import ExitCode, UserError
from ckptdrill.manifest import Audit, Facts, Generation, Manifest, Problem, Sample
from ckptdrill.manifest.record import ProblemError, printable

_UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("bytes", 1))
_MISSPELT = 0.8  # how alike two keys are before one is taken for a misspelling
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)%")


def write(
    checkpoint: Path, facts: Path | None, step: int | None, output: Path | None, *, as_json: bool
) -> ExitCode:
    """Describe a checkpoint and write its manifest."""
    place = output or manifests.path_of(checkpoint)
    if place.exists():
        raise UserError(
            f"there is a manifest already: {place}",
            hint="`ckptdrill manifest verify` compares with it; remove it to record anew",
        )
    if output is not None and output.resolve().is_relative_to(checkpoint.resolve()):
        raise UserError(
            f"{output} would lie in the checkpoint, which --output is to leave untouched",
            hint="name a place outside, or leave --output out",
        )
    record = manifests.describe(checkpoint, _facts(facts, step))
    if output is None:
        record = manifests.commit(checkpoint, record)
    else:
        manifests.write(output, record)
    if as_json:
        _print(record.to_json().rstrip())
    else:
        _print(f"{_amount(_sizes(record))}, recorded in {place}")
        _print_unknown(record)
    return ExitCode.AS_EXPECTED


def verify(
    checkpoint: Path, sample: Sample | None, manifest: Path | None, *, as_json: bool
) -> ExitCode:
    """Compare a checkpoint with its manifest."""
    if manifest is None:
        audit = manifests.check(checkpoint, sample=sample)
    else:
        audit = manifests.audit(checkpoint, _read(manifest), sample=sample)
    if as_json:
        _print_json(_audit_json(checkpoint, audit, sample))
    else:
        for problem in audit.problems:
            _print(str(problem))
        _print(_closing(audit, sample))
    return ExitCode.AS_EXPECTED if audit.ok else ExitCode.UNSUPPORTED


def select(root: Path, sample: Sample | None, *, as_json: bool) -> ExitCode:
    """Choose a checkpoint, and say why."""
    selection = manifests.select(root, sample=sample)
    if as_json:
        _print_json(
            {
                "chosen": str(selection.chosen.path) if selection.chosen else None,
                "sample": _sample_json(sample),
                "generations": [_generation_json(each) for each in selection.generations],
                "pointers": [
                    {"path": str(p.path), "names": p.names, "pointing": p.pointing.value}
                    for p in selection.pointers
                ],
            }
        )
    else:
        for each in selection.generations:
            step = "step ?" if each.completed_step is None else f"step {each.completed_step}"
            _say(f"{each.standing:<13} {printable(str(each.path))} ({step}): {each.why}")
        for pointer in selection.pointers:
            _say(f"pointer       {pointer.path} names {pointer.names!r}: {pointer.pointing}")
        if sample is not None:
            _say(f"read          {sample.share:.6g} of the bytes only, seed {sample.seed!r}")
        if selection.chosen is not None:
            _print(str(selection.chosen.path))
        else:
            _say("nothing below is committed and valid")
    return ExitCode.AS_EXPECTED if selection.chosen else ExitCode.UNSUPPORTED


def publish(
    staged: Path, target: Path, facts: Path | None, step: int | None, *, as_json: bool
) -> ExitCode:
    """Publish a staged checkpoint."""
    published = manifests.publish(staged, target, _facts(facts, step))
    if as_json:
        _print(published.manifest.to_json().rstrip())
        return ExitCode.AS_EXPECTED
    _print(f"{_amount(_sizes(published.manifest))}, committed as {published.path}")
    pointer = "names it" if published.pointer_moved else "names a newer one and was left"
    _print(f"latest {pointer}")
    _print_unknown(published.manifest)
    return ExitCode.AS_EXPECTED


def sample_of(share: str | None, seed: str | None) -> Sample | None:
    """The sample that was asked for; without a seed it is another one each day.

    Raises UserError for a share that is no percentage, or a seed without a share.
    """
    if share is None:
        if seed is not None:
            raise UserError("--seed without --sample", hint="add --sample 5%")
        return None
    found = _PERCENT.fullmatch(share)
    if found is None or float(found[1]) > 100:
        raise UserError(f"--sample {share!r} is no percentage", hint="write it as 5% or 0.5%")
    return Sample(float(found[1]) / 100, seed or f"{datetime.now(UTC):%Y-%m-%d}")


# --------------------------------------------------------------------------------------------------
# What was typed


def _facts(path: Path | None, step: int | None) -> Facts:
    facts = Facts() if path is None else _facts_in(path)
    if step is None:
        return facts
    if facts.completed_step not in (None, step):
        raise UserError(f"--step {step}, but the facts say {facts.completed_step}", where=str(path))
    return facts.model_copy(update={"completed_step": step})


def _facts_in(path: Path) -> Facts:
    try:
        facts = Facts.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read the facts: {error.strerror}", where=str(path)) from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise UserError(
            f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}",
            where=str(path),
            hint=f"the keys are {', '.join(Facts.model_fields)}",
        ) from error
    _refuse_misspelt(facts, path)
    return facts


def _refuse_misspelt(facts: Facts, path: Path) -> None:
    """Parts may carry keys of their owner; one that is nearly a key of ours is meant to be it."""
    for name, part in facts:
        known = (
            {f.alias or key for key, f in type(part).model_fields.items()}
            if (isinstance(part, BaseModel))
            else set()
        )
        for key in (part.model_extra or {}) if isinstance(part, BaseModel) else {}:
            near = difflib.get_close_matches(key.lower(), known, n=1, cutoff=_MISSPELT)
            if near:
                raise UserError(
                    f"{name}.{key}: not a key of the record (did you mean {near[0]!r}?)",
                    where=str(path),
                    hint=f"the keys of {name} are {', '.join(sorted(known))}; others of your own "
                    "may stand beside them under names that differ more",
                )


def _read(path: Path) -> Manifest:
    try:
        return manifests.read(path)
    except ProblemError as error:
        raise UserError(str(error.problem), where=str(path), code=ExitCode.UNSUPPORTED) from error


# --------------------------------------------------------------------------------------------------
# What is said


def _closing(audit: Audit, sample: Sample | None) -> str:
    if audit.problems:
        count = len(audit.problems)
        return f"INVALID: {count} problem{'s' if count > 1 else ''}"
    if sample is None:
        return f"valid: {_amount(audit.hashed)}, all read and as recorded"
    return (
        f"sample of {sample.share:.6g} of the bytes, seed {sample.seed!r}: {_amount(audit.hashed)} "
        f"read and as recorded; {_amount(audit.unread)} NOT read, only their sizes are as recorded"
    )


def _sizes(record: Manifest) -> Mapping[str, int]:
    return {file.path: file.size_bytes for file in record.files}


def _amount(sizes: Mapping[str, int]) -> str:
    size, count = sum(sizes.values()), len(sizes)
    unit, scale = next((u for u in _UNITS if size >= u[1]), _UNITS[-1])
    return f"{count} file{'' if count == 1 else 's'}, {size / scale:.4g} {unit}"


def _print_unknown(record: Manifest) -> None:
    if record.unknown:
        _print(f"unknown, hence null: {', '.join(record.unknown)}")


def _audit_json(checkpoint: Path, audit: Audit, sample: Sample | None) -> dict[str, Any]:
    return {
        "checkpoint": str(checkpoint),
        "valid": audit.ok,
        "problems": [_problem_json(problem) for problem in audit.problems],
        "sample": _sample_json(sample),
        "read_files": len(audit.hashed),
        "read_bytes": sum(audit.hashed.values()),
        "unread_files": len(audit.unread),
        "unread_bytes": sum(audit.unread.values()),
    }


def _sample_json(sample: Sample | None) -> dict[str, Any] | None:
    return None if sample is None else {"share": sample.share, "seed": sample.seed}


def _generation_json(each: Generation) -> dict[str, Any]:
    return {
        "path": str(each.path),
        "standing": each.standing.value,
        "completed_step": each.completed_step,
        "durable_commit_time_utc": each.durable_commit_time_utc,
        "why": each.why,
        "problems": [_problem_json(problem) for problem in each.problems],
    }


def _problem_json(problem: Problem) -> dict[str, str]:
    return {
        "kind": problem.kind.value,
        "path": problem.path,
        "explanation": problem.explanation,
    }


def _print_json(value: Any) -> None:
    _print(json.dumps(value, indent=1))


def _print(text: str) -> None:
    print(text)  # noqa: T201 - the output of the verb


def _say(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201 - standard output is the path alone
