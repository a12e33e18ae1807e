"""The manifests that a cell rests on: of what was restored, and of what was saved next.

Pure. The checkpoint under drill is one that a launch of the run saved, or the one that the run was
given; after it comes the first checkpoint that the restored job saved itself. Entries that another
version wrote in another shape are left out, one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ckptdrill.model import JsonValue, Plan
from ckptdrill.store import SOURCE_MANIFEST_NAME

# Under which key a launch has the entries of its manifests.json, each with its `path` and `record`.
KEY = "manifests"
_OTHER_SHAPE = (TypeError, ValueError, KeyError, AttributeError)


@dataclass(frozen=True)
class ManifestView:
    """The manifest of one checkpoint; `refused` is why it can have none, else empty.

    `of` is `given`, `source` or `after the restore`. `keys` and `shapes` are digests over all
    tensor names, and over names, dtypes and shapes.
    """

    of: str
    step: int
    refused: str = ""
    path: str = ""
    format: str = ""
    marker: str = ""
    files: int = 0
    size_bytes: int = 0
    keys: str = ""
    shapes: str = ""
    identifier: str = ""


def of_cell(plan: Plan, begun: Mapping[str, JsonValue], given: JsonValue) -> Iterator[ManifestView]:
    """Of the checkpoint that is restored, then of the first one that was saved after it.

    `begun` are the launches by id, `given` is the manifest of the checkpoint that the run was
    given.
    """
    restored = plan.restore.restores
    if restored is None and isinstance(given, Mapping):
        step = given.get("completed_step") or 0
        yield from _views("given", [{"step": step, "path": SOURCE_MANIFEST_NAME, "record": given}])
    if restored is not None:
        saved = _views("source", _entries(begun, plan.source.id))
        yield from (view for view in saved if view.step == restored.step)
    yield from _views("after the restore", _entries(begun, plan.restore.id))


def _entries(begun: Mapping[str, JsonValue], launch_id: str) -> Iterable[JsonValue]:
    about = begun.get(launch_id)
    entries = about.get(KEY) if isinstance(about, Mapping) else None
    return entries if isinstance(entries, list) else ()


def _views(of: str, entries: Iterable[JsonValue]) -> Iterator[ManifestView]:
    for each in entries:
        with contextlib.suppress(*_OTHER_SHAPE):
            yield _view(of, each)


def _view(of: str, entry: Mapping[str, JsonValue]) -> ManifestView:
    step, record = int(entry["step"]), entry.get("record")
    if not isinstance(record, Mapping):
        return ManifestView(of, step, refused=str(entry["refused"] or "cannot be read"))
    marker = record.get("commit_marker")
    return ManifestView(
        of=of,
        step=step,
        path=str(entry["path"]),
        format=_text(record, "format"),
        marker=_text(marker, "file") if marker else "",
        files=len(record["files"]),
        size_bytes=sum(int(each["bytes"]) for each in record["files"]),
        keys=_text(record, "state_keys_sha256"),
        shapes=_text(record, "shapes_sha256"),
        identifier=_text(record, "checkpoint_id"),
    )


def _text(record: Mapping[str, JsonValue], key: str) -> str:
    value = record.get(key)
    return "" if value is None else str(value)
