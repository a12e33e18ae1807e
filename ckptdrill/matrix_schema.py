"""What a matrix file may say: the shape of every section, and the words for what is wrong with it.

The pydantic classes below are the file's form, key by key; `matrix` turns them into nouns. Checks
that need one section only live here; those across sections (does this topology exist?) in `matrix`.
`check` runs them on a document and returns each finding with its line, and `json_schema` describes
the same form to editors.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from ckptdrill import claims, placeholders
from ckptdrill.model import EPOCH_BOUNDARY, Item, JsonValue, Reason, RngPolicy, VerdictWord
from ckptdrill.spelling import did_you_mean, listed
from ckptdrill.yaml_lines import Document, Location, Problem, complain, dotted

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+=-]{0,40}")
_NUMBER_TEXT = re.compile(r"[-+]?[0-9.]+([eE][-+]?[0-9]{1,3})?")
_QUOTED = re.compile(r"'([^']*)'")
_KEY_OF_A_MAPPING = "[key]"  # how pydantic marks that a key, not its value, is wrong


def _wrong(message: str, key: str | None = None) -> PydanticCustomError:
    """A finding in words; `key` is the one to blame when a whole section was looked at."""
    return PydanticCustomError("matrix", "{message}", {"message": message, "key": key})


def _template(text: str) -> str:
    problem = placeholders.problem_in(text)
    if problem:
        raise _wrong(problem)
    return text


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise _wrong(f"found {text!r}; allowed: letters, digits, '_', '+', '=', '-', at most 41")
    return text


def _number(value: Any) -> Any:
    """YAML 1.1 habits quote `1e-3`, or leave it text: a number in quotes is the number."""
    if isinstance(value, str) and _NUMBER_TEXT.fullmatch(value) and value.count(".") <= 1:
        return float(value) if value.strip("+-.") else value
    return value


def _item(text: str) -> str:
    """The text of an `Item`, from that text or from its short name; or the one part of an item
    that can be declared alone.
    """
    if text == EPOCH_BOUNDARY:
        return text
    by_short_name = {item.name.lower(): item.value for item in Item}
    if text in by_short_name:
        return by_short_name[text]
    if text in by_short_name.values():
        return text
    near = did_you_mean(text, [*by_short_name, *by_short_name.values()])
    raise _wrong(f"unknown state item{near}; allowed: {listed([*by_short_name, EPOCH_BOUNDARY])}")


def _stack(text: str) -> str:
    known = _frameworks()
    if text not in known:
        near = did_you_mean(text, known)
        raise _wrong(f"unknown stack {text!r}{near}; allowed: {listed(known)}")
    return text


def _frameworks() -> tuple[str, ...]:
    """The stacks that claims.yaml knows; storage is no stack of a job."""
    return tuple(name for name, each in claims.stacks().items() if each.kind == "framework")


Degree = Annotated[int, Field(strict=True, ge=1, le=65536)]
StepNumber = Annotated[int, Field(strict=True, ge=1)]
Number = Annotated[float, BeforeValidator(_number), Field(strict=True, allow_inf_nan=False)]
Template = Annotated[str, AfterValidator(_template)]
Name = Annotated[str, AfterValidator(_name)]
ItemName = Annotated[str, AfterValidator(_item)]
StackName = Annotated[str, AfterValidator(_stack)]


class Section(BaseModel):
    """Unknown keys are errors everywhere: a misspelt key must never be a default."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class MemoryTierSection(Section):
    """`job.memory_tier`: fast checkpoints that the job keeps beside its durable ones."""

    base: str = "/dev/shm"  # noqa: S108 - a tmpfs that every Linux has; each run has its own folder
    saves: Annotated[list[StepNumber], Field(min_length=1)]
    rank_files: str = "**/*rank{rank}*"

    @field_validator("rank_files")
    @classmethod
    def _of_a_rank(cls, pattern: str) -> str:
        problem = placeholders.problem_in(pattern, ("rank",))
        inside = not pattern.startswith("/") and ".." not in pattern.split("/")
        if problem or "rank" not in placeholders.used(pattern) or not inside:
            allowed = "allowed: a glob below {memory_tier} with {rank}, as '**/rank{rank}.pt'"
            raise _wrong(f"found {pattern!r}; {allowed}")
        return pattern


