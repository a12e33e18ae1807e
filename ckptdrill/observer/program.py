"""Run the user's program exactly as `python program.py args…` or `python -m module args…` would.

The module object, `sys.argv` and `sys.path[0]` are those of a plain start, so that pickles of
`__main__` classes, `if __name__ == "__main__"` and spawned workers behave as without the observer.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import importlib.machinery
import os
import re
import runpy
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

_Tensor = torch.Tensor
_MAX_SUMMED = 65_536  # elements of a list or tensor of the job's own that is summed up


def run(arguments: list[str]) -> None:
    """Run `PROGRAM args…` or `-m MODULE args…`; whatever the program raises comes out."""
    if arguments[:1] == ["-m"]:
        _run_module(arguments[1], arguments[2:])
    else:
        _run_file(arguments[0], arguments[1:])


def _run_file(path: str, arguments: list[str]) -> None:
    sys.argv = [path, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    sys.modules["__main__"] = main
    with open(path, "rb") as stream:
        code = compile(stream.read(), path, "exec")
    exec(code, main.__dict__)  # noqa: S102 - running the user's program is the purpose


def _run_module(module: str, arguments: list[str]) -> None:
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def code_files() -> dict[str, str]:
    """SHA-256 of every file of the user's own code that is imported now, by module name."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path and path.endswith(".py") and _is_users(path):
            with contextlib.suppress(OSError), open(path, "rb") as stream:
                found[name] = hashlib.sha256(stream.read()).hexdigest()
    return found


def loop_counters(frame: Any, limit: int = 48) -> dict[str, int]:
    """Whole numbers in the frames of the user's own code, from `frame` outwards.

    A training loop keeps its step and epoch in some local, in `self`, or in a small state object;
    which of them counts steps shows itself when two runs are laid side by side. Returns
    `{"train.step": 5, "Trainer.epoch": 1}`.
    """
    found: dict[str, int] = {}
    while frame is not None and len(found) < limit:
        if _is_users(frame.f_code.co_filename):
            _collect(frame, found)
        frame = frame.f_back
    return dict(list(found.items())[:limit])


def numbers(frame: Any, limit: int = 256) -> dict[str, Any]:
    """The same with the fractions, then of lists and tensors as far as two numbers tell: what the
    user's frames hold beside what is saved. `{"Trainer.clip": 0.5, "len(Trainer.norms)": 8}`.
    """
    found: dict[str, Any] = {}
    for kinds in ((int, float), (list, tuple, collections.deque, _Tensor)):
        outer = frame
        while outer is not None and len(found) < limit:
            if _is_users(outer.f_code.co_filename):
                _collect(outer, found, kinds)
            outer = outer.f_back
    return dict(list(found.items())[:limit])


def library_counters(frame: Any) -> dict[str, int]:
    """The same for a loop that is a library's, which keeps its step in `self` or in `self.state`.

    Only what is named as libraries name the steps of a whole training: their other numbers are too
    many, and a position within the epoch is no step. Returns
    `{"transformers:Trainer.state.global_step": 5}`.
    """
    found: dict[str, int] = {}
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _NO_LOOP and not _is_users(frame.f_code.co_filename):
            with _variables(frame) as variables:
                held = getattr(variables.get("self"), "__dict__", {})
                kind = type(variables.get("self")).__name__
            for label, fields in ((kind, held), (f"{kind}.state", _plain_fields(held, "state"))):
                for key, value in fields.items():
                    if type(value) is int and _STEP_OF_A_TRAINING.fullmatch(key):
                        found.setdefault(f"{package}:{label}.{key}", value)
        frame = frame.f_back
    return found


def _plain_fields(held: dict[str, Any], name: str) -> dict[str, Any]:
    fields = getattr(held.get(name), "__dict__", {})
    return fields if type(fields) is dict else {}


def generators(frame: Any, is_generator: Callable[[Any], bool]) -> dict[str, Any]:
    """Generator objects held in the user's frames, or one attribute below, by their names."""
    found: dict[str, Any] = {}
    while frame is not None and len(found) < 16:
        if _is_users(frame.f_code.co_filename):
            with _variables(frame) as variables:
                for name, value in variables.items():
                    for label, held in ((name, value), *_attributes(name, value)):
                        if is_generator(held) and all(
                            held is not other for other in found.values()
                        ):
                            found.setdefault(label, held)
        frame = frame.f_back
    return found


def held_by_the_user(frame: Any) -> Iterator[dict[str, Any]]:
    """The variables of the user's frames, from `frame` outwards, then those of the user's modules.

    Each set of variables is a copy, valid until the next is asked for.
    """
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            with _variables(frame) as variables:
                yield variables
        frame = frame.f_back
    for module in list(sys.modules.values()):
        if _is_users(str(getattr(module, "__file__", None) or "<none>")):
            yield dict(vars(module))


