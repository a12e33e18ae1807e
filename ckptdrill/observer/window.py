"""Where the window of a run that saves begins, when the job counts in steps of its own.

A matrix names saves as the job does: by epochs, or by iterations of which some take no optimizer
step. How many optimizer steps that is shows when the save comes. So a rank that begins the wanted
save leaves a mark for the others, which do not see it: the step that it is of, and the step at
which the window after it ends. A run goes on beyond the step that the matrix names until then,
unless it saves elsewhere: then the path in the matrix is wrong, and it ends as it would have.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any

_LONGER = 20  # times as many steps as the matrix names, at the most


class Window:
    """What `launch["window"]` asks for: `{"wanted": pattern of the restored save's path, "own":
    pattern of all declared saves, "steps": length}`.
    """

    def __init__(self, launch: dict[str, Any]) -> None:
        asked = launch["window"]
        self._wanted, self._own = re.compile(asked["wanted"]), re.compile(asked["own"])
        self._steps = int(asked["steps"])
        self._folder = os.path.join(launch["folder"], "window")
        self._most = _LONGER * int(launch["stop_step"])

    def saving(self, path: str, step: int) -> None:
        """A save to `path` begins when `step` is completed."""
        if not self._own.search(path):
            self._mark("elsewhere")
            return
        self._mark("own")
        self._mark(f"saved.{step}")
        if self._wanted.search(path):
            self._mark("until", str(step + self._steps))

    def saved_at(self, step: int) -> bool:
        """Whether any rank has begun a declared save when `step` was completed."""
        return self._is_marked(f"saved.{step}")

    def until(self) -> int | None:
        """The step at which the window ends, where the wanted save has begun."""
        if not self._is_marked("until"):
            return None
        with open(os.path.join(self._folder, "until"), encoding="ascii") as file:
            return int(file.read())

    def waits_in_vain(self, step: int) -> bool:
        """Whether the wanted save will not come: all saves went elsewhere, or it took too long."""
        elsewhere = self._is_marked("elsewhere") and not self._is_marked("own")
        return elsewhere or step >= self._most

    def _is_marked(self, name: str) -> bool:
        return os.path.exists(os.path.join(self._folder, name))

    def _mark(self, name: str, text: str = "") -> None:
        """The first rank to leave a mark decides what it says."""
        path = os.path.join(self._folder, name)
        if os.path.exists(path):
            return
        os.makedirs(self._folder, exist_ok=True)
        own = f"{path}.{os.getpid()}"
        with open(own, "w", encoding="ascii") as file:
            file.write(text)
        with contextlib.suppress(FileExistsError):
            os.link(own, path)
        os.remove(own)
