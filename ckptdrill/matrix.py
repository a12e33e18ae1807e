"""YAML to cells: what is to be drilled, checked completely before anything starts.

In order: the file is read with its lines (`yaml_lines`), its form is checked (`matrix_schema`),
names are resolved across sections, each entry of `matrix` is multiplied out to cells (the drill is
derived from the difference of source and target when it is not named), a baseline is put before
them for every source, and the planned path is marked. All problems found are raised as one error.

`parse` looks at the text, the drills and nothing else; `load` also looks at what the text names:
the program, the interpreters, the checkpoint to start from.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ckptdrill import drill as drill_files
from ckptdrill import resources, yaml_lines
from ckptdrill.errors import UserError
from ckptdrill.matrix_schema import (
    ConversionSection,
    DrillSection,
    EntrySection,
    ExpectSection,
    JobSection,
    MatrixFile,
    MemoryTierSection,
    PolicySection,
    ReproSection,
    TopologySection,
    check,
    describe,
    json_schema,
)
from ckptdrill.model import (
    Cell,
    Conversion,
    Cut,
    Environment,
    Expectation,
    Job,
    JsonValue,
    MemoryTier,
    Policy,
    Repro,
    Tolerance,
    Topology,
)
from ckptdrill.placeholders import PLACEHOLDERS, fill, fill_only, placeholder_values, used
from ckptdrill.spelling import did_you_mean, listed
from ckptdrill.store import safe_name
from ckptdrill.yaml_lines import Document, Location, Problem, complain, dotted

__all__ = [
    "PLACEHOLDERS",
    "Matrix",
    "check_program",
    "derive",
    "fill",
    "json_schema",
    "load",
    "parse",
    "placeholder_values",
    "text_of",
]

DEFAULT_ENVIRONMENT = "default"
CELLS_LIMIT = 5_000
BASELINE = "baseline"
# What `derive` can answer. These cells are the planned path when the matrix names none.
DERIVED_DRILLS = (
    BASELINE,
    "dp-shrink",
    "dp-grow",
    "tp-change",
    "pp-change",
    "topology-change",
    "sharding-change",
    "zero-stage-change",
    "replacement-nodes",
    "version-skew",
)
_UNSAFE = re.compile(r"[^A-Za-z0-9._+=-]+")


@dataclass(frozen=True)
class Matrix:
    """A checked matrix file. `text` is the file byte for byte; paths of `job` are absolute."""

    name: str
    path: Path
    text: bytes
    job: Job
    environments: Mapping[str, Environment]
    topologies: Mapping[str, Topology]
    tolerance: Tolerance
    policy: Policy
    repeats: int
    cells: tuple[Cell, ...]
    conversions: Mapping[str, Conversion] = field(default_factory=dict)


def load(path: Path, *, python: str | None = None, devices: int | None = None) -> Matrix:
    """The matrix at `path`, with everything on disk that it names.

    `python` replaces the interpreter of the environment `default`; `devices` is the number of
    ranks that fit the node (None: not checked). Raises UserError.
    """
    text = text_of(path)
    matrix = parse(text, path, python=python, devices=devices)
    marks = yaml_lines.read(text, path)
    check_program(matrix.job, _where(path, marks, ("job", "program")))
    _check_start(matrix.job, _where(path, marks, ("job", "start_from")))
    _check_folder(matrix.job, _where(path, marks, ("job", "cwd")))
    _check_tier(matrix.job, _where(path, marks, ("job", "memory_tier")))
    _check_repros(check(marks, path), marks, path)
    for name in sorted({c.source_environment for c in matrix.cells} | _target_names(matrix.cells)):
        # `default` need not be in the file: then it came from the command line.
        written = name in marks.data.get("environments", {})
        where = _where(path, marks, ("environments", name, "python")) if written else "--python"
        _check_interpreter(matrix.environments[name], where)
    return matrix


def text_of(path: Path) -> bytes:
    """The matrix file at `path`. Raises UserError when it cannot be read."""
    try:
        with path.open("rb") as stream:
            # One byte more than allowed is enough for the refusal.
            return stream.read(yaml_lines.SIZE_LIMIT_BYTES + 1)
    except IsADirectoryError as error:
        raise UserError("a matrix is a file, not a folder", where=str(path)) from error
    except OSError as error:
        raise UserError(
            f"cannot read the matrix: {error.strerror}", where=str(path), hint=_similar(path)
        ) from error


def parse(
    text: bytes, path: Path, *, python: str | None = None, devices: int | None = None
) -> Matrix:
    """The matrix in `text`; `path` is where relative paths start from and what errors name.

    Raises UserError with every problem found, each by file, line, column and key.
    """
    document = yaml_lines.read(text, path)
    form = check(document, path)
    folder = path.parent.absolute()
    reading = _Reading(
        form=form,
        document=document,
        folder=folder,
        topologies={name: _topology(name, each) for name, each in form.topologies.items()},
        environments=_environments(form, folder, python),
        drill_names=drill_files.names(),
        drills={},
        problems=[],
    )
    name = _matrix_name(reading, path)
    cells = _cells(reading)
    _check_topologies(reading, cells, devices)
    complain(path, reading.problems)
    return Matrix(
        name=name,
        path=path,
        text=text,
        job=_job(form.job, folder),
        environments=reading.environments,
        topologies=reading.topologies,
        tolerance=Tolerance(
            loss=form.tolerance.loss,
            safety=form.tolerance.safety,
            noise=form.tolerance.noise,
        ),
        policy=_policy(form.policy),
        repeats=form.repeats,
        cells=cells,
        conversions={name: _conversion(name, each) for name, each in form.conversions.items()},
    )


def derive(
    source: Topology, source_environment: str, target: Topology, target_environment: str
) -> str:
    """The drill that the difference between source and target amounts to."""
    if source_environment != target_environment:
        return "version-skew"
    if source.same_layout(target):
        return BASELINE
    axes = ("dp", "tp", "pp", "cp", "ep", "zero_stage")
    changed = [axis for axis in axes if getattr(source, axis) != getattr(target, axis)]
    if not changed:
        # Only the split or wrapper of one data-parallel degree is left, or where it all runs.
        alike = source.dp_shard == target.dp_shard and source.args == target.args
        return "replacement-nodes" if alike else "sharding-change"
    if changed == ["dp"]:
        return "dp-shrink" if target.dp < source.dp else "dp-grow"
    alone = {"tp": "tp-change", "pp": "pp-change", "zero_stage": "zero-stage-change"}
    return alone.get(changed[0], "topology-change") if len(changed) == 1 else "topology-change"


def check_program(job: Job, where: str | None = None) -> None:
    """Raise UserError unless the program is a readable Python file that compiles.

    `where` names the line of the matrix that asked for it. A module is left to the job's own
    interpreter: only that one can find it.
    """
    if job.program is not None:
        check_script(Path(job.program), where)


def check_script(path: Path, where: str | None = None) -> None:
    """Raise UserError unless `path` is a readable Python file that compiles."""
    if path.suffix != ".py" or not path.is_file():
        message = f"no Python file {path}" if path.suffix == ".py" else f"{path} is no .py file"
        raise UserError(message, where=where, hint=_similar(path))
    try:
        with warnings.catch_warnings():
            # Whatever the program is warned of is between it and its own interpreter.
            warnings.simplefilter("ignore")
            ast.parse(path.read_bytes(), filename=str(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", where=where) from error
    except SyntaxError as error:
        message = f"{path}:{error.lineno}: not Python: {error.msg}"
        raise UserError(message, where=where, hint="mend the program first") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{path}: not Python: {error}", where=where) from error


# --------------------------------------------------------------------------------------------------
# From form to nouns


@dataclass(frozen=True)
class _Reading:
    """One file on its way to cells; `drills` (loaded so far) and `problems` grow on the way."""

    form: MatrixFile
    document: Document
    folder: Path
    topologies: Mapping[str, Topology]
    environments: Mapping[str, Environment]
    drill_names: tuple[str, ...]
    drills: dict[str, drill_files.Drill]
    problems: list[Problem]

    def drill(self, name: str) -> drill_files.Drill:
        """The drill called `name`, loaded once; raises UserError."""
        if name not in self.drills:
            self.drills[name] = drill_files.load(name)
        return self.drills[name]

    def note(self, location: Location, message: str, *, of_key: bool = False) -> None:
        """Keep a problem; reading goes on, to find the others too."""
        mark = self.document.mark(location, of_key=of_key)
        self.problems.append(Problem(mark, dotted(location), message))


def _matrix_name(reading: _Reading, path: Path) -> str:
    name = path.stem if reading.form.name is None else reading.form.name
    try:
        return safe_name(name)
    except UserError as error:
        origin = "the file's name is used; add a name" if reading.form.name is None else "found"
        reading.note(("name",), f"{origin}: {error.what}; allowed: {error.hint}")
        return name


def _topology(name: str, form: TopologySection) -> Topology:
    degrees = form.model_dump(exclude={"dp", "world_size", "args"})
    degrees["dp_replicate"] = form.dp or form.dp_replicate or 1
    jobs = str(resources.jobs_dir())
    return Topology(
        name=name, args=tuple(fill_only(text, "jobs", jobs) for text in form.args), **degrees
    )


def _environments(form: MatrixFile, folder: Path, python: str | None) -> dict[str, Environment]:
    """`default` first. A relative path starts from the matrix; links stay links, since the
    interpreter of a virtual environment is one. `{python}` is what `default` starts from.
    """
    here = str(Path(python).absolute()) if python and "/" in python else python
    base = _interpreter(here or sys.executable, folder)
    found = {DEFAULT_ENVIRONMENT: Environment(DEFAULT_ENVIRONMENT, base)}
    for name, section in form.environments.items():
        bare = sys.executable if section.requirements else base
        written = fill_only(section.python, "python", base) if section.python else None
        own = _interpreter(written, folder) if written else bare
        replaced = name == DEFAULT_ENVIRONMENT and python is not None
        found[name] = Environment(
            name,
            base if replaced else own,
            () if replaced else tuple(_requirement(r, folder) for r in section.requirements),
            inherits=section.python is not None,
            no_deps=section.no_deps,
        )
    return found


def _requirement(text: str, folder: Path) -> str:
    """A local package by its absolute path (`./pkg` starts from the matrix), all else as it is."""
    return str(_absolute(text, folder)) if text.startswith((".", "/", "~/")) else text


def _interpreter(python: str, folder: Path) -> str:
    if "/" in python:
        return str(_absolute(python, folder))
    return shutil.which(python) or python


def _absolute(text: str, folder: Path) -> Path:
    """`text` from `folder`, `..` taken out; a leading `~/` is the home folder."""
    home = os.path.expanduser(text) if text.startswith("~/") else text  # noqa: PTH111
    return Path(os.path.normpath(folder / home))


def _job(form: JobSection, folder: Path) -> Job:
    jobs = str(resources.jobs_dir())
    program = fill(form.program, {"jobs": jobs}, "job.program") if form.program else None
    return Job(
        program=None if program is None else str(_absolute(program, folder)),
        module=form.module,
        args=tuple(fill_only(text, "jobs", jobs) for text in form.args),
        resume_args=tuple(fill_only(text, "jobs", jobs) for text in form.resume_args),
        checkpoint=fill_only(form.checkpoints[0], "jobs", jobs),
        beside=tuple(fill_only(text, "jobs", jobs) for text in form.checkpoints[1:]),
        saves=tuple(form.saves),
        restore_step=form.restore_step or form.saves[0],
        window=form.window,
        cwd=str(_absolute(form.cwd, folder)),
        env={name: fill_only(text, "jobs", jobs) for name, text in form.env.items()},
        timeout_s=form.timeout_s,
        start_from=None if form.start_from is None else str(_absolute(form.start_from, folder)),
        start_step=form.start_step or 0,
        stack=form.stack,
        memory_tier=_memory_tier(form.memory_tier, folder),
    )


def _conversion(name: str, form: ConversionSection) -> Conversion:
    jobs = str(resources.jobs_dir())
    resume_args = form.resume_args
    return Conversion(
        name=name,
        command=tuple(fill_only(text, "jobs", jobs) for text in form.command),
        resume_args=None
        if resume_args is None
        else tuple(fill_only(text, "jobs", jobs) for text in resume_args),
        timeout_s=form.timeout_s,
        space_factor=form.space_factor,
    )


def _memory_tier(form: MemoryTierSection | None, folder: Path) -> MemoryTier | None:
    if form is None:
        return None
    return MemoryTier(
        str(_absolute(form.base, folder)), tuple(sorted(set(form.saves))), form.rank_files
    )


def _policy(form: PolicySection) -> Policy:
    return Policy(
        rng_same_world_size=form.rng.same_world_size,
        rng_other_world_size=form.rng.other_world_size,
        out_of_scope=dict(form.out_of_scope),
        approved=dict(form.approved),
        parts={g: Cut(each.dim, each.names == "local") for g, each in form.parts.items()},
    )


# --------------------------------------------------------------------------------------------------
# Entries to cells


@dataclass(frozen=True)
class _Place:
    """A topology in an environment."""

    topology: Topology
    environment: str

    @property
    def label(self) -> str:
        """`two`, or `two@old`: how people and the matrix write it."""
        if self.environment == DEFAULT_ENVIRONMENT:
            return self.topology.name
        return f"{self.topology.name}@{self.environment}"


@dataclass(frozen=True)
class _Choice:
    """A drill of an entry, as asked for; `name` None: derive it. `at` is where it stands."""

    name: str | None
    parameters: tuple[dict[str, JsonValue], ...]
    at: Location


def _cells(reading: _Reading) -> tuple[Cell, ...]:
    """All cells: the controls that nobody wrote first, then the entries in file order."""
    found: dict[str, Cell] = {}
    origins: dict[str, Location] = {}
    left = CELLS_LIMIT
    for number, entry in enumerate(reading.form.matrix):
        at = ("matrix", number)
        cells = _entry_cells(reading, entry, at, left)
        left -= len(cells)
        for cell in cells:
            if cell.id in found:
                _note_twice(reading, cell, at, origins[cell.id])
            else:
                found[cell.id], origins[cell.id] = cell, at
    controls = _missing_controls(reading, found.values())
    return _planned(reading, (*controls, *found.values()))


def _entry_cells(
    reading: _Reading, entry: EntrySection, at: Location, limit: int
) -> tuple[Cell, ...]:
    """The cells of one entry, none when there are more than `limit`."""
    sources = _places(reading, entry.source, entry.sources, (*at, "source"))
    targets = _places(reading, entry.target, entry.targets, (*at, "target"))
    choices = _choices(reading, entry, at)
    at_home = entry.target is None and entry.targets is None
    rows = sum(len(choice.parameters) for choice in choices)
    if len(sources) * (1 if at_home else len(targets)) * rows > limit:
        reading.note(at, f"makes too many cells; allowed: {CELLS_LIMIT} in a matrix")
        return ()
    pairs = [(s, t) for s in sources for t in ((s,) if at_home else targets)]
    converted = _converted(reading, entry, choices, at)
    cells = [
        cell
        for (source, target), choice in itertools.product(pairs, choices)
        for cell in _choice_cells(
            reading, source, target, choice, drilled=entry.run, conversion=converted
        )
    ]
    return tuple(_expected(reading, entry.expect, cells, (*at, "expect")))


def _converted(
    reading: _Reading, entry: EntrySection, choices: Sequence[_Choice], at: Location
) -> str | None:
    """The conversion of an entry, one that cannot be noted."""
    name = entry.conversion
    if name is None:
        return None
    known = reading.form.conversions
    if name not in known:
        near = did_you_mean(name, known)
        allowed = listed(known) if known else "none: declare it in conversions"
        reading.note((*at, "conversion"), f"unknown conversion {name!r}{near}; allowed: {allowed}")
    job, own = reading.form.job, known[name].resume_args if name in known else None
    told = (*job.args, *(job.resume_args if own is None else own), *job.env.values())
    if not any("resume" in used(text) for text in told):
        message = "needs a job that is told {resume}: nothing else can point it to the result"
        reading.note((*at, "conversion"), message)
    for choice in choices:
        if choice.name is not None and choice.name not in DERIVED_DRILLS:
            message = f"goes with a change of topology or version, not with {choice.name!r}"
            reading.note((*at, "conversion"), message)
    return name


def _choice_cells(
    reading: _Reading,
    source: _Place,
    target: _Place,
    choice: _Choice,
    *,
    drilled: bool = True,
    conversion: str | None = None,
) -> Iterator[Cell]:
    # A cell that is not drilled may name a change for which there is no drill yet.
    derive_name = _derived if drilled else _undrilled
    name = choice.name or derive_name(reading, source, target, choice.at)
    if name is None or _misnamed(reading, source, target, choice):
        return
    for parameters in choice.parameters:
        try:
            cell_id = _cell_id(source, target, name, parameters, conversion)
        except UserError as error:
            message = "makes a cell id that cannot be a folder name; allowed for the id"
            reading.note(choice.at, f"{message}: {error.hint}")
            continue
        yield Cell(
            id=cell_id,
            source=source.topology,
            source_environment=source.environment,
            target=target.topology,
            target_environment=target.environment,
            drill=name,
            parameters=parameters,
            drilled=drilled,
            conversion=conversion,
        )


def _places(
    reading: _Reading, one: str | None, many: Sequence[str] | None, at: Location
) -> list[_Place]:
    """The places of `source` or `sources` (`at` ends in the singular), unknown ones noted."""
    if one is not None:
        found = [_place(reading, one, at)]
    else:
        plural = (*at[:-1], f"{at[-1]}s")
        found = [_place(reading, text, (*plural, i)) for i, text in enumerate(many or ())]
    return [place for place in found if place is not None]


def _place(reading: _Reading, text: str, at: Location) -> _Place | None:
    name, _, environment = text.partition("@")
    environment = environment or DEFAULT_ENVIRONMENT
    if name not in reading.topologies:
        near = did_you_mean(name, reading.topologies)
        reading.note(at, f"unknown topology {name!r}{near}; allowed: {listed(reading.topologies)}")
        return None
    if environment not in reading.environments:
        near = did_you_mean(environment, reading.environments)
        allowed = listed(reading.environments)
        reading.note(at, f"unknown environment {environment!r}{near}; allowed: {allowed}")
        return None
    return _Place(reading.topologies[name], environment)


def _derived(reading: _Reading, source: _Place, target: _Place, at: Location) -> str | None:
    name = _derive(source, target)
    available = reading.drill_names
    if name in available:
        return name
    change = f"{source.label}->{target.label} is the drill {name!r}"
    missing = "known, but not in this version" if name in drill_files.KNOWN else "not available"
    reading.note(at, f"{change}, which is {missing}; available: {listed(available)}")
    return None


def _undrilled(reading: _Reading, source: _Place, target: _Place, at: Location) -> str | None:
    name = _derive(source, target)
    if name == BASELINE:
        reading.note(at, "a baseline is the control of every verdict: it cannot have run: false")
        return None
    return name


def _derive(source: _Place, target: _Place) -> str:
    return derive(source.topology, source.environment, target.topology, target.environment)


def _misnamed(reading: _Reading, source: _Place, target: _Place, choice: _Choice) -> bool:
    """A drill named for one kind of change, asked for with another, would claim a falsehood."""
    # Other hosts can stand behind the same layout, and these two words cover any change.
    loose = ("topology-change", "version-skew", "replacement-nodes")
    if choice.name not in DERIVED_DRILLS or choice.name in loose:
        return False
    actual = _derive(source, target)
    if actual == choice.name:
        return False
    change = f"{source.label}->{target.label} is {actual!r}, not {choice.name!r}"
    reading.note(choice.at, f"{change}; leave the drill out, and it is derived")
    return True


def _cell_id(
    source: _Place,
    target: _Place,
    name: str,
    parameters: Mapping[str, JsonValue],
    conversion: str | None,
) -> str:
    values = [str(parameters[key]) for key in sorted(parameters)]
    values += [] if conversion is None else [f"via-{conversion}"]
    ends = f"{source.label}_to_{target.label}".replace("@", "-")
    endings = [_UNSAFE.sub("-", value).strip(".-") for value in values]
    return safe_name(".".join([ends, name, *endings]))


def _note_twice(reading: _Reading, cell: Cell, at: Location, first: Location) -> None:
    if at == first:
        message = f"the cell {cell.id} comes out of this entry twice; allowed: every cell once"
    else:
        line = reading.document.mark(first).line
        message = f"the cell {cell.id} comes from {dotted(first)} in line {line} already"
    reading.note(at, f"{message}; different expectations go into one entry's expect, with when")


def _missing_controls(reading: _Reading, cells: Iterable[Cell]) -> list[Cell]:
    """The baseline of every source that has none: no other verdict stands without it."""
    drilled = [cell for cell in cells if cell.drilled]
    present, sources = set(), dict.fromkeys(_Place(c.source, c.source_environment) for c in drilled)
    for cell in drilled:
        source = _Place(cell.source, cell.source_environment)
        at_home = source == _Place(cell.target, cell.target_environment)
        if cell.drill == BASELINE and at_home and cell.conversion is None:
            present.add(source)
    controls: list[Cell] = []
    for source in sources:
        if source not in present:
            control = _Choice(BASELINE, ({},), ("matrix",))
            if _derived(reading, source, source, control.at) is not None:
                controls += _choice_cells(reading, source, source, control)
    return controls


# --------------------------------------------------------------------------------------------------
# Drills and their parameters


def _choices(reading: _Reading, entry: EntrySection, at: Location) -> list[_Choice]:
    if entry.drill is not None:
        found = [_choice(reading, entry.drill, (*at, "drill"))]
    elif entry.drills is not None:
        places = ((*at, "drills", i) for i in range(len(entry.drills)))
        pairs = zip(entry.drills, places, strict=True)
        found = [_choice(reading, section, place) for section, place in pairs]
    else:
        found = [_Choice(None, ({},), at)]
    return [choice for choice in found if choice is not None]


def _choice(reading: _Reading, section: DrillSection, at: Location) -> _Choice | None:
    available = reading.drill_names
    if section.name not in available:
        message = f"{drill_files.absence(section.name, available)}; allowed: {listed(available)}"
        place = at if at in reading.document.texts else (*at, section.name)
        reading.note(place, message, of_key=place != at)
        return None
    try:
        allowed = reading.drill(section.name).parameters
    except UserError as error:
        reading.note(at, f"{error.what} ({error.where})")
        return None
    values = {
        key: _values(reading, allowed, key, value, (*at, section.name, key))
        for key, value in section.parameters.items()
    }
    rows = itertools.islice(itertools.product(*values.values()), CELLS_LIMIT + 1)
    return _Choice(section.name, tuple(dict(zip(values, row, strict=True)) for row in rows), at)


_ONE_TEXT = "each item of a list is a cell of its own; write all arguments of a cell in one text"


def _values(
    reading: _Reading,
    allowed: Mapping[str, drill_files.Allowed],
    key: str,
    value: Any,
    at: Location,
) -> list[JsonValue]:
    """The values of one parameter, each of which makes a cell; those not allowed are noted."""
    if key not in allowed:
        near = did_you_mean(key, allowed)
        message = f"unknown parameter{near}; allowed: {listed(allowed)}"
        reading.note(at, message, of_key=True)
        return []
    if value == []:
        reading.note(at, "found an empty list; allowed: at least one value")
    good: list[JsonValue] = []
    for number, each in enumerate(value if isinstance(value, list) else [value]):
        refusal = drill_files.refusal(allowed[key], each)
        before = value[number - 1] if isinstance(value, list) and number else None
        if drill_files.is_half(allowed[key], before, each):
            refusal = _ONE_TEXT
        if "memory_tier" in used(str(each)) and reading.form.job.memory_tier is None:
            refusal = "{memory_tier} is used, but job.memory_tier is not declared"
        if refusal is None:
            good.append(each)
        else:
            place = (*at, number) if isinstance(value, list) else at
            reading.note(place, f"found {describe(each)}; {refusal}")
    return good


# --------------------------------------------------------------------------------------------------
# Expectations and the planned path


def _expected(
    reading: _Reading, rules: Sequence[ExpectSection], cells: Sequence[Cell], at: Location
) -> Iterator[Cell]:
    """The cells with what is expected of them: the first rule that applies counts."""
    unused = set(range(len(rules)))
    for cell in cells:
        matching = [i for i, rule in enumerate(rules) if _applies(rule, cell)]
        unused.difference_update(matching[:1])
        if not matching:
            yield cell
            continue
        rule = rules[matching[0]]
        repro = _repro(rule.repro, reading.folder)
        expectation = Expectation(rule.verdict, rule.reason, rule.why, repro)
        yield dataclasses.replace(cell, expect=expectation)
    for number in sorted(unused) if cells else ():
        _note_unused(reading, rules[number], cells, (*at, number))


def _repro(form: ReproSection | None, folder: Path) -> Repro | None:
    if form is None:
        return None
    shipped = {"repros": resources.repros_dir()}
    program = fill(form.program, shipped, "expect.repro.program")
    return Repro(str(_absolute(program, folder)), form.ranks)


def _applies(rule: ExpectSection, cell: Cell) -> bool:
    facts = _facts(cell)
    return all(
        key in facts and any(_matches(facts[key], option) for option in _listed_values(wanted))
        for key, wanted in rule.when.items()
    )


def _facts(cell: Cell) -> dict[str, tuple[JsonValue, ...]]:
    """What `when` can ask of a cell, and the values that it answers to."""
    source = _Place(cell.source, cell.source_environment)
    target = _Place(cell.target, cell.target_environment)
    return {
        **{key: (value,) for key, value in cell.parameters.items()},
        "source": (source.label, source.topology.name),
        "target": (target.label, target.topology.name),
        "drill": (cell.drill,),
        "conversion": (cell.conversion or "none",),
    }


def _matches(facts: tuple[JsonValue, ...], option: JsonValue) -> bool:
    """Equal as text, so that a topology called `4` needs no quotes."""
    return any(str(fact) == str(option) for fact in facts)


def _listed_values(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _note_unused(
    reading: _Reading, rule: ExpectSection, cells: Sequence[Cell], at: Location
) -> None:
    keys = {key for cell in cells for key in _facts(cell)}
    for key in rule.when:
        if key not in keys:
            near = did_you_mean(key, keys)
            message = f"unknown condition{near}; allowed: {listed(sorted(keys))}"
            reading.note((*at, "when", key), message, of_key=True)
            return
    reading.note(at, "this rule decides no cell of the entry; mend its when, or its place")


def _planned(reading: _Reading, cells: tuple[Cell, ...]) -> tuple[Cell, ...]:
    """`cells` with those on the planned path marked."""
    globs = reading.form.planned_path
    if globs is None:
        return tuple(dataclasses.replace(c, planned=c.drill in DERIVED_DRILLS) for c in cells)
    names = {cell.id: (cell.id, _arrow(cell)) for cell in cells}
    everything = [name for pair in names.values() for name in pair]
    for number, glob in enumerate(globs):
        if not any(fnmatchcase(name, glob) for name in everything):
            near = did_you_mean(glob, everything)
            message = (
                f"{glob!r} matches no cell{near}; cells: {listed(n[1] for n in names.values())}"
            )
            reading.note(("planned_path", number), message)
    return tuple(
        dataclasses.replace(
            cell, planned=any(fnmatchcase(name, glob) for name in names[cell.id] for glob in globs)
        )
        for cell in cells
    )


def _arrow(cell: Cell) -> str:
    """`two->one@old:version-skew`."""
    source = _Place(cell.source, cell.source_environment)
    target = _Place(cell.target, cell.target_environment)
    return f"{source.label}->{target.label}:{cell.drill}"


def _check_topologies(reading: _Reading, cells: Sequence[Cell], devices: int | None) -> None:
    """Those that cells use must fit the node, and have a value for each placeholder in use."""
    in_use = {t.name: t for cell in cells for t in (cell.source, cell.target)}
    started = {t.name for cell in cells if cell.drilled for t in (cell.source, cell.target)}
    job = reading.form.job
    templates = (*job.args, *job.resume_args, *job.checkpoints, *job.env.values())
    needs_stage = any("zero_stage" in used(text) for text in templates)
    told_stage = {
        topology.name
        for cell in cells
        for topology in (cell.source, cell.target)
        if any("zero_stage" in used(str(value)) for value in cell.parameters.values())
    }
    for name, topology in in_use.items():
        at = ("topologies", name)
        if devices is not None and name in started and topology.world_size > devices:
            size = f"{topology.world_size} ranks do not fit this node"
            reading.note(at, f"{size}; allowed: at most {devices}", of_key=True)
        if (needs_stage or name in told_stage) and topology.zero_stage is None:
            reading.note(at, "has no zero_stage, but the job uses {zero_stage}", of_key=True)


# --------------------------------------------------------------------------------------------------
# What the file names on disk


def _check_start(job: Job, where: str) -> None:
    if job.start_from is not None and not Path(job.start_from).exists():
        path = Path(job.start_from)
        raise UserError(f"no checkpoint {path}", where=where, hint=_similar(path))


def _check_folder(job: Job, where: str) -> None:
    if not Path(job.cwd).is_dir():
        raise UserError(f"no folder {job.cwd}", where=where, hint=_similar(Path(job.cwd)))


def _check_tier(job: Job, where: str) -> None:
    tier = job.memory_tier
    if tier is not None and not os.access(tier.base, os.W_OK | os.X_OK):
        raise UserError(f"no folder {tier.base} that can be written", where=where)


def _check_repros(form: MatrixFile, document: Document, path: Path) -> None:
    """Each program can be read, and no link leads it out of the folder that it is named in."""
    folders = [folder.resolve() for folder in (path.parent, resources.repros_dir())]
    for number, entry in enumerate(form.matrix):
        for place, rule in enumerate(entry.expect):
            named = _repro(rule.repro, path.parent.absolute())
            if named is None:
                continue
            at = ("matrix", number, "expect", place, "repro", "program")
            where, program = _where(path, document, at), Path(named.program)
            check_script(program, where)
            if not any(program.resolve().is_relative_to(folder) for folder in folders):
                hint = "copy it into the folder of the matrix: the run keeps a copy as evidence"
                raise UserError(f"{program} is a link to another folder", where=where, hint=hint)


def _check_interpreter(environment: Environment, where: str) -> None:
    path = Path(environment.python)
    if not path.is_absolute() or not path.is_file() or not os.access(path, os.X_OK):
        message = f"environment {environment.name!r}: no interpreter {environment.python}"
        raise UserError(message, where=where, hint="give the path of the job's own python")


def _target_names(cells: Iterable[Cell]) -> set[str]:
    return {cell.target_environment for cell in cells}


def _where(path: Path, document: Document, location: Location) -> str:
    mark = document.mark(location)
    return f"{path}:{mark.line}:{mark.column}: {dotted(location)}"


def _similar(path: Path) -> str:
    """What stands beside a path that does not exist."""
    folder = path.parent
    if not folder.is_dir():
        return f"there is no folder {folder} either"
    names = sorted(entry.name for entry in itertools.islice(folder.iterdir(), 1000))
    return f"{folder} holds {listed(names)}{did_you_mean(path.name, names)}"
