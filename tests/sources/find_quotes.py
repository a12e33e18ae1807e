"""Find the quotes of claims.yaml where they were read: in the files of the releases that it names.

    .venv/bin/python tests/sources/find_quotes.py             every release
    .venv/bin/python tests/sources/find_quotes.py deepspeed   one of them

A release that is installed in that version is read in place; others are fetched with pip and
unpacked into a temporary folder (about 60 MB in all). A quote counts as found when one text file of
the release holds it, with line breaks, comment signs and the seams of string literals taken out.
Quotes of web pages and of repositories are counted, and not looked for. The exit code is 1 when one
is missing, which is what happens when a claim is moved to a newer release and not read again.
"""

import importlib.metadata
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ckptdrill import claims

_RELEASE = re.compile(r"https://pypi\.org/project/([\w-]+)/([\w.]+)/")
_SEAM = re.compile(r"([\"'])\s*\\?\n\s*f?\1")
_COMMENT = re.compile(r"\n\s*#")


def main(wanted: list[str]) -> int:
    """Print a line per claim that a release file should hold; 1 when one of them is missing."""
    by_release: dict[tuple[str, str], list[claims.DocumentedClaim]] = {}
    elsewhere = 0
    for claim in claims.every():
        release = _RELEASE.fullmatch(claim.source.address)
        if claim.quote and claim.verified and release is None:
            elsewhere += 1
        elif claim.quote and claim.verified and release and (release[1] in wanted or not wanted):
            by_release.setdefault((release[1], release[2]), []).append(claim)
    missing = sum(look(name, version, found) for (name, version), found in by_release.items())
    total = sum(map(len, by_release.values()))
    print(f"{total - missing} of {total} found; {elsewhere} quotes of pages and repositories")
    return 1 if missing else 0


def look(name: str, version: str, quoted: list[claims.DocumentedClaim]) -> int:
    """How many of the quotes no file of the release holds."""
    with tempfile.TemporaryDirectory() as folder:
        texts = [plain(text) for text in files(name, version, Path(folder), quoted)]
    found = [any(plain(claim.quote or "") in text for text in texts) for claim in quoted]
    for claim, there in zip(quoted, found, strict=True):
        print(f"{'found' if there else 'MISSING':8} {name} {version}: {claim.id}")
    return found.count(False)


def files(
    name: str, version: str, folder: Path, quoted: list[claims.DocumentedClaim]
) -> Iterator[str]:
    """The texts of the release that the claims cite by path, else all its documents."""
    root = installed(name, version) or fetched(name, version, folder)
    paths = {claim.source.title.split(",")[0] for claim in quoted}
    for path in sorted(root.rglob("*")):
        cited = any(path.as_posix().endswith(f"/{end}") for end in paths if end.endswith(".py"))
        if cited or path.suffix == ".md" or path.name == "METADATA":
            yield path.read_text(encoding="utf-8", errors="replace")


def installed(name: str, version: str) -> Path | None:
    """The folder of the package here, when this version is installed; a build tag is no version."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    same = distribution.version.split("+")[0] == version
    return Path(str(distribution.locate_file(name))) if same else None


def fetched(name: str, version: str, folder: Path) -> Path:
    """The unpacked release."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, f"{name}=={version}"], check=True)
    (archive,) = [path for path in folder.iterdir() if path.is_file()]
    unpack = "zipfile" if archive.suffix == ".whl" else "tarfile"
    target = folder / "unpacked"
    subprocess.run([sys.executable, "-m", unpack, "-e", archive, target], check=True)
    return target


def plain(text: str) -> str:
    """One line, without the seams of adjacent string literals and without comment signs."""
    return " ".join(_COMMENT.sub(" ", _SEAM.sub("", text)).split())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
