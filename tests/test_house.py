"""The rules of the house that no linter knows, as tests over the source text.

What decides is kept apart from what acts: runner modules never import torch, the modules that judge
have no effects and no clock, and imports go one way, from the nouns to the command line. A new
module has to be put into its place below.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ckptdrill"
OBSERVER = PACKAGE / "observer"
MAX_FUNCTION_LINES = 70

# Names directly under ckptdrill/, in the order in which they may import: a name may use what stands
# in an earlier line, and its neighbours in its own line. The observer imports none of them; what
# they import of it must do without torch, which the last test holds.
ORDER = (
    ("__init__",),
    ("observer",),
    ("errors", "manual", "probe", "resources", "spelling"),
    ("model",),
    ("columns",),
    ("claims", "reasons", "signing", "store"),
    ("fact_files", "placeholders", "yaml_lines"),
    ("drill", "matrix", "matrix_schema"),
    ("plan",),
    ("formats", "damage", "environments", "installed", "isolate", "manifest", "pointers", "tiers"),
    ("judge",),
    (
        "convert",
        "equivalence",
        "inflict",
        "interrupt",
        "journal",
        "launch",
        "launchers",
        "progress",
        "replay",
        "repro",
        "run",
        "saved",
        "schedule",
        "sources",
        "step",
    ),
    ("judging",),
    ("documentation", "ledger", "ledger_text", "packet"),
    ("history",),
    ("changes", "history_text", "retention", "textfile", "timetables"),
    ("doctor", "scripts"),
    ("drafting",),
    ("gate",),
    ("diffing", "inspecting", "manifest_verbs", "verbs"),
    ("nightly",),
    ("daily_cli", "manifest_cli"),
    ("cli",),
    ("__main__",),
)

RANK = {name: number for number, names in enumerate(ORDER) for name in names}

_EFFECTS = frozenset(
    {
        "asyncio",
        "ckptdrill.store",
        "multiprocessing",
        "os",
        "random",
        "secrets",
        "shutil",
        "signal",
        "socket",
        "subprocess",
        "tempfile",
        "threading",
        "time",
        "uuid",
    }
)
# Pure modules, and what they must not import: nothing that acts, nothing that reads a clock.
FORBIDDEN_IMPORTS = {
    "errors": _EFFECTS,
    "model": _EFFECTS,
    # `load` looks whether what the file names exists; `parse` looks at its text only.
    "matrix": _EFFECTS - {"ckptdrill.store", "os", "shutil"},
    "plan": _EFFECTS,
    "judge": _EFFECTS
    | {f"ckptdrill.{name}" for name in ("launch", "run", "schedule", "damage", "manifest")},
    "packet": _EFFECTS - {"ckptdrill.store"},
    "ledger": _EFFECTS,
    "changes": _EFFECTS,
    "textfile": _EFFECTS,
    "timetables": _EFFECTS,
}
CLOCK_CALLS = frozenset({"now", "utcnow", "today"})


def _python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _is_job(path: Path) -> bool:
    return path.is_relative_to(ROOT / "drills/jobs")


RUNNER_FILES = [path for path in _python_files("ckptdrill") if not path.is_relative_to(OBSERVER)]
OBSERVER_FILES = _python_files("ckptdrill/observer")
OUR_FILES = [path for path in _python_files("ckptdrill", "drills") if not _is_job(path)]
ALL_FILES = _python_files("ckptdrill", "drills", "tests")


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _absolute_module(node: ast.ImportFrom, path: Path) -> str:
    if not node.level:
        return node.module or ""
    package = path.relative_to(ROOT).parts[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def imported(path: Path) -> set[str]:
    """Every module that `path` imports, at any depth of its code, as absolute dotted names.

    `from a import b` counts as `a` and as `a.b`, since `b` may be a module.
    """
    names: set[str] = set()
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute_module(node, path)
            names.add(module)
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def _is_within(module: str, packages: frozenset[str] | set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _place(path: Path) -> str:
    """The name directly under ckptdrill/ that `path` belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _rank_of_import(module: str) -> int:
    """Where an imported module stands in ORDER: first if it is not ours."""
    top, _, below = module.partition(".")
    return RANK.get(below.partition(".")[0], 0) if top == "ckptdrill" else 0


def _long_functions(path: Path) -> Iterator[str]:
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{_relative(path)}:{node.lineno} {node.name}: {lines} lines"


def _shell_calls(path: Path) -> Iterator[str]:
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.keyword) and node.arg == "shell":
            yield f"{_relative(path)}:{node.lineno}"


