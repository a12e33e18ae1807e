"""attestation.json as in-toto reads it, unsigned and signed, and what verification makes of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf import json_format
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement
from securesystemslib.dsse import Envelope
from securesystemslib.signer import SSlibKey

from ckptdrill import store
from ckptdrill.packet import ProblemKind, StoredCell, verify, write
from ckptdrill.packet.attestation import PAYLOAD_TYPE
from ckptdrill.store import RunFolder, sha256_of

StoreRun = Callable[..., RunFolder]
Passing = Callable[[str], StoredCell]
KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
PUBLIC = KEY.public_key().public_bytes_raw().hex()


def read(run: RunFolder) -> Any:
    return json.loads((run.root / store.ATTESTATION_NAME).read_bytes())


def as_in_toto(value: Any) -> Statement:
    found = Statement.copy_from_pb(json_format.ParseDict(value, statement_pb2.Statement()))
    found.validate()
    return found


def test_in_toto_accepts_the_statement(store_run: StoreRun, passing: Passing) -> None:
    run = store_run([passing("a")])
    write(run)
    statement = as_in_toto(read(run)).pb
    (subject,) = statement.subject
    assert subject.name == "manifest-sha256.txt"
    assert subject.digest["sha256"] == sha256_of(run.root / "manifest-sha256.txt")
    assert statement.predicate["result"] == "PASSED"
    assert "no manifest" in statement.predicate["subjectIs"]


def test_the_subject_is_the_manifest_of_the_source_where_there_is_one(
    store_run: StoreRun, passing: Passing
) -> None:
    run = store_run([passing("a")])
    store.write_atomic(run.root / store.SOURCE_MANIFEST_NAME, "{}")
    write(run)
    (subject,) = as_in_toto(read(run)).pb.subject
    assert subject.name == "source.manifest.json"
    assert subject.digest["sha256"] == sha256_of(run.root / "source.manifest.json")
    assert verify(run.root) == []


def test_one_planned_cell_that_is_not_pass_fails_the_attestation(
    store_run: StoreRun, all_three: list[StoredCell]
) -> None:
    run = store_run(all_three)
    write(run)
    predicate = read(run)["predicate"]
    assert predicate["result"] == "FAILED"
    assert predicate["passedTests"] == ["a-pass"]
    assert predicate["failedTests"] == ["b-unproven", "c-refused", "d-diverged"]


@pytest.mark.parametrize(("cells", "unchanged"), [(0, True), (1, False), (1, None)])
def test_nothing_proven_is_not_passed(
    store_run: StoreRun,
    passing: Passing,
    run_json: dict[str, Any],
    cells: int,
    unchanged: bool | None,
) -> None:
    about = run_json | {"source_unchanged": unchanged}
    run = store_run([passing("a")][:cells], about)
    write(run)
    assert read(run)["predicate"]["result"] == "FAILED"


def test_securesystemslib_verifies_the_signed_one(store_run: StoreRun, passing: Passing) -> None:
    run = store_run([passing("a")])
    write(run, KEY)
    envelope = Envelope.from_dict(read(run))
    assert envelope.payload_type == PAYLOAD_TYPE
    assert envelope.verify([SSlibKey(PUBLIC, "ed25519", "ed25519", {"public": PUBLIC})], 1)
    as_in_toto(json.loads(envelope.payload))
    assert verify(run.root, PUBLIC) == []


def problems(run: RunFolder, trusted: str | None = None) -> list[ProblemKind]:
    return [problem.kind for problem in verify(run.root, trusted)]


def test_a_key_that_is_asked_for_must_have_signed(store_run: StoreRun, passing: Passing) -> None:
    run = store_run([passing("a")])
    write(run)
    assert problems(run, PUBLIC) == [ProblemKind.SIGNATURE]
    write(run, KEY)
    assert problems(run, "0" * 64) == [ProblemKind.SIGNATURE]


def test_a_folder_rewritten_with_new_lists_lacks_the_signature(
    store_run: StoreRun, passing: Passing
) -> None:
    run = store_run([passing("a")])
    write(run, KEY)
    (run.root / "packet.md").write_text("all fine")
    store.write_manifest(run.root)
    store.write_seal(run.root)
    assert problems(run) == [ProblemKind.DIFFERS]
    write(run)  # by somebody without the key
    assert problems(run) == []
    assert problems(run, PUBLIC) == [ProblemKind.SIGNATURE]


@pytest.mark.parametrize("name", ["attestation.json", "seal-sha256.txt", "manifest-sha256.txt"])
def test_what_is_beside_the_list_cannot_be_deleted(
    store_run: StoreRun, passing: Passing, name: str
) -> None:
    run = store_run([passing("a")])
    write(run)
    (run.root / name).unlink()
    assert problems(run)


def test_an_approval_that_nobody_sealed_is_found(store_run: StoreRun, passing: Passing) -> None:
    run = store_run([passing("a")])
    write(run)
    (run.root / "approval.json").write_text("{}")
    assert problems(run) == [ProblemKind.EXTRA]


def flips(path: Path) -> list[int]:
    """Offsets to flip: all of a short file, some of a long one."""
    size = path.stat().st_size
    return list(range(0, size, max(size // 40, 1)))


@pytest.mark.parametrize("key", [None, KEY], ids=["unsigned", "signed"])
def test_a_flipped_byte_anywhere_in_a_packet_is_found(
    store_run: StoreRun, passing: Passing, key: Ed25519PrivateKey | None
) -> None:
    run = store_run([passing("a")])
    write(run, key)
    for path in store.tree_files(run.root):
        content = path.read_bytes()
        for at in flips(path):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            assert verify(run.root), f"{path.name} at {at}"
        path.write_bytes(content)
    assert verify(run.root) == []
