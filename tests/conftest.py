"""What every test can rely on: a plain terminal, and property tests that fail for one reason only.

Output is compared as text, so colour and width must not depend on where the tests run, nor must the
processes that they start. Property tests have no deadline (other work on the machine would decide
them) and use fixed examples on a build server, so that a red build is red again when repeated.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session", autouse=True)
def _plain_terminal() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_COLOR", "1")
        patch.setenv("COLUMNS", "100")
        patch.setenv("_TYPER_FORCE_DISABLE_TERMINAL", "1")
        patch.delenv("FORCE_COLOR", raising=False)
        yield


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout that these tests belong to."""
    return Path(__file__).resolve().parent.parent
