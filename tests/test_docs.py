"""README.md is the manual, so it is held against the code, in both directions.

Whatever a person can type or read must stand there: verbs and their options, matrix keys,
placeholders, drills, items, reasons, exit codes. What stands there must exist: verbs, drills,
reasons, keys, files, make targets. Its matrices are parsed by the program, and the worked one is
run.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from ckptdrill import cli, drill, gate, matrix, matrix_schema, textfile
from ckptdrill.errors import EXIT_CODE_MEANING, ExitCode
from ckptdrill.history import PastRun, ResumePoint
from ckptdrill.isolate import GuardLevel
from ckptdrill.launch.local import PASSED_ON
from ckptdrill.launchers import Mode
from ckptdrill.manifest import Pointing, Standing
from ckptdrill.manifest.record import MEANING
from ckptdrill.model import Held, Item, Reason, VerdictWord
from ckptdrill.placeholders import OF_A_CONVERSION, PLACEHOLDERS
from ckptdrill.reasons import EXPLANATIONS
from ckptdrill.timetables import Kind

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
JUDGE = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("ckptdrill/judge/*.py"))
YAML = re.findall(r"^```yaml\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every verb by what is typed: `run`, `manifest write`."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


COMMANDS: dict[str, Any] = dict(_commands(typer.main.get_command(cli.app)))

# How the manual writes the keys of each section. A drill is written as its name, or as one name
# with parameters, so the keys of its form are never typed.
SECTIONS = {
    "": matrix_schema.MatrixFile,
    "job.": matrix_schema.JobSection,
    "job.memory_tier.": matrix_schema.MemoryTierSection,
    "environments.NAME.": matrix_schema.EnvironmentSection,
    "topologies.NAME.": matrix_schema.TopologySection,
    "conversions.NAME.": matrix_schema.ConversionSection,
    "tolerance.": matrix_schema.ToleranceSection,
    "policy.": matrix_schema.PolicySection,
    "policy.rng.": matrix_schema.RngSection,
    "policy.parts.GLOB.": matrix_schema.PartsSection,
    "matrix[].": matrix_schema.EntrySection,
    "matrix[].expect[].": matrix_schema.ExpectSection,
    "matrix[].expect[].repro.": matrix_schema.ReproSection,
}
NEVER_TYPED = {matrix_schema.Section, matrix_schema.DrillSection}


def _table(header: str) -> list[list[str]]:
    """The rows of all tables with this header, as lists of cells without backticks around them."""
    rows = []
    for block in README.split(f"{header}\n")[1:]:
        lines = block.splitlines()[1:]
        table = lines[: next((i for i, line in enumerate(lines) if line[:1] != "|"), len(lines))]
        rows += [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]
    assert rows, f"no table {header}"
    return rows


def _first_column(header: str) -> list[str]:
    return [row[0].strip("`") for row in _table(header)]


def _keys() -> Iterator[str]:
    for prefix, section in SECTIONS.items():
        yield from (f"{prefix}{name}" for name in section.model_fields)


# --------------------------------------------------------------------------------------------------
# The matrix


def test_every_section_of_the_matrix_has_its_place_in_the_manual() -> None:
    sections = {
        value
        for value in vars(matrix_schema).values()
        if isinstance(value, type) and issubclass(value, matrix_schema.Section)
    }
    assert sections - NEVER_TYPED == set(SECTIONS.values())


def test_the_keys_of_the_matrix() -> None:
    assert sorted(_first_column("| key | meaning |")) == sorted(_keys())


def test_the_placeholders() -> None:
    rows = [[f"`{{{name}}}`", meaning] for name, meaning in PLACEHOLDERS.items()]
    assert _table("| placeholder | value |") == rows


def test_the_placeholders_of_a_conversion() -> None:
    rows = [[f"`{{{name}}}`", meaning] for name, meaning in OF_A_CONVERSION.items()]
    assert _table("| placeholder of a conversion | value |") == rows


def test_the_matrices_of_the_manual_parse() -> None:
    assert len(YAML) == 2
    for number, text in enumerate(YAML):
        parsed = matrix.parse(text.encode(), ROOT / f"{number}.yaml", devices=8)
        assert parsed.cells


def test_the_first_verdicts_are_those_of_the_quickstart() -> None:
    path = ROOT / "matrices/quickstart.yaml"
    for cell in matrix.parse(path.read_bytes(), path).cells:
        word, reason = "Pass", "held"
        if cell.expect is not None and cell.expect.reason is not None:
            word, reason = cell.expect.verdict.value, cell.expect.reason.value
        assert f"\n{word:<11} {reason:<16} {cell.id}\n" in README


def test_the_items_of_the_inventory() -> None:
    rows = [row[:2] for row in _table("| short name | item | must hold |")]
    assert rows == [[f"`{item.name.lower()}`", item.value] for item in Item]
    assert [item for item in Item if f"Item.{item.name}" not in JUDGE] == []


@pytest.mark.parametrize("status", Held)
def test_the_states_of_a_row(status: Held) -> None:
    assert f"`{status.value}`" in README


# --------------------------------------------------------------------------------------------------
# Drills, reasons, exit codes


def test_the_drills() -> None:
    rows = {
        row[0].strip("`"): row
        for row in _table("| drill | Pass means that the job | parameters | when |")
    }
    assert sorted(rows) == sorted(drill.names())
    for name, row in rows.items():
        each = drill.load(name)
        assert row[1] == each.claim.value
        assert [word for word in _words(each) if f"`{word}`" not in row[2]] == []


def _words(each: drill.Drill) -> Iterator[str]:
    for name, allowed in each.parameters.items():
        yield name
        yield from () if isinstance(allowed, type) else map(str, allowed)


def test_the_drills_that_a_matrix_may_mean_but_nobody_has_written() -> None:
    sentence = re.search(
        r"Known by name, but without a drill in this version:(.*?)\.", README, re.DOTALL
    )
    missing = set(matrix.DERIVED_DRILLS) - set(drill.names())
    assert set(re.findall(r"`(.+?)`", sentence[1] if sentence else "")) == missing


def test_every_reason_is_explained() -> None:
    assert list(EXPLANATIONS) == list(Reason)
    rows = [
        [f"`{reason.value}`", about.word.value, about.meaning, about.next_move]
        for reason, about in EXPLANATIONS.items()
    ]
    assert _table("| reason | verdict | meaning | next move |") == rows


def test_a_reason_comes_with_the_verdict_that_is_explained() -> None:
    given = re.findall(r"VerdictWord\.(\w+),\s+Reason\.(\w+),", JUDGE)
    given += [("UNPROVEN", name) for name in re.findall(r"_early\(\s*\w+,\s+Reason\.(\w+)", JUDGE)]
    assert len(given) > 10
    said = {reason: about.word for reason, about in EXPLANATIONS.items()}
    assert {(VerdictWord[w], Reason[r]) for w, r in given} <= {(said[r], r) for r in said}


def test_the_reasons_that_the_judge_does_not_give() -> None:
    unused = {reason.value for reason in Reason if f"Reason.{reason.name}" not in JUDGE}
    sentence = re.search(r"Not given by this version: (.*?)\.\n", README)
    assert set(re.findall(r"`(.+?)`", sentence[1] if sentence else "")) == unused


def test_the_exit_codes() -> None:
    rows = [[str(code.value), meaning] for code, meaning in EXIT_CODE_MEANING.items()]
    assert _table("| code | meaning |") == rows


# --------------------------------------------------------------------------------------------------
# Manifests


def test_the_problems_of_a_checkpoint() -> None:
    rows = [[f"`{kind.value}`", meaning] for kind, meaning in MEANING.items()]
    assert _table("| problem | meaning |") == rows


@pytest.mark.parametrize("word", [*Standing, *Pointing])
def test_what_select_says(word: Standing | Pointing) -> None:
    assert f"`{word.value}`" in README


# --------------------------------------------------------------------------------------------------
# The command line


def test_every_verb_and_every_option() -> None:
    rows = {row[0]: row[-1] for row in _table("| command | does | options |")}
    for name, command in COMMANDS.items():
        options = [p.opts[0] for p in command.params if p.opts[0][:2] == "--"]
        arguments = [p.metavar for p in command.params if p.opts[0][:1] != "-"]
        usage = " ".join(["ckptdrill", name, *arguments])
        assert [o for o in options if f"`{o}`" not in rows.get(f"`{usage}`", "")] == []
    assert len(rows) == len(COMMANDS)


def test_the_conditions_of_the_gate() -> None:
    assert _first_column("| condition | is held when | otherwise |") == list(gate.NAMES)


def test_the_options_of_the_program_itself() -> None:
    top = typer.main.get_command(cli.app)
    for parameter in top.params:
        assert f"ckptdrill {parameter.opts[0]}" in README


def test_what_starts_a_night() -> None:
    assert [kind for kind in Kind if f"--print {kind.value}" not in README] == []


def test_every_metric_of_the_alerts_exists() -> None:
    point, run = ResumePoint("run", "cell", 8, 1.0), PastRun("run", "root")
    written = textfile.render("m", point, run, ExitCode.AS_EXPECTED, 2.0)
    alerts = README.partition("- **Alerts.**")[2].partition("`ckptdrill history")[0]
    named = set(re.findall(r"\b((?:checkpoint|ckptdrill)_\w+)", alerts))
    assert len(named) == 3
    assert [name for name in named if f"\n{name}{{" not in written] == []


def test_the_launchers() -> None:
    assert [mode for mode in Mode if f"`{mode.value}`" not in README] == []


def test_the_manual_names_no_verb_that_does_not_exist() -> None:
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    code = re.findall(r"`([^`]+)`", prose)
    code += re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    named = {verb for text in code for verb in re.findall(r"ckptdrill ([a-z]+)", text)}
    assert named == {name.split()[0] for name in COMMANDS}


def test_every_verb_has_a_manual_page() -> None:
    for command in COMMANDS.values():
        assert re.match(r"(.+\.\n\n.+\.|.+\.\n\n.+)", command.help, re.DOTALL)
        assert all(part in command.epilog for part in ("Needs:", "Prints:", "Exit codes:"))
        assert "  ckptdrill " in command.epilog.partition("Example:")[2]


@pytest.mark.parametrize("arguments", [[], *(name.split() for name in COMMANDS)])
def test_help_keeps_the_lines_of_the_exit_codes(arguments: list[str]) -> None:
    said = _ckptdrill(*arguments, "--help")
    block = said.partition("Exit codes:\n")[2].partition("\n\n")[0].splitlines()
    numbers = [str(code.value) for code in EXIT_CODE_MEANING]
    assert block
    assert all(line.split()[0] in numbers for line in block)
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize(
    ("typed", "offered"), [("ckptdrill ni", "nightly"), ("ckptdrill nightly --bu", "--budget-s")]
)
def test_a_shell_can_complete_verbs_and_options(typed: str, offered: str) -> None:
    words = typed.split()
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1), "PATH": ""}
    done = subprocess.run(
        [Path(sys.executable).with_name("ckptdrill")],
        env={"_CKPTDRILL_COMPLETE": "complete_bash", **asked},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [offered]


def test_list_prints_every_drill_and_every_reason() -> None:
    said = " ".join(_ckptdrill("list").split())
    for name in drill.names():
        assert f"{name} {drill.load(name).doc.split()[0]}" in said
    for reason, about in EXPLANATIONS.items():
        assert f"{reason.value} ({about.word.value}) {about.meaning} {about.next_move}" in said


def _ckptdrill(*arguments: str) -> str:
    """What the program prints on a terminal of 80 columns."""
    return subprocess.run(
        [sys.executable, "-m", "ckptdrill", *arguments],
        env={"COLUMNS": "80", "PATH": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


# --------------------------------------------------------------------------------------------------
# The rest of the page


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", README)
    anchors = {_anchor(title) for title in re.findall(r"^#+ (.+)$", README, re.MULTILINE)}
    assert targets
    for target in targets:
        path, _, anchor = target.partition("#")
        assert (ROOT / path).exists(), target
        assert path or anchor in anchors, target


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def test_make_targets_exist() -> None:
    targets = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = set(re.findall(r"(?:^|`)make (\w+)", README, re.MULTILINE))
    assert {"drill", "test"} <= named <= set(targets[0].split())


def test_the_environment_of_a_job() -> None:
    assert [name for name in PASSED_ON if f"`{name}`" not in README] == []


def test_the_guard_levels() -> None:
    rows = _table("| guard | what it is | where |")
    assert [row[0] for row in rows] == [f"`{level}`" for level in GuardLevel]


def test_the_picture_is_one_and_small() -> None:
    picture = (ROOT / "matrices/quickstart.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 200_000


def test_a_short_page_in_plain_words() -> None:
    boasts = ("blazing", "cutting-edge", "effortless", "powerful", "revolution", "seamless")
    assert [word for word in boasts if word in README.lower()] == []
    assert max(len(line) for line in README.splitlines() if line[:1] != "|") <= 110


@pytest.mark.e2e
def test_the_worked_matrix_comes_out_as_it_says(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests/e2e/user_script/train.py", tmp_path)
    (tmp_path / "drill.yaml").write_text(YAML[0], encoding="utf-8")
    command = [sys.executable, "-m", "ckptdrill", "run", "drill.yaml", "--launcher", "warm"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 Pass, 2 Unsupported; none against expectation" in done.stdout
