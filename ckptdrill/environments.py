"""Builds the interpreters that a matrix describes by requirements, so that versions can be skewed.

A pair of versions is rarely installed side by side, and a drill that waits for somebody to make two
environments is not run. So an environment with `requirements` becomes a virtual environment of its
own in the user's cache. In order: what it is made of is digested (interpreter, requirements, the
content of local packages); under a lock of that digest it is looked up; if it is not there it is
made, and its marker is written last. A virtual environment holds its own path and cannot be moved
afterwards, so the marker, and not a rename, is what publishes it; one without a marker is a build
that was interrupted, and is made again.

With `python` the environment lies over that interpreter: what is not among the requirements comes
from there, so that one framework can be exchanged without installing the others again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from ckptdrill.errors import UserError
from ckptdrill.model import Environment
from ckptdrill.store import sha256_of, tree_files, write_json

_MARKER = "ckptdrill.json"
_LOG = "build.log"
_LINES_SHOWN = 4
_LONGEST_BUILD_S = 3600.0
# Where an interpreter is, and where it imports packages from.
_ASK = (
    "import json, site, sys, sysconfig;"
    "print(json.dumps([sys.version, [p for p in sys.path if p.endswith(('site-packages',"
    " 'dist-packages'))]]))"
)
_OFFLINE = re.compile(
    r"connection|name resolution|timed out|no matching distribution|network is unreachable",
    re.IGNORECASE,
)


def cache_folder(variables: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_CACHE_HOME/ckptdrill/venvs`; without that variable below `~/.cache`."""
    base = variables.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "ckptdrill" / "venvs"


def built(
    environments: Mapping[str, Environment],
    used: Iterable[str],
    tell: Callable[[str], None],
    cache: Path | None = None,
) -> dict[str, Environment]:
    """`environments` with an interpreter of its own for each of `used` that has requirements.

    `tell` gets one line before and after a build. Raises UserError when one cannot be built.
    """
    ready = dict(environments)
    for name in sorted(set(used)):
        if environments[name].requirements:
            python = _ready(environments[name], cache or cache_folder(), tell)
            ready[name] = dataclasses.replace(environments[name], python=str(python))
    return ready


def _ready(environment: Environment, cache: Path, tell: Callable[[str], None]) -> Path:
    """The interpreter of a virtual environment with these requirements, made if need be."""
    version, packages = _asked(environment)
    folder = cache / _digest(environment, version)
    with _locked(folder, lambda: tell(f"environment {environment.name}: another run builds it")):
        if not (folder / _MARKER).exists():
            wanted = ", ".join(environment.requirements)
            tell(f"environment {environment.name}: installing {wanted} ({folder / _LOG})")
            began = time.monotonic()
            _build(environment, folder, packages if environment.inherits else [])
            write_json(folder / _MARKER, {**dataclasses.asdict(environment), "version": version})
            tell(f"environment {environment.name}: built in {time.monotonic() - began:.0f} s")
    return folder / "bin" / "python"


def _asked(environment: Environment) -> tuple[str, list[str]]:
    """Version of the interpreter that an environment is made with, and its package folders."""
    try:
        answer = subprocess.run(
            [environment.python, "-c", _ASK], capture_output=True, check=True, timeout=60
        )
        version, packages = json.loads(answer.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise UserError(
            f"{environment.python} does not run",
            where=f"environment {environment.name!r}",
            hint="give the path of a Python interpreter",
        ) from error
    return version, packages


def _digest(environment: Environment, version: str) -> str:
    """32 hex digits over everything that the environment is made of."""
    made_of = {
        "python": os.path.realpath(environment.python),
        "prefix": environment.python if environment.inherits else "",
        "version": version,
        "requirements": environment.requirements,
        "local": [_content(text) for text in environment.requirements if text[0] == "/"],
        "no_deps": environment.no_deps,
    }
    text = json.dumps(made_of, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _content(path: str) -> list[tuple[str, str]]:
    """Name and SHA-256 of each file of a local package."""
    root = Path(path)
    return [(str(file.relative_to(root.parent)), sha256_of(file)) for file in tree_files(root)]


@contextlib.contextmanager
def _locked(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """One build at a time: a second run says that it waits, and then finds what the first made."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_suffix(".lock").open("wb")
    except OSError as error:
        raise UserError(
            f"cannot write the cache of environments: {error.strerror}",
            where=str(folder.parent),
            hint="set XDG_CACHE_HOME to a folder that can be written",
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(environment: Environment, folder: Path, packages: list[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / _LOG
    _logged([environment.python, "-m", "venv", str(folder)], environment, log)
    python = str(folder / "bin" / "python")
    if packages:
        for site in folder.glob("lib/python*/site-packages"):
            # They follow the environment's own folder, so that its own packages come first.
            lines = [f"import site; site.addsitedir({each!r})\n" for each in packages]
            (site / "inherited.pth").write_text("".join(lines), encoding="utf-8")
    options = ["--no-deps"] if environment.no_deps else []
    command = [python, "-m", "pip", "install", "--no-input", *options, *environment.requirements]
    _logged(command, environment, log)


def _logged(command: list[str], environment: Environment, log: Path) -> None:
    """Run one command of a build; its whole output goes to the log."""
    # The packages that ckptdrill itself was started with are none of the environment's.
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        with log.open("ab") as output:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
                check=True,
                timeout=_LONGEST_BUILD_S,
            )
    except (OSError, subprocess.SubprocessError) as error:
        raise _cannot_build(environment, log) from error


def _cannot_build(environment: Environment, log: Path) -> UserError:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    offline = " (offline? PIP_INDEX_URL and PIP_FIND_LINKS are respected)"
    return UserError(
        f"environment {environment.name!r} cannot be built: " + " | ".join(lines[-_LINES_SHOWN:]),
        where=str(log),
        hint="mend its requirements" + (offline if _OFFLINE.search(text) else ""),
    )
