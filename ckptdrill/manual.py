"""The lower part of the help of a verb, in the same form for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptdrill.errors import ExitCode


def codes(meanings: Mapping[ExitCode, str]) -> str:
    """The block of exit codes."""
    return _lines("Exit codes:", (f"{code.value:>2}  {text}" for code, text in meanings.items()))


def page(needs: str, prints: str, meanings: Mapping[ExitCode, str], *examples: str) -> str:
    """What a verb needs, what it prints, its exit codes, and examples of its use."""
    both = (f"Needs: {needs}", f"Prints: {prints}")
    return "\n\n".join([*both, codes(meanings), _lines("Example:", examples)])


def _lines(title: str, lines: Iterable[str]) -> str:
    """A block of an epilog that keeps its lines: a backspace in front stops the re-wrapping."""
    return "\n".join(["\b", title, *(f"  {line}" for line in lines)])
