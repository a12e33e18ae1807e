"""A drill is found by its file name, and a file that is no drill is refused in words."""

from pathlib import Path

import pytest

from ckptdrill import drill, resources
from ckptdrill.errors import UserError
from ckptdrill.model import Claim

GOOD = '''"""Fewer ranks."""
from ckptdrill.model import Claim
CLAIM = Claim.CONTINUES
PARAMETERS = {"kind": ("bit-flip", "delete", 4, True), "tensor": str, "offset": int, "share": float}
def plan(cell, shared):
    return None
'''


@pytest.fixture
def drills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "dp_shrink.py").write_text(GOOD)
    (tmp_path / "_shared.py").write_text("raise RuntimeError")
    (tmp_path / "notes.txt").write_text("no drill")
    monkeypatch.setattr(resources, "drills_dir", lambda: tmp_path)
    return tmp_path


@pytest.mark.usefixtures("drills")
def test_a_drill_has_the_name_of_its_file() -> None:
    assert drill.names() == ("dp-shrink",)
    loaded = drill.load("dp-shrink")
    assert (loaded.name, loaded.claim, loaded.doc) == (
        "dp-shrink",
        Claim.CONTINUES,
        "Fewer ranks.",
    )
    assert loaded.parameters["tensor"] is str
    assert loaded.plan(None, None) is None


@pytest.mark.usefixtures("drills")
@pytest.mark.parametrize(
    "name", ["dp_shrink", "../dp-shrink", "/etc/passwd", "", "_shared", "a\0b"]
)
def test_only_a_listed_name_ever_becomes_a_path(name: str) -> None:
    with pytest.raises(UserError, match="no drill") as caught:
        drill.load(name)
    assert caught.value.hint == "available: dp-shrink"


@pytest.mark.usefixtures("drills")
def test_the_nearest_name_is_offered() -> None:
    with pytest.raises(UserError, match="did you mean 'dp-shrink'"):
        drill.load("dp-shrnk")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", "has no docstring"),
        ('"""Doc."""', "has no CLAIM"),
        (GOOD.replace("Claim.CONTINUES", "'continues'"), "has no CLAIM of the type Claim"),
        (GOOD.replace("PARAMETERS", "PARAMS"), "has no mapping PARAMETERS"),
        (GOOD.replace(": str,", ": 'str',"), "PARAMETERS entry 'tensor'"),
        (GOOD.replace(": str,", ": list,"), "PARAMETERS entry 'tensor'"),
        (GOOD.replace("def plan", "def plans"), "has no function plan"),
        ("def", "cannot be loaded: SyntaxError"),
        ("import no_such_module_at_all", "cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_a_file_that_is_no_drill_says_what_it_lacks(drills: Path, source: str, words: str) -> None:
    (drills / "half.py").write_text(source)
    with pytest.raises(UserError) as caught:
        drill.load("half")
    assert words in caught.value.what
    assert caught.value.where == str(drills / "half.py")


@pytest.mark.usefixtures("drills")
@pytest.mark.parametrize(
    ("parameter", "value", "words"),
    [
        ("kind", "delete", None),
        ("kind", "delte", "allowed: bit-flip, delete, 4, True (did you mean 'delete'?)"),
        ("kind", 1, "allowed: bit-flip, delete, 4, True"),
        ("kind", True, None),
        ("kind", None, "allowed: bit-flip, delete, 4, True"),
        ("tensor", "*.weight", None),
        ("tensor", 3, "allowed: text"),
        ("offset", 3, None),
        ("offset", True, "allowed: an integer"),
        ("offset", 3.5, "allowed: an integer"),
        ("share", 3, None),
        ("share", 0.5, None),
        ("share", "half", "allowed: a number"),
    ],
)
def test_parameters_are_checked_by_value_and_type(
    parameter: str, value: object, words: str | None
) -> None:
    allowed = drill.load("dp-shrink").parameters[parameter]
    assert drill.refusal(allowed, value) == words


def test_every_shipped_drill_loads() -> None:
    assert "baseline" in drill.names()
    for name in drill.names():
        assert drill.load(name).doc
