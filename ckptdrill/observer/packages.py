"""Which versions this process really runs with: those of the packages that it has imported.

What is installed says little: of two environments that differ in a package which the job never
imports, neither is newer to it. The folders that installers leave (`torch-2.13.0.dist-info`) are
read by name only, the first on `sys.path` counts, as it does for an import.
"""

from __future__ import annotations

import os
import re
import sys

_INSTALLED = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(-.*)?\.(dist|egg)-info")


def imported() -> dict[str, str]:
    """Package -> version, of every top-level module that was imported and has a version."""
    versions = {}
    installed = _installed()
    for name, module in sorted(sys.modules.items()):
        if "." in name or not _is_package(module):
            continue
        told = vars(module).get("__version__")  # a lazy one would run code of the package
        version = installed.get(_plain(name)) or (told if isinstance(told, str) else None)
        if version is not None:
            versions[name] = version
    return versions


def _is_package(module: object) -> bool:
    """Installed, and no part of Python itself."""
    path = getattr(module, "__file__", None) or ""
    return "site-packages" in path or "dist-packages" in path


def _installed() -> dict[str, str]:
    found: dict[str, str] = {}
    for folder in sys.path:
        try:
            names = os.listdir(folder) if folder.endswith("-packages") else []
        except OSError:
            continue
        for name in names:
            match = _INSTALLED.fullmatch(name)
            if match:
                found.setdefault(_plain(match["name"]), match["version"])
    return found


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()
