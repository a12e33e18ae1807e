"""Each condition has a packet that fails on it alone, and everything in a packet can break it."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from typer.testing import CliRunner

from ckptdrill import cli, gate, manifest, packet, store
from ckptdrill.errors import ExitCode, UserError
from ckptdrill.gate import Standing, age_s, conditions
from ckptdrill.gate.conditions import NAMES, Inputs
from ckptdrill.installed import installed
from ckptdrill.model import Held, Item
from ckptdrill.store import RunFolder
from tests.gate.conftest import (
    ENDED_S,
    HOUR_S,
    INSTALLED,
    KEY,
    PUBLIC,
    Case,
    fell_back,
    kept_whole,
    open_ones,
    passed,
    unproven,
    with_row,
)

NOT_HELD, NOT_KNOWN = Standing.NOT_HELD, Standing.NOT_KNOWN
Change = dict[str, Any]


def edit_manifest(**changes: Any) -> Callable[[Case], object]:
    def edit(case: Case) -> None:
        path = manifest.path_of(case.checkpoint)
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def flip_checkpoint(case: Case) -> None:
    content = case.checkpoint.read_bytes()
    middle = len(content) // 2
    flipped = bytes([content[middle] ^ 1])
    case.checkpoint.write_bytes(content[:middle] + flipped + content[middle + 1 :])


def other_approval(case: Case) -> None:
    (case.root / store.APPROVAL_NAME).write_text("{}")
    store.write_seal(case.root)


def add_byte(name: str) -> Callable[[Case], object]:
    return lambda case: (case.root / name).write_bytes((case.root / name).read_bytes() + b"\n")


# What is changed, and the one condition that is then not held.
ALONE: list[tuple[str, Standing, Change]] = [
    ("packet intact", NOT_HELD, {"after": add_byte("packet.md")}),
    ("source unchanged", NOT_HELD, {"about": {"source_unchanged": False}}),
    ("source unchanged", NOT_KNOWN, {"about": {"source_unchanged": None}}),
    ("manifest verified", NOT_HELD, {"after": edit_manifest(status="in_progress")}),
    (
        "commit marker last",
        NOT_HELD,
        {"after": edit_manifest(commit_marker={"file": "DONE", "sha256": "0" * 64})},
    ),
    ("commit marker last", NOT_KNOWN, {"after": edit_manifest(format=None)}),
    ("hashes match", NOT_HELD, {"after": flip_checkpoint}),
    ("versions", NOT_HELD, {"installed": INSTALLED | {"torch": "2.14.0"}}),
    ("versions", NOT_HELD, {"installed": INSTALLED | {"deepspeed": "0.18"}}),
    ("versions", NOT_KNOWN, {"options": {"python": None}}),
    ("versions", NOT_KNOWN, {"about": {"installed": {"other": INSTALLED}}}),
    ("planned path", NOT_HELD, {"cells": [passed(), unproven(), fell_back()]}),
    ("data cursor", NOT_HELD, {"cells": [with_row(Item.DATA, Held.OUT_OF_SCOPE), fell_back()]}),
    ("random state policy", NOT_HELD, {"matrix": "policy: {approved: {}}"}),
    ("random state policy", NOT_HELD, {"matrix": "["}),
    (
        "random state policy",
        NOT_HELD,
        {"cells": [with_row(Item.RNG, Held.NOT_OBSERVED), fell_back()]},
    ),
    (
        "loss in tolerance",
        NOT_HELD,
        {"cells": [with_row(Item.LOSS, Held.OUT_OF_SCOPE), fell_back()]},
    ),
    ("durable fallback", NOT_HELD, {"cells": [passed()]}),
    ("evidence age", NOT_HELD, {"now_s": ENDED_S + 25 * HOUR_S}),
    ("evidence age", NOT_HELD, {"now_s": ENDED_S - 1}),
    ("evidence age", NOT_KNOWN, {"about": {"ended_utc": None}}),
    ("image", NOT_HELD, {"options": {"image_digest": "sha256:bb"}}),
    ("image", NOT_KNOWN, {"options": {"image_digest": None}}),
    ("image", NOT_KNOWN, {"about": {"image_digest": None}}),
    ("training code", NOT_HELD, {"after": lambda case: case.program.write_text("other")}),
    ("training code", NOT_KNOWN, {"after": lambda case: case.program.unlink()}),
    ("training code", NOT_KNOWN, {"about": {"program_sha256": None}}),
    ("approver", NOT_HELD, {"approved": False}),
    ("approver", NOT_HELD, {"after": other_approval}),
    ("approver", NOT_HELD, {"options": {"trusted": "0" * 64}}),
    ("approver", NOT_KNOWN, {"options": {"trusted": None}}),
]


def test_everything_right_is_approved(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.write()
    inputs = case.inputs(monkeypatch)
    found = conditions(inputs)
    assert open_ones(found) == {}
    assert tuple(each.name for each in found) == NAMES
    assert gate.exit_code(inputs, found) is ExitCode.AS_EXPECTED


@pytest.mark.parametrize(("name", "standing", "change"), ALONE)
def test_each_condition_fails_alone(
    case: Case, monkeypatch: pytest.MonkeyPatch, name: str, standing: Standing, change: Change
) -> None:
    for attribute, value in change.items():
        setattr(case, attribute, value)
    case.write()
    inputs = case.inputs(monkeypatch)
    found = conditions(inputs)
    assert open_ones(found) == {name: standing}
    (only,) = (each for each in found if each.name == name)
    assert only.found
    assert only.next_move
    assert gate.exit_code(inputs, found) is not ExitCode.AS_EXPECTED


def test_every_condition_has_a_packet_that_fails_on_it_alone() -> None:
    assert {name for name, _, _ in ALONE} == set(NAMES)


def test_a_difference_that_the_owner_approved_is_fine(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.installed |= {"numpy": "2.0"}
    case.write()
    assert open_ones(conditions(case.inputs(monkeypatch))) == {}


def test_without_a_manifest_nothing_is_known_of_marker_and_hashes(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.after = lambda case: manifest.path_of(case.checkpoint).unlink()
    case.write()
    assert open_ones(conditions(case.inputs(monkeypatch))) == {
        "manifest verified": NOT_HELD,
        "commit marker last": NOT_KNOWN,
        "hashes match": NOT_KNOWN,
    }


def test_without_a_checkpoint_its_conditions_are_not_known(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.options = {"checkpoint": None}
    case.write()
    standings = open_ones(conditions(case.inputs(monkeypatch)))
    assert standings == dict.fromkeys(
        ("manifest verified", "commit marker last", "hashes match"), NOT_KNOWN
    )


@pytest.mark.parametrize("content", [{}, {"cells": 1, "run": []}, {"cells": [{}], "summary": {}}])
def test_a_packet_of_another_shape_approves_nothing(content: dict[str, Any]) -> None:
    found = conditions(Inputs(problems=(), packet=content))
    assert [each.name for each in found if each.standing is Standing.HELD] == ["packet intact"]


def test_a_flipped_byte_anywhere_in_a_packet_is_found(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.write()
    for path in store.tree_files(case.root):
        content = path.read_bytes()
        for at in {0, len(content) // 3, len(content) // 2, len(content) - 1}:
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            found = open_ones(conditions(case.inputs(monkeypatch)))
            assert found.get("packet intact") is NOT_HELD, f"{path.name} at {at}"
        path.write_bytes(content)
    assert open_ones(conditions(case.inputs(monkeypatch))) == {}


# --------------------------------------------------------------------------------------------------
# Approvals


def test_an_approval_is_recorded_only_when_all_else_is_held(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.approved = False
    case.cells = [passed()]
    case.write()
    inputs = case.inputs(monkeypatch)
    found = gate.approve(case.root, inputs, ("a release manager", "2026-03-02T05:00:00Z"), KEY)
    assert open_ones(found) == {"durable fallback": NOT_HELD, "approver": NOT_HELD}
    assert not (case.root / store.APPROVAL_NAME).exists()


def test_an_approval_holds_later_for_whoever_knows_the_key(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.approved = False
    case.options = {"trusted": None}
    case.write()
    found = gate.approve(case.root, case.inputs(monkeypatch), ("a release manager", "now"), KEY)
    assert open_ones(found) == {}
    case.options = {"trusted": PUBLIC}
    later = conditions(case.inputs(monkeypatch))
    assert open_ones(later) == {}
    assert "a release manager" in later[-1].found


def test_an_approval_of_another_state_of_the_packet_does_not_count(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.write()
    (case.root / "packet.md").write_text("nicer")
    store.write_manifest(case.root)
    store.write_seal(case.root)
    found = conditions(case.inputs(monkeypatch))
    assert open_ones(found) == {"packet intact": NOT_HELD, "approver": NOT_HELD}
    assert "another state" in found[-1].found


def test_the_page_shows_what_its_packet_decides_by_itself(case: Case) -> None:
    case.cells = [passed(), unproven()]
    case.write()
    standings = {row.name: row.standing for row in gate.preview(case.root)}
    assert standings == {
        "source unchanged": "held",
        "planned path": "not held",
        "data cursor": "held",
        "random state policy": "held",
        "loss in tolerance": "held",
        "durable fallback": "not held",
    }
    assert standings.keys() < set(gate.NAMES)
    packet.write(RunFolder(case.root), gate=gate.preview)
    text = (case.root / "index.html").read_text()
    assert "b is Unproven (evidence-missing)" in text
    assert "drill corrupt-shard with a job that falls back" in text


def test_the_approved_page_names_who_and_shows_every_condition(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.approved = False
    case.write()
    page = case.root / store.APPROVED_PAGE_NAME
    assert not page.exists()
    gate.approve(case.root, case.inputs(monkeypatch), ("a release manager", "2026-03-02"), KEY)
    text = page.read_text()
    assert "Approved by <b><bdi>a release manager</bdi></b>" in text
    assert all(f'<th scope="row">{name}</th>' in text for name in gate.NAMES)
    assert packet.verify(case.root) == []
    assert "Nobody has approved" in (case.root / "index.html").read_text()


def test_another_approved_page_is_found_also_with_a_new_seal(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.write()
    page = case.root / store.APPROVED_PAGE_NAME
    page.write_text(page.read_text().replace("a release manager", "somebody else"))
    store.write_seal(case.root)
    assert open_ones(conditions(case.inputs(monkeypatch))) == {"approver": NOT_HELD}


def test_a_packet_derived_anew_keeps_the_approved_page_only_if_it_is_the_same(case: Case) -> None:
    case.write()
    run, page = RunFolder(case.root), case.root / store.APPROVED_PAGE_NAME
    packet.write(run)
    assert page.exists()
    store.write_json(run.run_json, store.read_json(run.run_json) | {"status": "ran"})
    packet.write(run)
    assert not page.exists()


@pytest.mark.parametrize("content", ["", "[]", "{", '{"payload": "e30="}', "[" * 9999])
def test_a_torn_approval_is_none(case: Case, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    case.write()
    (case.root / store.APPROVAL_NAME).write_text(content)
    store.write_seal(case.root)
    assert open_ones(conditions(case.inputs(monkeypatch))) == {"approver": NOT_HELD}


# --------------------------------------------------------------------------------------------------
# The command


def test_the_command_shows_every_condition(case: Case) -> None:
    case.write()
    done = CliRunner().invoke(cli.app, ["gate", str(case.root)])
    assert done.exit_code == ExitCode.UNSUPPORTED
    for name in NAMES:
        assert f"  {name} " in done.output
    assert "not approved: " in done.output


def test_json_has_the_same_conditions(case: Case) -> None:
    case.write()
    done = CliRunner().invoke(cli.app, ["gate", str(case.root), "--json"])
    assert [each["name"] for each in json.loads(done.output)] == list(NAMES)


def test_what_is_only_not_known_is_exit_code_3(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.options = {"checkpoint": None}
    case.write()
    inputs = case.inputs(monkeypatch)
    assert gate.exit_code(inputs, conditions(inputs)) is ExitCode.UNPROVEN


def test_a_changed_source_has_its_own_exit_code(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.about = {"source_unchanged": False}
    case.write()
    inputs = case.inputs(monkeypatch)
    assert gate.exit_code(inputs, conditions(inputs)) is ExitCode.SOURCE_CHANGED


def test_the_command_approves_and_knows_it_later(case: Case, tmp_path: Path) -> None:
    """On the real clock and interpreter, with keys in files."""
    case.approved = False
    case.about = {"installed": {"default": installed(sys.executable)}}
    case.write()
    private, public = tmp_path / "key.pem", tmp_path / "key.pub.pem"
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private.write_bytes(KEY.private_bytes(pem, pkcs8, serialization.NoEncryption()))
    spki = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(KEY.public_key().public_bytes(pem, spki))
    run = [str(case.root), "--checkpoint", str(case.checkpoint), "--python", sys.executable]
    run += ["--image-digest", "sha256:aa", "--max-age", "5000w"]

    def says(verb: str, *more: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli.app, [verb, *more])
        return done.exit_code, done.output.splitlines()[-1]

    approve = ("--approver", "a release manager", "--sign-key", str(private))
    assert says("gate", *run, *approve) == (0, "approved: all 15 conditions are held")
    assert says("gate", *run, "--public-key", str(public))[0] == 0
    assert says("gate", *run)[0] == ExitCode.UNPROVEN
    assert says("verify", str(case.root)) == (0, "the packet is as it was written")
    (case.root / store.APPROVAL_NAME).unlink()
    assert says("verify", str(case.root))[0] == ExitCode.UNSUPPORTED


def told(found: Sequence[gate.Condition], name: str) -> tuple[str, str]:
    return next((each.found, each.next_move) for each in found if each.name == name)


def test_a_flipped_byte_is_told_by_one_line_and_contradicted_by_none(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.after = flip_checkpoint
    case.write()
    found = conditions(case.inputs(monkeypatch))
    assert "checksum-differs" in told(found, "hashes match")[0]
    assert "verified" not in told(found, "manifest verified")[0]


def test_nobody_is_asked_to_approve_again_who_never_did(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.approved, case.cells = False, [passed()]
    case.write()
    refused = gate.approve(case.root, case.inputs(monkeypatch), ("a release manager", "now"), KEY)
    assert told(refused, "approver")[1].startswith("see to that first, then approve: ")
    other_approval(case)
    torn = conditions(case.inputs(monkeypatch))
    assert "approve again" not in told(torn, "approver")[1]


def test_an_approver_needs_a_key(case: Case) -> None:
    case.write()
    done = CliRunner().invoke(cli.app, ["gate", str(case.root), "--approver", "a release manager"])
    assert isinstance(done.exception, UserError)


def test_an_interpreter_that_is_none_is_a_user_error(case: Case) -> None:
    case.write()
    done = CliRunner().invoke(cli.app, ["gate", str(case.root), "--python", "/no/such/python"])
    assert isinstance(done.exception, UserError)


@pytest.mark.parametrize(("text", "expected"), [("7d", 604800), ("12h", 43200), ("30m", 1800)])
def test_an_age(text: str, expected: float) -> None:
    assert age_s(text) == expected


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "1.5h", "7y", "٣d"])
def test_what_is_no_age(text: str) -> None:
    with pytest.raises(UserError, match="no age"):
        age_s(text)


def test_versions_are_asked_of_an_interpreter(tmp_path: Path) -> None:
    found = installed(sys.executable)
    assert found is not None
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["torch"]
    assert "deepspeed-of-nobody" not in found
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no json\n")
    broken.chmod(0o755)
    assert installed(str(broken)) is installed(os.devnull) is None


@pytest.mark.parametrize(("older", "standing"), [(0, NOT_HELD), (2, None)])
def test_a_save_that_nothing_interrupted_shows_no_fallback(
    older: int, standing: Standing | None, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pass under *keeps a whole generation* may mean that the newest one was always there."""
    case.cells = [passed(), kept_whole(older)]
    case.write()
    found = open_ones(conditions(case.inputs(monkeypatch)))
    assert found.get("durable fallback") == standing
