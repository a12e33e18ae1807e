"""Run every matrix that a CPU can carry, and write what came out into the README.

    .venv/bin/python tests/matrices/run.py                      all of them
    .venv/bin/python tests/matrices/run.py torch_layouts        these, the rows of others stay
    .venv/bin/python tests/matrices/run.py --write-only         the table again, from the last runs

In order: each matrix is run as a user would, unless it needs a package that its interpreter lacks;
then the packets of the last runs are read and written as tables between two marks, with the
versions and the day of each. The exit code is 1 when a cell came out against its expectation.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
BEGIN, END = "<!-- results: begin, written by `make matrix` -->", "<!-- results: end -->"
HEADER = "| source | target | drill | verdict | reason |"
LEFT_OUT = {"node"}  # not for a CPU
_AS_EXPECTED, _UNEXPECTED, _UNPROVEN = 0, 1, 3
_RANK_0 = "rank0.jsonl"


def main(arguments: Sequence[str]) -> int:
    """Run, write, and say what is against expectation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="files of matrices/ without their ending")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs")
    parser.add_argument("--launcher", default="auto")
    parser.add_argument("--write-only", action="store_true")
    args = parser.parse_args(arguments)
    known = {path.stem: path for path in sorted((ROOT / "matrices").glob("*.yaml"))}
    unknown = sorted(set(args.names) - known.keys())
    if unknown:
        parser.error(f"no matrix {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = args.names or [name for name in known if name not in LEFT_OUT]
    codes = {} if args.write_only else {n: run(known[n], args.runs, args.launcher) for n in chosen}
    shown = [path for name, path in known.items() if name not in LEFT_OUT]
    README.write_text(written(README.read_text("utf-8"), shown, args.runs), "utf-8")
    for name, code in codes.items():
        print(f"{name}: exit code {code}")
    return int(any(code != _AS_EXPECTED for code in codes.values()))


def run(path: Path, runs: Path, launcher: str) -> int:
    """Run one matrix; its exit code, or that of an expected one where it cannot run here."""
    missing = lacking(path)
    if missing:
        print(f"{path.stem}: not run, {missing} is not installed")
        return _AS_EXPECTED
    command = [sys.executable, "-m", "ckptdrill", "run", str(path), "--runs", str(runs)]
    return subprocess.run([*command, "--launcher", launcher], cwd=ROOT, check=False).returncode


def lacking(path: Path) -> str | None:
    """A package that the matrix is about and this interpreter has not."""
    needs = "deepspeed" if path.stem.startswith("deepspeed") else "torch"
    return None if importlib.util.find_spec(needs) else needs


# --------------------------------------------------------------------------------------------------
# The table


def written(page: str, matrices: Sequence[Path], runs: Path) -> str:
    """`page` with the tables of the last runs between the marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    sections = [section for path in matrices if (section := section_of(path, runs))]
    return f"{before}{BEGIN}\n\n{''.join(sections)}{END}{after}"


def section_of(path: Path, runs: Path) -> str:
    """The heading and the table of the last run of one matrix; empty where there is none."""
    name = str(yaml.safe_load(path.read_text("utf-8")).get("name", path.stem))
    folder = runs / name / "latest"
    if not (folder / "packet.json").exists():
        return ""
    packet = json.loads((folder / "packet.json").read_text("utf-8"))
    rows = "".join(f"{row}\n" for row in rows_of(packet))
    return f"`{path.stem}.yaml`: {about(folder)}\n\n{HEADER}\n|---|---|---|---|---|\n{rows}\n"


def rows_of(packet: Mapping[str, Any]) -> Iterator[str]:
    """One row per cell, in the order of the packet."""
    for cell in sorted(packet["cells"], key=lambda cell: str(cell["id"])):
        address = cell["address"]
        places = [_place(address[end]) for end in ("source", "target")]
        drill = " ".join([address["drill"], *map(str, address["parameters"].values())])
        drill += " via " + cell["id"].partition(".via-")[2] if ".via-" in cell["id"] else ""
        found = [cell["verdict"], cell["reason"] + ("" if cell["expected"] else " (unexpected)")]
        yield f"| {' | '.join([*places, drill, *found])} |".replace("|  |", "| – |")


def _place(end: Mapping[str, Any]) -> str:
    name = str(end["topology"]["name"])
    return name if end["environment"] == "default" else f"{name}@{end['environment']}"


def about(folder: Path) -> str:
    """Versions, day and duration of a run."""
    told = json.loads((folder / "run.json").read_text("utf-8"))
    versions: dict[str, set[str]] = {}
    for each in told["environments"].values():
        for name in ("python", "torch"):
            if each.get(name):
                versions.setdefault(name, set()).add(str(each[name]))
    for facts in sorted(folder.glob(f"launches/source*/{_RANK_0}")):
        for name, version in _imported(facts).items():
            versions.setdefault(name, set()).add(version)
    texts = [f"{name} {' and '.join(sorted(found))}" for name, found in versions.items()]
    return f"{', '.join(texts)}; {told['ended_utc'][:10]}, {told['took_s']:.0f} s"


def _imported(facts: Path) -> dict[str, str]:
    """The version of deepspeed that a rank imported, if it did."""
    for line in facts.read_text("utf-8", "replace").splitlines():
        if line.startswith('{"fact":"imported"') and line.endswith("}"):
            packages = json.loads(line)["packages"]
            return {name: packages[name] for name in ("deepspeed",) if name in packages}
    return {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
