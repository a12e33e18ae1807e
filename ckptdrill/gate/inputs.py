"""What the gate looks at, read: the packet, the checkpoint, and the environment that will run.

Whatever cannot be read becomes None and with that a condition that is not known; only what the
person at the command line got wrong is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from ckptdrill import manifest, packet, store
from ckptdrill.errors import UserError
from ckptdrill.gate import approval
from ckptdrill.gate.conditions import Checkpoint, Inputs
from ckptdrill.installed import installed
from ckptdrill.manifest.record import ProblemError

_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True)
class Options:
    """What the command line names; None where it names nothing. `trusted` is a public key."""

    checkpoint: Path | None
    python: str | None
    program: Path | None
    image_digest: str | None
    max_age_s: float
    trusted: str | None


def age_s(text: str) -> float:
    """`7d`, `12h`, `30m` in seconds. Raises UserError for anything else."""
    number, unit = text[:-1], text[-1:]
    if not number.isascii() or not number.isdigit() or unit not in _UNIT_S:
        raise UserError(f"--max-age {text!r} is no age", hint="write 7d, 12h or 30m")
    return float(int(number) * _UNIT_S[unit])


def gather(root: Path, options: Options, now_s: float) -> Inputs:
    """Everything that the conditions of the packet at `root` rest on."""
    found = _json(root / "packet.json")
    recorded = _recorded(found)
    program = options.program or _path(recorded.get("program"))
    return Inputs(
        problems=tuple(map(str, packet.verify(root))),
        packet=found,
        policy=_policy(root / "matrix.yaml"),
        checkpoint=_checkpoint(options.checkpoint) if options.checkpoint else None,
        installed=_installed(options.python) if options.python else None,
        program_sha256=store.sha256_of(program) if program and program.is_file() else None,
        image_digest=options.image_digest,
        ended_s=_unix_s(recorded.get("ended_utc")),
        now_s=now_s,
        max_age_s=options.max_age_s,
        approval=approval.read(root) if (root / store.MANIFEST_NAME).is_file() else None,
        trusted=options.trusted,
    )


def recorded(root: Path) -> Inputs:
    """What the packet at `root` says by itself."""
    return Inputs(
        problems=(), packet=_json(root / "packet.json"), policy=_policy(root / "matrix.yaml")
    )


def _json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _recorded(found: Mapping[str, Any]) -> Mapping[str, Any]:
    run = found.get("run")
    recorded = run.get("recorded") if isinstance(run, dict) else None
    return recorded if isinstance(recorded, dict) else {}


def _policy(path: Path) -> Mapping[str, Any]:
    try:
        value = yaml.safe_load(path.read_bytes())
        policy = value.get("policy") or {}
    except (OSError, yaml.YAMLError, AttributeError, ValueError, RecursionError):
        return {}
    return policy if isinstance(policy, dict) else {}


def _path(value: object) -> Path | None:
    return Path(value) if isinstance(value, str) else None


def _unix_s(value: object) -> float | None:
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        return None


def _installed(python: str) -> Mapping[str, str]:
    found = installed(python)
    if found is None:
        raise UserError(
            f"{python} cannot be asked for its packages",
            hint="name the interpreter that will run the job: --python PATH",
        )
    return found


def _checkpoint(path: Path) -> Checkpoint:
    """Compare the checkpoint with the manifest that lies with it; all content is read."""
    audit = manifest.check(path)
    problems = tuple((str(each.kind), str(each)) for each in audit.problems)
    try:
        written = manifest.read(manifest.path_of(path))
    except ProblemError:
        return Checkpoint(problems)
    marker = written.commit_marker.file if written.commit_marker else None
    if marker is None and written.format is not None:
        marker = ""
    return Checkpoint(problems, marker, len(audit.hashed))
