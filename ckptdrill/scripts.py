"""What a training script says about itself: its arguments, where its checkpoints go, what it uses.

Only the text is read, as a syntax tree: nothing of the script runs. Arguments are found where
argparse, click, typer and dataclasses (as HfArgumentParser reads them) declare them; names of
checkpoints where a text is put together from a step. Both are guesses for a person to check.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_STEP = re.compile(r"step|iter", re.IGNORECASE)
_CHECKPOINT = re.compile(r"step|ckpt|checkpoint|iter|model|state", re.IGNORECASE)
_PERCENT = re.compile(r"%0?\d*d")
# What a folder begins with in a text that is put together, as f"{args.out}/step-{step}".
_OUT = re.compile(r"out|dir|save|folder|root|path|base", re.IGNORECASE)
_SWITCHES = ("store_true", "store_false", "store_const", "count")
# What HfArgumentParser adds when it is given transformers' own TrainingArguments.
_TRAINER_FLAGS = (
    "output_dir",
    "resume_from_checkpoint",
    "save_strategy",
    "save_steps",
    "max_steps",
)


@dataclass(frozen=True)
class Argument:
    """One argument of a command line. `flag` is what is typed, empty for a position."""

    flag: str
    name: str
    required: bool = False
    switch: bool = False
    default: str = ""
    about: str = ""
    line: int = 0


@dataclass(frozen=True)
class Script:
    """What was found in one script; `names` are templates with {step}, the likeliest first."""

    arguments: tuple[Argument, ...]
    names: tuple[str, ...]
    words: frozenset[str]  # every name that occurs, as `fully_shard`

    def first(self, *patterns: str) -> Argument | None:
        """The first argument that any of these patterns describes, the earlier ones preferred."""
        for pattern in patterns:
            for argument in self.arguments:
                if re.fullmatch(pattern, argument.name):
                    return argument
        return None


def read(path: Path) -> Script:
    """What `path` says. It must be Python (`matrix.check_program` says so better)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(path.read_bytes(), filename=str(path))
    words = frozenset(_words(tree))
    found = [*_argparse(tree), *_click(tree), *_typer(tree), *_dataclasses(tree, words)]
    by_name = {argument.name: argument for argument in reversed(found)}
    ordered = sorted(by_name.values(), key=lambda argument: argument.line)
    return Script(tuple(ordered), tuple(_names(tree)), words)


