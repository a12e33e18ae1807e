"""The one error a user ever sees, and the exit codes a script can act on.

Everything that is the user's to mend (a matrix key, a path, a topology that does not fit) is raised
as `UserError` and printed as three lines: what, where, and the next move. Anything else that
escapes
is a defect of ckptdrill and ends in exit code 70.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a run returns to the shell. When several apply, `worst` decides."""

    AS_EXPECTED = 0
    UNSUPPORTED = 1
    USAGE = 2
    UNPROVEN = 3
    SOURCE_CHANGED = 4
    INTERNAL = 70
    BUSY = 75  # EX_TEMPFAIL of sysexits.h


EXIT_CODE_MEANING = {
    ExitCode.AS_EXPECTED: "every cell is as expected (Pass, unless the matrix says otherwise)",
    ExitCode.UNSUPPORTED: "some cell is Unsupported against expectation",
    ExitCode.USAGE: "usage or matrix error; nothing was started",
    ExitCode.UNPROVEN: "some cell is Unproven against expectation, none Unsupported",
    ExitCode.SOURCE_CHANGED: "the source checkpoint changed under the run: trust nothing in it",
    ExitCode.INTERNAL: "internal error of ckptdrill",
    ExitCode.BUSY: "another run of this matrix is under way; this one did nothing",
}

# From harmless to grave. A changed source voids every verdict, so it outranks them.
_SEVERITY = (
    ExitCode.AS_EXPECTED,
    ExitCode.BUSY,
    ExitCode.UNPROVEN,
    ExitCode.UNSUPPORTED,
    ExitCode.SOURCE_CHANGED,
    ExitCode.USAGE,
    ExitCode.INTERNAL,
)


def worst(*codes: ExitCode) -> ExitCode:
    """The gravest of `codes`; AS_EXPECTED when there is none."""
    return max(codes, key=_SEVERITY.index, default=ExitCode.AS_EXPECTED)


class UserError(Exception):
    """A mistake the user can mend: what is wrong, where, and what to do next."""

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        hint: str | None = None,
        code: ExitCode = ExitCode.USAGE,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint
        self.code = code

    def __str__(self) -> str:
        """Three short lines at most, ready for a terminal."""
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.hint:
            lines.append(f"  next:  {self.hint}")
        return "\n".join(lines)