def _attributes(name: str, value: Any) -> list[tuple[str, Any]]:
    if type(value) is dict:
        return [(f"{name}[{key}]", item) for key, item in list(value.items())[:64]]
    if of_the_user(type(value)):
        label = type(value).__name__ if name == "self" else name
        return [(f"{label}.{key}", item) for key, item in fields(value)]
    return []


@contextlib.contextmanager
def _variables(frame: Any) -> Iterator[dict[str, Any]]:
    """A copy of the frame's variables.

    Up to Python 3.12 `f_locals` of a function is a cache on the frame that would keep the job's
    tensors alive, so it is emptied again.
    """
    variables = frame.f_locals
    try:
        yield dict(variables)
    finally:
        if frame.f_code.co_flags & _OPTIMIZED and sys.version_info < (3, 13):
            variables.clear()


_FRAMES_UP = 16
# transformers, Lightning, fairseq, Accelerate's examples; torch itself has no loop.
_STEP_OF_A_TRAINING = re.compile(
    r"_?(global_?steps?|completed_?steps?|num_updates|batches_that_stepped|iteration)"
)
_NO_LOOP = frozenset({"torch", "ckptdrill_observer", "ckptdrill", "runpy", "importlib"})
_OPTIMIZED = 0x1  # the code flag of functions: their f_locals is a copy, never the real namespace
_LIBRARIES = tuple(
    os.path.realpath(path) + os.sep
    for path in (os.path.dirname(os.__file__), os.path.dirname(__file__))
)


@functools.cache
def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = os.path.realpath(filename)
    return not path.startswith(_LIBRARIES) and f"{os.sep}site-packages{os.sep}" not in path


def _told(name: str, value: Any) -> list[tuple[str, Any]]:
    """A number as it is, a list by its length and sum, a tensor that nothing trains by its sum."""
    if type(value) in (int, float):
        return [(name, value)]
    if type(value) is _Tensor:
        total = _sum(value)
        return [] if total is None else [(f"sum({name})", total)]
    if len(value) > _MAX_SUMMED or not all(type(item) in (int, float) for item in value):
        return []
    return [(f"len({name})", len(value)), (f"sum({name})", sum(value))]


def _sum(tensor: torch.Tensor) -> float | None:
    """None of what is trained, empty or large, or has no sum (batched by vmap, quantized)."""
    plain = not tensor.requires_grad and tensor.device.type in ("cpu", "cuda")
    if not plain or tensor.is_complex() or not 0 < tensor.numel() <= _MAX_SUMMED:
        return None
    try:
        with torch.no_grad():
            return float(tensor.double().sum())
    except (RuntimeError, NotImplementedError):
        return None


def _collect(frame: Any, found: dict[str, Any], kinds: tuple[type, ...] = (int,)) -> None:
    where = "" if frame.f_code.co_name == "<module>" else frame.f_code.co_name + "."
    with _variables(frame) as variables:
        for name, value in variables.items():
            for key, held in _numbers(name, value, kinds):
                for label, number in _told(key if name == "self" else where + key, held):
                    if abs(number) < 2**53:  # which infinity and NaN are not
                        found.setdefault(label, number)


def _numbers(
    name: str, value: Any, kinds: tuple[type, ...], depth: int = 0
) -> list[tuple[str, Any]]:
    """What is of these kinds behind one name: itself, in a small dict, in a user's own object."""
    if name.startswith("__") or name.isupper():
        return []
    if type(value) in kinds:
        return [(name, value)]
    if depth < 3 and type(value) is dict and len(value) <= 64:
        pairs = [(f"{name}[{key}]", item) for key, item in value.items() if isinstance(key, str)]
        return [pair for key, item in pairs for pair in _numbers(key, item, kinds, depth + 2)]
    if depth < 3 and of_the_user(type(value)):
        label = type(value).__name__ if name == "self" else name
        return [
            pair
            for key, item in fields(value)
            for pair in _numbers(f"{label}.{key}", item, kinds, depth + 1)
        ]
    return []


def of_the_user(kind: type) -> bool:
    """True for classes of the script itself and of the modules beside it."""
    if kind.__module__ == "__main__":
        return True
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return bool(path) and _is_users(str(path))


def fields(value: Any) -> list[tuple[str, Any]]:
    """The first attributes of an object by name, without running any code of its class."""
    slots = [key for key in getattr(type(value), "__slots__", ()) if hasattr(value, key)]
    return [*getattr(value, "__dict__", {}).items(), *((k, getattr(value, k)) for k in slots)][:64]


def called_from(module: str) -> bool:
    """Whether the call that is being observed comes from this module, a few frames up."""
    if module not in sys.modules:
        return False
    frame: Any = sys._getframe(1)
    for _ in range(_FRAMES_UP):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False