class JobSection(Section):
    """`job`: how the program under drill is started, resumed, and where its checkpoints appear."""

    program: str | None = None
    module: str | None = None
    args: list[Template] = []
    resume_args: list[Template] = []
    checkpoint: Template | Annotated[list[Template], Field(min_length=1)]
    saves: Annotated[list[StepNumber], Field(min_length=1)]
    restore_step: StepNumber | None = None
    window: Annotated[int, Field(strict=True, ge=2)] = 5
    cwd: str = "."
    env: dict[str, Template] = {}
    timeout_s: Annotated[Number, Field(gt=0)] = 600.0
    start_from: str | None = None
    start_step: StepNumber | None = None
    stack: StackName | None = None
    memory_tier: MemoryTierSection | None = None

    @field_validator("program")
    @classmethod
    def _only_jobs(cls, program: str | None) -> str | None:
        problem = placeholders.problem_in(program or "", ("jobs",))
        if problem:
            raise _wrong(problem)
        return program

    @field_validator("saves")
    @classmethod
    def _ascending(cls, saves: list[int]) -> list[int]:
        if saves != sorted(set(saves)):
            ordered = sorted(set(saves))
            raise _wrong(f"found {saves}; allowed: every step once, ascending, as {ordered}")
        return saves

    @field_validator("restore_step")
    @classmethod
    def _saved(cls, restore_step: int | None, info: ValidationInfo) -> int | None:
        saves = info.data.get("saves")
        if saves and restore_step is not None and restore_step not in saves:
            raise _wrong(f"found {restore_step}; allowed: one of saves, {saves}")
        return restore_step

    @field_validator("checkpoint")
    @classmethod
    def _inside_out(cls, checkpoint: str | list[str]) -> str | list[str]:
        for path in [checkpoint] if isinstance(checkpoint, str) else checkpoint:
            if "out" not in placeholders.used(path):
                raise _wrong(f"found {path!r}, without {{out}}; allowed: '{{out}}/step-{{step}}'")
            if "resume" in placeholders.used(path):
                allowed = "allowed here: {out}, {step} and degrees"
                raise _wrong(f"{{resume}} is what a launch reads; {allowed}")
        return checkpoint

    @property
    def checkpoints(self) -> list[str]:
        """Where the job writes what makes one checkpoint; `{resume}` becomes the first."""
        return [self.checkpoint] if isinstance(self.checkpoint, str) else self.checkpoint

    @model_validator(mode="after")
    def _consistent(self) -> JobSection:
        self._check_start()
        self._check_steps()
        return self

    def _check_start(self) -> None:
        if self.program and self.module:
            raise _wrong("program and module are both given; allowed: one of them", "module")
        if not (self.program or self.module):
            raise _wrong("neither program nor module is given; allowed: one of them")
        templates = (*self.args, *self.env.values())
        if not any("out" in placeholders.used(text) for text in templates):
            raise _wrong("neither args nor env holds {out}: the job cannot know where to save")
        told = any("memory_tier" in placeholders.used(text) for text in self._all_templates())
        if told != (self.memory_tier is not None):
            missing = "is used, but not declared" if told else "is declared, and the job not told"
            raise _wrong(f"{{memory_tier}} {missing}; allowed: both or none", "memory_tier")
        if (self.start_from is None) != (self.start_step is None):
            key = "start_step" if self.start_from is None else "start_from"
            raise _wrong("start_from and start_step go together; allowed: both or none", key)

    def _all_templates(self) -> tuple[str, ...]:
        return (*self.args, *self.resume_args, *self.env.values())

    def _check_steps(self) -> None:
        if "step" not in placeholders.used(self.checkpoints[0]):
            self._check_root()
        if self.start_step is not None and self.saves[0] <= self.start_step:
            allowed = f"allowed: steps after start_step, {self.start_step}"
            raise _wrong(f"begins at {self.saves[0]}; {allowed}", "saves")

    def _check_root(self) -> None:
        """All saves go to one place: a root of generations, or a file that is written again. What
        is restored is then what the job leaves there at its end, which only the owner can name.
        """
        if len(self.saves) > 1 and self.restore_step is None:
            allowed = (
                "allowed: {step} in it, or beside it restore_step: the step found there at last"
            )
            raise _wrong(
                f"found {self.checkpoints[0]!r}, one place for the saves {self.saves}; {allowed}",
                "checkpoint",
            )


class EnvironmentSection(Section):
    """One of `environments`: an interpreter, or requirements that are installed for it."""

    python: str | None = None
    requirements: list[str] = []
    no_deps: bool = False

    @field_validator("requirements")
    @classmethod
    def _no_options(cls, requirements: list[str]) -> list[str]:
        for text in requirements:
            if text.lstrip().startswith("-") or not text.strip():
                allowed = "allowed: requirements, as 'torch==2.13.0'; pip is set by PIP_* variables"
                raise _wrong(f"found {text!r}; {allowed}")
        return requirements

    @model_validator(mode="after")
    def _something(self) -> EnvironmentSection:
        if self.python is None and not self.requirements:
            raise _wrong("says nothing; allowed: python (a path), requirements (a list), or both")
        return self


