"""`attestation.json`: an in-toto statement over the packet, in a DSSE envelope when a key is given.

Pure. The subject is the manifest of the source checkpoint where the run started from one that has
a manifest; else it is the packet's own list of checksums, and the name says so. The predicate is
in-toto's test result: which cells passed, which did not, and the digests of what they rest on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ckptdrill import signing
from ckptdrill.model import JsonValue, VerdictWord
from ckptdrill.packet.view import PacketView
from ckptdrill.store import MANIFEST_NAME, SOURCE_MANIFEST_NAME

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://in-toto.io/attestation/test-result/v0.1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"


def render(
    view: PacketView, digests: Mapping[str, str], key: Ed25519PrivateKey | None = None
) -> str:
    """The text of attestation.json. `digests` maps names of files of the packet to their sha256;
    the list of checksums must be among them.
    """
    text = json.dumps(statement(view, digests), indent=1, sort_keys=True) + "\n"
    return signing.envelope(text.encode(), PAYLOAD_TYPE, key) if key else text


def statement(view: PacketView, digests: Mapping[str, str]) -> dict[str, JsonValue]:
    """The in-toto statement, version 1."""
    passed = sorted(cell.id for cell in view.cells if cell.word is VerdictWord.PASS)
    planned = [cell for cell in view.cells if cell.planned]
    held = bool(planned) and all(cell.word is VerdictWord.PASS for cell in planned)
    subject = SOURCE_MANIFEST_NAME if SOURCE_MANIFEST_NAME in digests else MANIFEST_NAME
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": subject, "digest": {"sha256": digests[subject]}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            # Unproven blocks as Unsupported does, so there is no third result.
            "result": "PASSED" if held and view.run.source_unchanged is True else "FAILED",
            "configuration": [
                {"name": name, "digest": {"sha256": digest}}
                for name, digest in sorted(digests.items())
            ],
            "passedTests": passed,
            "failedTests": sorted({cell.id for cell in view.cells} - set(passed)),
            "plannedPath": sorted(cell.id for cell in planned),
            "subjectIs": "the manifest of the source checkpoint"
            if subject == SOURCE_MANIFEST_NAME
            else "the packet's list of checksums: the source checkpoint has no manifest",
        },
    }
