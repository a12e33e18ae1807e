"""The effects of the packet: read a run folder, write the derived files into it.

What cannot be read never stops the packet, since a run that went badly is the one people look at:
the cell is shown without it, and says so. The list of checksums is written last, so that it covers
everything else; until then the folder fails verification, as it should.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ckptdrill import store
from ckptdrill.errors import UserError
from ckptdrill.model import JsonValue
from ckptdrill.packet import (
    attestation,
    compatibility,
    html,
    junit,
    lines,
    machine,
    manifests,
    markdown,
    metrics,
)
from ckptdrill.packet.view import BOUND, GateRow, PacketView, StoredCell, build
from ckptdrill.store import RunFolder

# What the attestation names beside the list of checksums; every other file is in that list.
_ATTESTED = ("matrix.yaml", "packet.json", store.SOURCE_MANIFEST_NAME, store.MANIFEST_NAME)


def write(
    run: RunFolder,
    key: Ed25519PrivateKey | None = None,
    gate: Callable[[Path], Sequence[GateRow]] = lambda _: (),
) -> None:
    """Derive every file for people and for tools from the stored ones, then the checksums, then
    the attestation over those, signed when there is a `key`. `gate` says of a folder that has its
    packet.json how the conditions stand that this decides; the page shows them.

    Raises UserError when run.json cannot be read or the folder cannot be written.
    """
    view = read(run)
    store.write_atomic(run.root / "packet.json", machine.render(view))
    store.write_atomic(run.root / "packet.md", markdown.render(view))
    store.write_atomic(run.root / "index.html", html.render(view, gate=gate(run.root)))
    store.write_atomic(run.root / "junit.xml", junit.render(view))
    store.write_atomic(run.root / "metrics.prom", metrics.render(view))
    store.write_atomic(run.root / store.COMPATIBILITY_NAME, compatibility.render(view))
    _write_list(run)
    there = [run.root / name for name in _ATTESTED if (run.root / name).is_file()]
    digests = {path.name: store.sha256_of(path) for path in there}
    store.write_atomic(run.root / store.ATTESTATION_NAME, attestation.render(view, digests, key))
    store.write_seal(run.root)


def _write_list(run: RunFolder) -> None:
    """The list of checksums. A page that shows the approval of another list is not left behind."""
    path = run.root / store.MANIFEST_NAME
    before = path.read_bytes() if path.is_file() else b""
    store.write_manifest(run.root)
    if path.read_bytes() != before:
        (run.root / store.APPROVED_PAGE_NAME).unlink(missing_ok=True)


def read(run: RunFolder) -> PacketView:
    """Everything stored about a run, as the object that is rendered.

    Raises UserError when run.json is missing or is not a JSON object.
    """
    about = store.read_json(run.run_json)
    if not isinstance(about, dict):
        raise UserError(f"{run.run_json} holds no JSON object", hint="is this the folder of a run?")
    folder = run.root / "cells"
    names = sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
    launches = _read_launches(run)
    cells = _with_lines(run, [_read_cell(run, name, launches) for name in names])
    sources, given = (
        _read_optional(run, name, []) for name in (run.sources.name, store.SOURCE_MANIFEST_NAME)
    )
    return build(about, cells, sources, given)


def _read_cell(run: RunFolder, cell_id: str, launches: Mapping[str, JsonValue]) -> StoredCell:
    folder = run.root / "cells" / cell_id
    problems: list[str] = []
    plan = _read_optional(run, f"cells/{cell_id}/plan.json", problems)
    return StoredCell(
        id=cell_id,
        plan=plan,
        verdict=_read_optional(run, f"cells/{cell_id}/verdict.json", problems),
        damage=_read_damage(run, plan, problems),
        launches=launches,
        replayable=(folder / "repro.sh").is_file(),
        has_repro=(folder / store.REPRO_NAME).is_file(),
        problems=tuple(problems),
    )


def _with_lines(run: RunFolder, cells: Sequence[StoredCell]) -> list[StoredCell]:
    """The cells with the beginnings of the lines that they cite; cells share launches, so each file
    is read once, up to the last line that any of them cites.
    """
    cited = {cell.id: lines.cited(cell.verdict) for cell in cells}
    wanted: dict[str, set[int]] = {}
    for file, number in map(lines.place, itertools.chain.from_iterable(cited.values())):
        wanted.setdefault(file, set()).add(number)
    heads = {
        f"{file}:{number}": head
        for file, numbers in wanted.items()
        for number, head in _heads(run.root / file, numbers)
    }
    return [
        replace(cell, lines={ref: heads[ref] for ref in cited[cell.id] if ref in heads})
        for cell in cells
    ]


def _heads(path: Path, numbers: Collection[int]) -> Iterator[tuple[int, str]]:
    """The beginnings of these lines; nothing where there is no such file of the run's own."""
    if path.is_symlink() or not path.is_file():
        return
    with contextlib.suppress(OSError), path.open("rb") as stream:
        for number, content in enumerate(itertools.islice(stream, max(numbers)), 1):
            if number in numbers:
                yield number, content[: lines.HEAD_BYTES].decode(errors="replace")


def _read_launches(run: RunFolder) -> dict[str, JsonValue]:
    """launch.json of every launch that began, with what exit.json says of its read-only binds, and
    the manifests of what it saved; cells share launches, so each is read once.
    """
    found: dict[str, JsonValue] = {}
    for path in sorted(run.root.glob("launches/*/launch.json")):
        with contextlib.suppress(UserError, OSError, RecursionError):
            launch = store.read_json(path)
            ended = _read_optional(run, f"launches/{path.parent.name}/exit.json", [])
            told = {key: ended.get(key) for key in BOUND} if isinstance(ended, dict) else {}
            told[manifests.KEY] = _read_manifests(run, path.parent.name)
            found[path.parent.name] = {**launch, **told} if isinstance(launch, dict) else launch
    return found


def _read_manifests(run: RunFolder, launch_id: str) -> list[JsonValue]:
    """What manifests.json of a launch lists, each entry with the manifest that it names."""
    folder = f"launches/{launch_id}"
    listed = _read_optional(run, f"{folder}/{store.LAUNCH_MANIFESTS_NAME}", [])
    entries = [e for e in listed if isinstance(e, dict)] if isinstance(listed, list) else []
    for each in entries:
        with contextlib.suppress(UserError):
            name = store.safe_name(str(each.get("file")))
            each["path"] = f"{folder}/{name}"
            each["record"] = _read_optional(run, each["path"], [])
    return entries


def _read_damage(run: RunFolder, plan: JsonValue, problems: list[str]) -> JsonValue:
    damage = plan.get("damage") if isinstance(plan, dict) else None
    if not isinstance(damage, dict):
        return None
    try:
        path = run.damage(str(damage.get("id")))
    except UserError:
        return None
    return _read_optional(run, path.relative_to(run.root).as_posix(), problems)


def _read_optional(run: RunFolder, name: str, problems: list[str]) -> JsonValue:
    """None where there is no such file; where there is and it cannot be read, that is a problem."""
    path = run.root / name
    if not path.exists():
        return None
    try:
        return store.read_json(path)
    except (UserError, OSError, RecursionError):
        problems.append(f"{name} cannot be read")
        return None