class TopologySection(Section):
    """One of `topologies`: degrees that multiply to the world size."""

    dp_replicate: Degree | None = None
    dp_shard: Degree = 1
    dp: Degree | None = None
    tp: Degree = 1
    pp: Degree = 1
    cp: Degree = 1
    ep: Degree = 1
    zero_stage: Annotated[int, Field(strict=True, ge=0, le=3)] | None = None
    nodes: Degree = 1
    world_size: Degree | None = None
    args: list[Template] = []

    @model_validator(mode="after")
    def _multiplies_out(self) -> TopologySection:
        if self.dp is not None and (self.dp_replicate is not None or self.dp_shard > 1):
            allowed = "allowed: dp alone, or dp_replicate and dp_shard"
            raise _wrong(f"ambiguous beside dp_replicate or dp_shard; {allowed}", "dp")
        data_parallel = (self.dp or self.dp_replicate or 1) * self.dp_shard
        size = data_parallel * self.tp * self.pp * self.cp
        if self.world_size not in (None, size):
            degrees = f"dp {data_parallel} × tp {self.tp} × pp {self.pp} × cp {self.cp} = {size}"
            raise _wrong(f"found {self.world_size}, but {degrees}", "world_size")
        if data_parallel % self.ep:
            allowed = f"allowed: a divisor of dp {data_parallel}, expert groups lie inside dp"
            raise _wrong(f"found {self.ep}; {allowed}", "ep")
        if size % self.nodes:
            allowed = f"allowed: a divisor of the {size} ranks"
            raise _wrong(f"found {self.nodes}; {allowed}", "nodes")
        return self


def _of_a_conversion(text: str) -> str:
    problem = placeholders.problem_in(text, CONVERSION_PLACEHOLDERS)
    if problem:
        raise _wrong(problem)
    return text


# The source is named by its own placeholder; `{out}` and `{resume}` belong to launches.
CONVERSION_PLACEHOLDERS = (
    *placeholders.OF_A_CONVERSION,
    *(name for name in placeholders.PLACEHOLDERS if name not in ("out", "resume", "memory_tier")),
)
ConversionTemplate = Annotated[str, AfterValidator(_of_a_conversion)]


class ConversionSection(Section):
    """One of `conversions`: the command that makes another checkpoint of a saved one."""

    command: Annotated[list[ConversionTemplate], Field(min_length=1)]
    resume_args: list[Template] | None = None
    timeout_s: Annotated[Number, Field(gt=0)] = 600.0
    space_factor: Annotated[Number, Field(ge=0)] = 2.0

    @field_validator("command")
    @classmethod
    def _told(cls, command: list[str]) -> list[str]:
        told = {name for text in command for name in placeholders.used(text)}
        for name in ("source_checkpoint", "converted"):
            if name not in told:
                raise _wrong(f"does not hold {{{name}}}: the command cannot know where that is")
        return command


class ToleranceSection(Section):
    """`tolerance`: how far the loss may be; without `loss` it is measured."""

    loss: Annotated[Number, Field(gt=0)] | None = None
    safety: Annotated[Number, Field(ge=1)] = 3.0
    noise: Annotated[Number, Field(gt=0)] = 1e-2


class RngSection(Section):
    """`policy.rng`: what is promised of random state; one word sets `same_world_size`."""

    same_world_size: RngPolicy = RngPolicy.CONTINUED
    other_world_size: RngPolicy | None = None


def _rng(value: Any) -> Any:
    return {"same_world_size": value} if isinstance(value, str) else value


class PartsSection(Section):
    """`policy.parts`: how what ranks hold under one name fits together."""

    dim: Annotated[int, Field(ge=0)] | None = None
    names: Literal["local"] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> PartsSection:
        if (self.dim is None) == (self.names is None):
            raise ValueError("say either `dim` or `names: local`")
        return self


class PolicySection(Section):
    """`policy`: what the owner declares."""

    rng: Annotated[RngSection, BeforeValidator(_rng)] = RngSection()
    out_of_scope: dict[ItemName, str] = {}
    approved: dict[str, str] = {}
    parts: dict[str, PartsSection] = {}


