"""What `ckptdrill claims` prints: a letter per stack and case, and every quote with its source."""

import json
import subprocess
import sys

import pytest

from ckptdrill import claims


def ckptdrill(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ckptdrill", "claims", *arguments],
        env={"COLUMNS": "80", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_matrix_has_a_row_for_every_stack_in_eighty_columns() -> None:
    said = ckptdrill().stdout
    rows = {line.split()[0]: line.split()[1:] for line in said.splitlines() if line.strip()}
    assert set(claims.stacks()) <= rows.keys()
    assert all(len(line) <= 80 for line in said.splitlines())
    assert "…" not in said
    assert said.count("\ndcp-fsdp2 ") == 2
    assert "torch 2.13.0" not in said


def test_one_stack_shows_its_letters_and_its_quotes() -> None:
    said = " ".join(ckptdrill("--stack", "megatron-dp-reshardable").stdout.split())
    assert "megatron-dp-reshardable D D L L" in said
    for claim in claims.of_stack("megatron-dp-reshardable"):
        assert claim.source.version in said
        assert claim.says in said
        assert claim.quote is None or f"“{claim.quote}”" in said


def test_quotes_are_printed_on_request_and_doubt_is_said() -> None:
    said = " ".join(ckptdrill("--quotes").stdout.split())
    assert "not verified at its source" in said
    assert "(no quote: nothing is stated)" in said


def test_json_holds_the_claims_of_one_stack() -> None:
    value = json.loads(ckptdrill("--stack", "s3", "--json").stdout)
    assert list(value["stacks"]) == ["s3"]
    assert {claim["id"] for claim in value["claims"]} == {c.id for c in claims.of_stack("s3")}
    assert all(claim["source"]["read"] for claim in value["claims"])


@pytest.mark.parametrize("arguments", [["--stack", "dcp_fsdp"], ["--stack", "dcp_fsdp", "--json"]])
def test_a_misspelt_stack_is_explained(arguments: list[str]) -> None:
    done = ckptdrill(*arguments)
    assert done.returncode == 2
    assert "no stack 'dcp_fsdp' (did you mean 'dcp-fsdp" in done.stderr
    assert "Traceback" not in done.stderr
