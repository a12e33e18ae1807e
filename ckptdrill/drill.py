"""A drill is a file: this loads it by name, and says what is wrong with one that is none.

`drills/dp_shrink.py` is the drill `dp-shrink`; there is no registration. A name is looked up in the
list of files first, so that no text from a matrix ever becomes a path.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType

from ckptdrill import resources
from ckptdrill.errors import UserError
from ckptdrill.model import Claim, JsonValue, Plan
from ckptdrill.placeholders import PLACEHOLDERS, problem_in
from ckptdrill.spelling import did_you_mean, listed

# Every drill that a matrix may mean; a file is what makes one of them available.
KNOWN = (
    *("baseline", "dp-shrink", "dp-grow", "tp-change", "pp-change", "topology-change"),
    *("sharding-change", "zero-stage-change", "replacement-nodes", "version-skew"),
    *("interrupted-save", "corrupt-shard", "lying-pointer", "memory-tier-loss", "storage-stall"),
    *("mid-accumulation", "chained-resume", "older-step", "semantic-change", "resume-options"),
)


class Template(str):
    """The type of a parameter that is filled in for each launch, as `job.checkpoint` is."""

    __slots__ = ()


class Arguments(Template):
    """The type of a parameter that is split into arguments of the job as a shell would do it."""

    __slots__ = ()


# What a parameter may be: one of a few values, or anything of a type.
Allowed = tuple[JsonValue, ...] | type
# The matrix fills in `{jobs}` when it is read, and only in its own keys.
_FILLED_IN = tuple(name for name in PLACEHOLDERS if name != "jobs")


@dataclass(frozen=True)
class Drill:
    """What Pass means, what can be set, and the pure function from a cell to its plan."""

    name: str
    claim: Claim
    doc: str
    parameters: Mapping[str, Allowed]
    plan: Callable[..., Plan]


def names() -> tuple[str, ...]:
    """The names of all available drills, sorted."""
    files = resources.drills_dir().glob("*.py")
    return tuple(sorted(file.stem.replace("_", "-") for file in files if file.stem[0] != "_"))


def load(name: str) -> Drill:
    """The drill called `name`.

    Raises UserError when there is none, or when its file lacks one of its four parts.
    """
    available = names()
    if name not in available:
        raise UserError(absence(name, available), hint=f"available: {listed(available)}")
    path = resources.drills_dir() / f"{name.replace('-', '_')}.py"
    module = _import(name, path)
    problem = _problem(module)
    if problem:
        raise UserError(f"the drill {name!r} {problem}", where=str(path), hint=_FORM_HINT)
    return Drill(
        name=name,
        claim=module.CLAIM,
        doc=(module.__doc__ or "").strip(),
        parameters=MappingProxyType(dict(module.PARAMETERS)),
        plan=module.plan,
    )


def absence(name: str, available: Iterable[str]) -> str:
    """What to say of a drill that is not `available`: known, misspelt, or neither."""
    if name in KNOWN:
        return f"the drill {name!r} is known, but not in this version"
    return f"no drill {name!r}{did_you_mean(name, available)}"


def refusal(parameter: Allowed, value: JsonValue) -> str | None:
    """What is allowed for a drill's parameter, in words, when `value` is not; None when it is.

    The nearest spelling is added where one is near.
    """
    if isinstance(parameter, type):
        if not _is_a(value, parameter):
            return f"allowed: {_TYPE_WORDS[parameter]}"
        return _problem_of_text(parameter, str(value)) if issubclass(parameter, Template) else None
    if any(_equal(value, option) for option in parameter):
        return None
    near = did_you_mean(str(value), [str(option) for option in parameter])
    return f"allowed: {listed(parameter)}{near}"


def is_half(parameter: Allowed, before: JsonValue, value: JsonValue) -> bool:
    """Whether a text of arguments is the value of the option alone that stands before it: a list
    that was meant as one text.
    """
    of_arguments = isinstance(parameter, type) and issubclass(parameter, Arguments)
    option = re.fullmatch(r"--?[\w-]+", str(before))
    return of_arguments and option is not None and not str(value).startswith("-")


def words_of(parameter: Allowed) -> str:
    """What is allowed for a parameter: `bit-flip, truncate`, `text`, `an integer`."""
    if isinstance(parameter, type):
        return _TYPE_WORDS[parameter]
    return ", ".join(map(str, parameter))


def _problem_of_text(parameter: type[Template], text: str) -> str | None:
    """What a launch would stumble on: an unknown placeholder, a brace, a quote that never ends."""
    problem = problem_in(text, _FILLED_IN)
    if problem is None and issubclass(parameter, Arguments):
        try:
            shlex.split(text)
        except ValueError as error:
            return f"{error}; allowed: arguments as a shell splits them, each quote in a pair"
    return problem


_FORM_HINT = "a drill file has a docstring, CLAIM, PARAMETERS and plan(cell, shared)"
_TYPE_WORDS = {
    str: "text",
    Template: "text with placeholders",
    Arguments: "arguments, in one text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
}


def _equal(value: JsonValue, option: JsonValue) -> bool:
    """Equal, and `true` is not 1."""
    return isinstance(value, bool) == isinstance(option, bool) and bool(value == option)


def _is_a(value: JsonValue, kind: type) -> bool:
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if issubclass(kind, str):
        return isinstance(value, str)
    return isinstance(value, (int, float) if kind is float else kind)


def _import(name: str, path: Path) -> ModuleType:
    module_name = f"ckptdrill_drill_{name.replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"the drill {name!r} cannot be loaded", where=str(path))
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their own module up there, also while it is being executed.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        message = f"the drill {name!r} cannot be loaded: {type(error).__name__}: {error}"
        raise UserError(message, where=str(path), hint=_FORM_HINT) from error
    return module


def _problem(module: ModuleType) -> str | None:
    """What keeps `module` from being a drill, or None."""
    if not (module.__doc__ or "").strip():
        return "has no docstring"
    if not isinstance(getattr(module, "CLAIM", None), Claim):
        return "has no CLAIM of the type Claim"
    parameters = getattr(module, "PARAMETERS", None)
    if not isinstance(parameters, Mapping):
        return "has no mapping PARAMETERS"
    for key, allowed in parameters.items():
        if not isinstance(allowed, tuple) and allowed not in _TYPE_WORDS:
            return f"has a PARAMETERS entry {key!r} that is neither a tuple of values nor a type"
    return None if callable(getattr(module, "plan", None)) else "has no function plan"