class ReproSection(Section):
    """`expect[].repro`: a short program that shows the same without the job."""

    program: str
    ranks: Degree = 1

    @field_validator("program")
    @classmethod
    def _beside_the_matrix(cls, program: str) -> str:
        problem = placeholders.problem_in(program, ("repros",))
        if problem:
            raise _wrong(problem)
        path = PurePosixPath(program)
        if path.is_absolute() or ".." in path.parts or path.suffix != ".py":
            allowed = "allowed: a .py file below the folder of the matrix, or '{repros}/NAME.py'"
            raise _wrong(f"found {program!r}; {allowed}")
        return program


class ExpectSection(Section):
    """One rule of `expect`; `when` narrows it to some of the entry's cells."""

    verdict: VerdictWord
    reason: Reason | None = None
    why: str = ""
    repro: ReproSection | None = None
    when: dict[str, Any] = {}


def _rules(value: Any) -> Any:
    return [value] if isinstance(value, Mapping) else value


class DrillSection(Section):
    """One drill of an entry; a parameter with a list of values makes one cell for each."""

    name: str
    parameters: dict[str, Any] = {}


def _drill(value: Any) -> Any:
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, parameters),) = value.items()
        return {"name": name, "parameters": {} if parameters is None else parameters}
    allowed = (
        "a drill's name, or one name with its parameters, as 'corrupt-shard: {kind: bit-flip}'"
    )
    raise _wrong(f"found {describe(value)}; allowed: {allowed}")


_DRILL_FORM = {"anyOf": [{"type": "string"}, {"type": "object", "maxProperties": 1}]}
DrillForm = Annotated[DrillSection, BeforeValidator(_drill), WithJsonSchema(_DRILL_FORM)]


class EntrySection(Section):
    """One entry of `matrix`: sources × targets × drills."""

    source: str | None = None
    sources: Annotated[list[str], Field(min_length=1)] | None = None
    target: str | None = None
    targets: Annotated[list[str], Field(min_length=1)] | None = None
    drill: DrillForm | None = None
    drills: Annotated[list[DrillForm], Field(min_length=1)] | None = None
    conversion: str | None = None
    run: Annotated[bool, Field(strict=True)] = True
    expect: Annotated[list[ExpectSection], BeforeValidator(_rules)] = []

    @model_validator(mode="after")
    def _one_of_each(self) -> EntrySection:
        for one, many in (("source", "sources"), ("target", "targets"), ("drill", "drills")):
            if getattr(self, one) is not None and getattr(self, many) is not None:
                raise _wrong(f"{one} and {many} are both given; allowed: one of them", one)
        if self.source is None and self.sources is None:
            raise _wrong("no source; allowed: source (one topology) or sources (a list)")
        return self


class MatrixFile(Section):
    """A matrix of restore drills for one training job."""

    version: Literal[1] = 1
    name: str | None = None
    job: JobSection
    environments: dict[Name, EnvironmentSection] = {}
    topologies: Annotated[dict[Name, TopologySection], Field(min_length=1)]
    conversions: dict[Name, ConversionSection] = {}
    repeats: Annotated[int, Field(strict=True, ge=0, le=20)] = 1
    tolerance: ToleranceSection = ToleranceSection()
    policy: PolicySection = PolicySection()
    matrix: Annotated[list[EntrySection], Field(min_length=1)]
    planned_path: Annotated[list[str], Field(min_length=1)] | None = None


# --------------------------------------------------------------------------------------------------
# Checking a document

# Where a number is meant as text, exactly as it was written; `*` is any one key or index.
_TEXTS = (
    ("name",),
    ("job", "args", "*"),
    ("job", "resume_args", "*"),
    ("job", "env", "*"),
    ("topologies", "*", "args", "*"),
    ("conversions", "*", "command", "*"),
    ("conversions", "*", "resume_args", "*"),
    ("policy", "approved", "*"),
    ("policy", "out_of_scope", "*"),
    ("matrix", "*", "source"),
    ("matrix", "*", "sources", "*"),
    ("matrix", "*", "target"),
    ("matrix", "*", "targets", "*"),
)


