"""What a user sees of a mistake, and what a script reads from the exit code."""

import itertools

import pytest

from ckptdrill.errors import EXIT_CODE_MEANING, ExitCode, UserError, worst


def test_an_error_says_what_where_and_what_next() -> None:
    error = UserError("no such step", where="matrix.yaml:7", hint="save it")
    assert str(error).splitlines() == [
        "no such step",
        "  where: matrix.yaml:7",
        "  next:  save it",
    ]


def test_an_error_without_a_place_is_one_line() -> None:
    assert str(UserError("no such step")) == "no such step"
    assert UserError("no such step").code is ExitCode.USAGE


def test_every_exit_code_has_a_meaning() -> None:
    assert set(EXIT_CODE_MEANING) == set(ExitCode)


def test_the_worst_of_nothing_is_as_expected() -> None:
    assert worst() is ExitCode.AS_EXPECTED


@pytest.mark.parametrize(("one", "two"), [*itertools.product(ExitCode, ExitCode)])
def test_the_order_of_codes_does_not_matter(one: ExitCode, two: ExitCode) -> None:
    assert worst(one, two) is worst(two, one)
    assert worst(one, two) in {one, two}


def test_unsupported_outranks_unproven_and_a_changed_source_outranks_both() -> None:
    assert worst(ExitCode.UNPROVEN, ExitCode.UNSUPPORTED) is ExitCode.UNSUPPORTED
    changed = ExitCode.SOURCE_CHANGED
    assert worst(ExitCode.UNPROVEN, changed, ExitCode.UNSUPPORTED) is changed
    assert worst(changed, ExitCode.INTERNAL) is ExitCode.INTERNAL
