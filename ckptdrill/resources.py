"""Where the files that ship with ckptdrill are, whatever folder it is started from.

Drills, matrices and reference jobs are ordinary files that people read, copy and add to, so in a
checkout they stand in the repository's root, beside the package. A wheel carries them inside the
package, under `_data/`. Each function first looks inside the package, then beside it.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def drills_dir() -> Path:
    """The folder of the drills: one `<drill name>.py` each, and `jobs/`."""
    return _shipped("drills")


def matrices_dir() -> Path:
    """The folder of the ready matrices: `quickstart.yaml` and its siblings."""
    return _shipped("matrices")


def jobs_dir() -> Path:
    """The folder of the reference jobs: one ordinary training script per stack."""
    return drills_dir() / "jobs"


def repros_dir() -> Path:
    """The folder of the programs that show a defect of a stack in a few lines each."""
    return drills_dir() / "repros"


def observer_dir() -> Path:
    """The folder of the package that runs inside every rank of a job."""
    return _PACKAGE / "observer"


def _shipped(name: str) -> Path:
    inside_wheel = _PACKAGE / "_data" / name
    return inside_wheel if inside_wheel.is_dir() else _PACKAGE.parent / name