def check(document: Document, path: Path) -> MatrixFile:
    """The form of the file at `path`.

    Raises UserError with all that is wrong with it, the reader's own findings included.
    """
    data = document.data
    for pattern in _TEXTS:
        data = _as_written(document, data, pattern, ())
    try:
        form = MatrixFile.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False)
        complain(path, [*document.problems, *(_problem(document, each) for each in details)])
        raise
    complain(path, document.problems)
    return form


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the file, for editors that complete and check YAML."""
    schema = MatrixFile.model_json_schema()
    sections = schema["$defs"]
    _also(sections["PolicySection"], "rng", {"enum": [word.value for word in RngPolicy]})
    _also(sections["EntrySection"], "expect", {"$ref": "#/$defs/ExpectSection"})
    stack = sections["JobSection"]["properties"]["stack"]
    stack["anyOf"] = [{"enum": list(_frameworks())}, {"type": "null"}]
    env = sections["JobSection"]["properties"]["env"]
    env["additionalProperties"] = {"type": ["string", "number", "boolean"]}
    for section, arguments in (
        ("JobSection", "args"),
        ("JobSection", "resume_args"),
        ("TopologySection", "args"),
    ):
        items = sections[section]["properties"][arguments]
        items["items"] = {"type": ["string", "number", "boolean"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def describe(value: JsonValue) -> str:
    """What was found, in the words of a person, at most some 60 characters."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"{str(value).lower()}, a truth value"
    if isinstance(value, (int, float)):
        return f"{str(value)[:40]}, a number"
    if isinstance(value, str):
        return f"{value!r}, text" if len(value) <= 60 else f"{value[:57]!r}…, text"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return f"a mapping with {listed(list(value)[:5])}" if value else "an empty mapping"


def _also(section: dict[str, Any], key: str, form: dict[str, Any]) -> None:
    """Accept `form` beside what `key` of `section` accepts already."""
    present = section["properties"][key]
    kept = {word: present.pop(word) for word in ("default", "title") if word in present}
    section["properties"][key] = {"anyOf": [form, present], **kept}


def _as_written(
    document: Document, value: JsonValue, pattern: tuple[str, ...], at: Location
) -> JsonValue:
    """A copy of `value` in which the scalars that `pattern` leads to are text."""
    if not pattern:
        return document.text(at, value)
    if not isinstance(value, (list, dict)):
        return value
    keys = range(len(value)) if isinstance(value, list) else list(value)
    changed: Any = value.copy()
    for key in keys:
        if pattern[0] in ("*", key):
            changed[key] = _as_written(document, value[key], pattern[1:], (*at, key))
    return changed


def _problem(document: Document, detail: ErrorDetails) -> Problem:
    key = detail.get("ctx", {}).get("key")
    location = detail["loc"] if key is None else (*detail["loc"], key)
    of_key = detail["type"] == "extra_forbidden" or location[-1:] == (_KEY_OF_A_MAPPING,)
    if detail["type"] == "matrix" and key is None and isinstance(detail["input"], dict):
        of_key = True
    location = tuple(part for part in location if part != _KEY_OF_A_MAPPING)
    return Problem(document.mark(location, of_key=of_key), dotted(location), _message(detail))


def _message(detail: ErrorDetails) -> str:
    kind, found, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "matrix":
        return str(context["message"])
    if kind == "missing":
        return "required, but missing"
    if kind == "extra_forbidden":
        return _unknown_key(detail["loc"])
    if kind in ("enum", "literal_error"):
        return _unknown_word(found, str(context["expected"]))
    if kind == "too_short":
        return f"found {describe(found)}; allowed: at least {context['min_length']}"
    allowed = _allowed(kind, context)
    return f"found {describe(found)}; allowed: {allowed}{_advice(kind, found)}"


def _unknown_key(location: Location) -> str:
    section = _section_at(location[:-1])
    near = did_you_mean(str(location[-1]), section.model_fields)
    return f"unknown key{near}; allowed: {listed(section.model_fields)}"


def _unknown_word(found: JsonValue, expected: str) -> str:
    words = _QUOTED.findall(expected) or [expected]
    near = did_you_mean(str(found), words)
    return f"found {describe(found)}{near}; allowed: {listed(words)}"


_FORMS = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
}


def _allowed(kind: str, context: Mapping[str, Any]) -> str:
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"{words} {context[key]:g}"
    return _FORMS.get(kind, kind.replace("_", " "))


def _advice(kind: str, found: JsonValue) -> str:
    """The usual slip behind a wrong type."""
    if kind == "list_type" and isinstance(found, (str, int, float)):
        return f", as [{str(found)[:40]}]"
    if kind == "string_type" and isinstance(found, dict) and list(found.values()) == [None]:
        return f'; a placeholder needs quotes, as "{{{next(iter(found))}}}"'
    return ""


def _section_at(location: Location) -> type[BaseModel]:
    """The form of the mapping at `location`."""
    section: type[BaseModel] = MatrixFile
    for part in location:
        if isinstance(part, str) and part in section.model_fields:
            annotation = section.model_fields[part].annotation
            section = next(_sections_in(annotation), section)
    return section


def _sections_in(annotation: Any) -> typing.Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _sections_in(argument)