def _lines_matching(pattern: str, paths: list[Path]) -> list[str]:
    found = re.compile(pattern)
    return [
        f"{_relative(path)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if found.search(line)
    ]


def test_the_walk_finds_the_package() -> None:
    assert PACKAGE / "resources.py" in RUNNER_FILES
    assert "ckptdrill.cli.main" in imported(PACKAGE / "__main__.py")


def test_runner_never_imports_torch() -> None:
    guilty = [
        _relative(path)
        for path in RUNNER_FILES
        if any(_is_within(name, {"torch", "numpy"} - allowed(path)) for name in imported(path))
    ]
    assert guilty == []


def allowed(path: Path) -> set[str]:
    """Only the modules of `ckptdrill diff` do arithmetic; they are imported when it runs."""
    names = {"elements.py", "numbers.py", "compare.py"}
    return {"numpy"} if path.parent.name == "formats" and path.name in names else set()


def test_observer_imports_only_torch_the_standard_library_and_itself() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "ckptdrill.observer"}
    foreign = [
        f"{_relative(path)}: {name}"
        for path in OBSERVER_FILES
        for name in sorted(imported(path))
        if not _is_within(name, allowed)
    ]
    assert foreign == []


def test_observer_is_written_in_the_syntax_of_python_3_9() -> None:
    for path in OBSERVER_FILES:
        ast.parse(path.read_text(encoding="utf-8"), filename=str(path), feature_version=(3, 9))


def test_observer_imports_itself_by_relative_names() -> None:
    """The pack is copied into run folders, where there is no ckptdrill to import from."""
    named = _lines_matching(r"^\s*(from|import) ckptdrill\b", OBSERVER_FILES)
    assert named == []


def test_every_module_has_its_place() -> None:
    assert {_place(path) for path in RUNNER_FILES} <= RANK.keys()


def test_imports_go_one_way() -> None:
    backwards = [
        f"{_relative(path)}: {module}"
        for path in RUNNER_FILES
        for module in sorted(imported(path))
        if _rank_of_import(module) > RANK.get(_place(path), len(ORDER))
    ]
    assert backwards == []


def test_modules_that_decide_import_nothing_that_acts() -> None:
    acting = [
        f"{_relative(path)}: {module}"
        for path in RUNNER_FILES
        for module in sorted(imported(path))
        if _is_within(module, FORBIDDEN_IMPORTS.get(_place(path), frozenset()))
    ]
    assert acting == []


def test_modules_that_decide_read_no_clock() -> None:
    reading = [
        f"{_relative(path)}:{node.lineno} .{node.func.attr}()"
        for path in RUNNER_FILES
        if _place(path) in FORBIDDEN_IMPORTS
        for node in ast.walk(_parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in CLOCK_CALLS
    ]
    assert reading == []


def test_nothing_runs_through_a_shell() -> None:
    assert [call for path in ALL_FILES for call in _shell_calls(path)] == []


def test_no_function_is_longer_than_a_screen() -> None:
    assert [function for path in OUR_FILES for function in _long_functions(path)] == []


def test_every_module_says_why_it_exists() -> None:
    silent = [_relative(path) for path in ALL_FILES if not ast.get_docstring(_parse(path))]
    assert silent == []


def test_nothing_is_left_for_later() -> None:
    # Each word is broken by brackets, so that this line does not find itself.
    assert _lines_matching(r"\b(TOD[O]|FIXM[E]|XX[X]|HAC[K])\b", ALL_FILES) == []


def test_no_path_of_one_machine() -> None:
    texts = [*ROOT.glob("matrices/*.yaml"), *ROOT.glob("*.toml"), *ROOT.glob("*.md")]
    texts += [ROOT / "Makefile", ROOT / ".ci/run"]
    assert _lines_matching(r"(?<![\w.})])/(root|work|Users)/", [*ALL_FILES, *texts]) == []


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _python_without_torch(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import sys; sys.modules['torch'] = None\n{code}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_command_line_starts_where_torch_cannot_be_imported() -> None:
    done = _python_without_torch(
        "import runpy; sys.argv = ['ckptdrill', '--help']\n"
        "runpy.run_module('ckptdrill', run_name='__main__')"
    )
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_every_runner_module_imports_where_torch_cannot_be_imported() -> None:
    names = [_module_name(path) for path in RUNNER_FILES]
    done = _python_without_torch(f"import importlib\nfor n in {names}: importlib.import_module(n)")
    assert done.returncode == 0, done.stderr
