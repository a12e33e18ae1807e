"""Keep a checkpoint that a drill will restore, as it is when the job has written it.

A job may keep its newest checkpoints alone, or write one file again and again: by the time that
the run has ended, the one under drill is gone or another. So when a rank comes around after a step,
what then lies at the path of a wanted checkpoint is kept beside `{out}`: files of a path that names
its step as further links, which cost nothing and outlive the job's own; files of a path that does
not as copies, for the wanted step alone. Every rank does it, and so what another rank finished
later is in it, too. The job's own files are only read.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .watch import Watch


class Keeper:
    """What `launch["keep"]` asks for: `{"root": {out}, "into": folder, "paths": [[step, path, named
    by its step or not], …]}`.
    """

    def __init__(self, watch: Watch, launch: dict[str, Any]) -> None:
        asked = launch["keep"]
        self._watch, self._first = watch, int(launch.get("first_step") or 0)
        self._root, self._into = asked["root"], asked["into"]
        self._paths: list[tuple[int, str, bool]] = asked["paths"]
        self._seen: dict[str, tuple[int, int]] = {}
        self._saves = 0

    def look(self) -> None:
        """Keep what is new since the last look."""
        saved, self._saves = self._watch.saves_begun != self._saves, self._watch.saves_begun
        for step, path, named in self._paths:
            if named or step == self._first + self._watch.recorder.step:
                place = _place(path)
                if place is not None and (saved or self._seen.get(path) != place):
                    self._seen[path] = place
                    self._keep(step, path, named)

    def _keep(self, step: int, path: str, named: bool) -> None:
        target = os.path.join(self._into, str(step), os.path.relpath(path, self._root))
        for source, name in _files(path):
            kept = os.path.normpath(os.path.join(target, name))
            # The job may remove it at this moment.
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                os.makedirs(os.path.dirname(kept), exist_ok=True)
                if named:
                    os.link(source, kept)
                elif _place(source) != _place(kept):
                    own = f"{kept}.{os.getpid()}"
                    shutil.copy2(source, own)
                    os.replace(own, kept)


def _place(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _files(path: str) -> Iterator[tuple[str, str]]:
    """Every file at or below `path`, and its name relative to that; links are not followed."""
    if os.path.islink(path):
        return
    if os.path.isfile(path):
        yield path, "."
    for folder, _, names in os.walk(path):
        for name in names:
            whole = os.path.join(folder, name)
            if not os.path.islink(whole):
                yield whole, os.path.relpath(whole, path)
