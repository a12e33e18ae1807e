"""The search for quotes finds what a release says, and misses what it does not say."""

from pathlib import Path

import pytest

from ckptdrill import claims
from tests.sources import find_quotes

QUOTED = [claim for claim in claims.every() if claim.id == "zero-native-world-size"]
CODE = """
raise ZeRORuntimeException("Automatic adjustment " \\
    "of ZeRO's optimizer state partitioning with a new world size is {} "
    "currently supported.")
"""


@pytest.mark.parametrize(("word", "missing"), [("not", 0), ("now", 1)])
def test_a_quote_is_found_across_the_seams_of_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, missing: int
) -> None:
    path = tmp_path / "deepspeed/runtime/engine.py"
    path.parent.mkdir(parents=True)
    path.write_text(CODE.format(word))
    monkeypatch.setattr(find_quotes, "installed", lambda name, version: tmp_path)
    assert find_quotes.look("deepspeed", "0.19.8", QUOTED) == missing


def test_another_version_is_not_the_release_that_was_read() -> None:
    assert find_quotes.installed("pytest", "0.0.1") is None
    assert find_quotes.installed("no-such-package", "1.0") is None
