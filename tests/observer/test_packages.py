"""The versions a process really runs with."""

import sys
from pathlib import Path

import pytest
import torch

from ckptdrill.observer.packages import imported


def test_only_imported_packages_count_and_python_itself_does_not() -> None:
    found = imported()
    assert found["torch"].startswith(torch.__version__.partition("+")[0])
    assert found["pytest"] == pytest.__version__
    assert "json" not in found
    assert "ckptdrill_observer" not in found


def test_the_first_on_the_path_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / name / "site-packages" for name in ("over", "under")]
    for version, folder in zip(("2.0", "1.0"), folders, strict=True):
        folder.mkdir(parents=True)
        (folder / "tiny_pkg.py").write_text("")
        (folder / f"Tiny.Pkg-{version}.dist-info").mkdir()
        monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "path", [*map(str, folders), *sys.path])
    assert "tiny_pkg" not in imported()
    import tiny_pkg  # type: ignore[import-not-found]  # noqa: F401

    assert imported()["tiny_pkg"] == "2.0"
    monkeypatch.delitem(sys.modules, "tiny_pkg")