def _words(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (part for alias in node.names for part in alias.name.split("."))
            yield from (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else ()


# --------------------------------------------------------------------------------------------------
# Arguments


def _called(node: ast.AST) -> str:
    """The last name of what is called: `add_argument`, `option`."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _texts(node: ast.Call) -> list[str]:
    return [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]


def _keyword(node: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in node.keywords if k.arg == name), None)


def _shown(node: ast.expr | None) -> str:
    """A value as text for a comment: a constant's own, else the code."""
    if node is None:
        return ""
    return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _argparse(tree: ast.AST) -> Iterator[Argument]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node) == "add_argument":
            yield from _declared(node, _texts(node))


def _declared(node: ast.Call, texts: list[str], name: str = "") -> Iterator[Argument]:
    """The argument of one declaration in the manner of argparse, which click shares."""
    flags = [text for text in texts if text.startswith("-")]
    long = next((flag for flag in flags if flag.startswith("--")), next(iter(flags), ""))
    long = long.partition("/")[0].strip()  # click writes --shout/--no-shout
    called = name or long.lstrip("-") or next(iter(texts), "")
    if not called:
        return
    action = _shown(_keyword(node, "action"))
    positional = not flags and not name
    optional = _shown(_keyword(node, "nargs")) in ("?", "*") or bool(_keyword(node, "default"))
    yield Argument(
        flag=long,
        name=called.replace("-", "_").lower(),
        required=_is_true(_keyword(node, "required")) or (positional and not optional),
        switch=action in _SWITCHES or _is_true(_keyword(node, "is_flag")),
        default=_shown(_keyword(node, "default")),
        about=_shown(_keyword(node, "help")),
        line=node.lineno,
    )


def _click(tree: ast.AST) -> Iterator[Argument]:
    for node in ast.walk(tree):
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        for each in decorators:
            if isinstance(each, ast.Call) and _called(each) in ("option", "argument"):
                yield from _declared(each, _texts(each))


def _typer(tree: ast.AST) -> Iterator[Argument]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            arguments = function.args.args
            defaults = [None] * (len(arguments) - len(function.args.defaults))
            for each, default in zip(arguments, [*defaults, *function.args.defaults], strict=True):
                yield from _typer_argument(each, default)


def _typer_argument(each: ast.arg, default: ast.expr | None) -> Iterator[Argument]:
    """`x: T = typer.Option(…)`, or `x: Annotated[T, typer.Option(…)] = …`."""
    inside = ast.walk(each.annotation) if each.annotation else iter(())
    places = [*([default] if default else []), *inside]
    for node in places:
        if not isinstance(node, ast.Call) or _called(node) not in ("Option", "Argument"):
            continue
        by_value = node is default
        given = (node.args[0] if node.args else None) if by_value else default
        missing = given is None or (isinstance(given, ast.Constant) and given.value is Ellipsis)
        flags = [text for text in _texts(node) if text.startswith("--")]
        flag = next(iter(flags), f"--{each.arg.replace('_', '-')}").partition("/")[0]
        switch = each.annotation is not None and "bool" in ast.unparse(each.annotation)
        option = _called(node) == "Option"
        yield Argument(
            flag=flag if option else "",
            name=each.arg.lower(),
            required=missing,
            switch=switch,
            default="" if missing else _shown(given),
            about=_shown(_keyword(node, "help")),
            line=each.lineno,
        )


def _dataclasses(tree: ast.AST, words: frozenset[str]) -> Iterator[Argument]:
    """The fields of dataclasses, where something turns them into arguments."""
    if not words & {"HfArgumentParser", "TrlParser", "tyro", "simple_parsing", "jsonargparse"}:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(map(_is_dataclass, node.decorator_list)):
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    yield _field(each, each.target.id)
    if words & {"TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig"}:
        yield from (Argument(f"--{name}", name, line=10**9) for name in _TRAINER_FLAGS)


def _is_dataclass(node: ast.expr) -> bool:
    name = _called(node) or getattr(node, "attr", getattr(node, "id", ""))
    return name == "dataclass"


def _field(each: ast.AnnAssign, name: str) -> Argument:
    value = each.value
    call = value if isinstance(value, ast.Call) and _called(value) == "field" else None
    given = _keyword(call, "default") if call else value
    factory = _keyword(call, "default_factory") if call else None
    return Argument(
        flag=f"--{name}",
        name=name.lower(),
        required=given is None and factory is None,
        switch=ast.unparse(each.annotation) == "bool",
        default=_shown(given),
        about=_about(call),
        line=each.lineno,
    )


def _about(call: ast.Call | None) -> str:
    """`metadata={"help": "…"}` of a field."""
    metadata = _keyword(call, "metadata") if call else None
    if isinstance(metadata, ast.Dict):
        for key, value in zip(metadata.keys, metadata.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "help":
                return _shown(value)
    return ""


# --------------------------------------------------------------------------------------------------
# Names of checkpoints


def _names(tree: ast.AST) -> list[str]:
    """Every text that is made from a step and looks like the name of a checkpoint."""
    found = [name for node in ast.walk(tree) if (name := _name(node))]
    return sorted(dict.fromkeys(found), key=_unlikely)


def _unlikely(name: str) -> tuple[bool, int]:
    """A name that ends with its step, or with a suffix after it, is that of the whole."""
    return not re.search(r"\{step[^}]*\}(\.\w+)?$", name), len(name)


def _name(node: ast.AST) -> str | None:
    if isinstance(node, ast.JoinedStr):
        return _of_f_string(node)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        text, value = node.left, node.right
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            return _filled(text.value, _PERCENT, ast.unparse(value))
    if _called(node) == "format" and isinstance(node, ast.Call):
        text = node.func.value if isinstance(node.func, ast.Attribute) else node
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            return _filled(text.value, re.compile(r"\{[^}]*\}"), ast.unparse(node))
    return None


def _filled(text: str, place: re.Pattern[str], values: str) -> str | None:
    places = place.findall(text)
    if len(places) != 1 or not _STEP.search(values):
        return None
    width = re.search(r"0\d+", places[0])
    step = f"{{step:{width[0]}d}}" if width else "{step}"
    before, after = place.split(text)
    return _checked(before, step, after)


def _of_f_string(node: ast.JoinedStr) -> str | None:
    parts = list(node.values)
    if parts and isinstance(parts[0], ast.FormattedValue) and _leads(parts):
        parts = parts[1:]
    text, steps = "", 0
    for part in parts:
        if isinstance(part, ast.Constant):
            text += str(part.value)
        elif isinstance(part, ast.FormattedValue) and _STEP.search(ast.unparse(part.value)):
            width = re.search(r"0\d+", _shown(part.format_spec)) if part.format_spec else None
            text += f"\0{width[0] if width else ''}\0"
            steps += 1
        else:
            return None
    if steps != 1:
        return None
    before, width_text, after = text.split("\0")
    return _checked(before, f"{{step:{width_text}d}}" if width_text else "{step}", after)


def _leads(parts: list[ast.expr]) -> bool:
    """Whether a text begins with a folder: f"{args.out}/…"."""
    first, second = parts[0], parts[1] if len(parts) > 1 else None
    return (
        isinstance(first, ast.FormattedValue)
        and isinstance(second, ast.Constant)
        and str(second.value).startswith("/")
        and bool(_OUT.search(ast.unparse(first.value)))
    )


def _checked(before: str, step: str, after: str) -> str | None:
    """The template, unless the text is a message or a glob and no name."""
    before = before.lstrip("/")
    text = before + after
    if not _CHECKPOINT.search(before) or re.search(r"[\s*?:{}%,='\"\\]|\.\.", text):
        return None
    return f"{before}{step}{after}".rstrip("/")
