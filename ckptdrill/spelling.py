"""The nearest allowed spelling: what turns "unknown key" into a mended file.

Every place that compares a user's word with a closed list (keys, names, values, placeholders) words
its refusal through these two functions, so that all of them read alike.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable


def nearest(word: str, allowed: Iterable[str]) -> str | None:
    """The allowed word that `word` was most likely meant to be; None when nothing is close.

    Case, `-` and `_` count for nothing: those are the usual slips. Of many, the first 200 compete.
    """
    folded = {_fold(option): option for option in itertools.islice(allowed, 200)}
    matches = difflib.get_close_matches(_fold(word[:100]), folded, n=1, cutoff=0.55)
    return folded[matches[0]] if matches else None


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """` (did you mean 'saves'?)` ready to be appended, or nothing."""
    match = nearest(word, allowed)
    return f" (did you mean {match!r}?)" if match and match != word else ""


def listed(allowed: Iterable[object]) -> str:
    """`a, b, c` for an error message; long lists are cut after 24."""
    words = [str(word) for word in allowed]
    cut = [*words[:24], f"… {len(words) - 24} more"] if len(words) > 25 else words
    return ", ".join(cut) or "none"


def _fold(word: str) -> str:
    return word.lower().replace("_", "-")
