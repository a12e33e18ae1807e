"""`approval.json`: who approved which packet, when, signed. It lies beside the list of checksums.

It speaks of the packet by the SHA-256 of that list, so it cannot be in the list: `seal-sha256.txt`
covers it instead. A packet that is derived anew with another content leaves its approval behind.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ckptdrill import signing, store
from ckptdrill.gate.conditions import Approval, Condition

PAYLOAD_TYPE = "application/vnd.ckptdrill.approval+json"


def record(
    root: Path,
    approver: str,
    approved_utc: str,
    held: Sequence[Condition],
    key: Ed25519PrivateKey,
) -> Approval:
    """Write the approval of the packet at `root` and seal it. `held` are the conditions that the
    approver saw.
    """
    payload = {
        "approver": approver,
        "approved_utc": approved_utc,
        "packet_sha256": store.sha256_of(root / store.MANIFEST_NAME),
        "conditions": {each.name: each.found for each in held},
    }
    text = json.dumps(payload, indent=1, sort_keys=True) + "\n"
    envelope = signing.envelope(text.encode(), PAYLOAD_TYPE, key)
    store.write_atomic(root / store.APPROVAL_NAME, envelope)
    store.write_seal(root)
    return Approval(approver, approved_utc, key.public_key().public_bytes_raw().hex())


def read(root: Path) -> Approval | None:
    """The approval that lies with a packet; None when there is none."""
    path = root / store.APPROVAL_NAME
    if not path.is_file():
        return None
    try:
        signed = signing.opened(json.loads(path.read_bytes()), PAYLOAD_TYPE)
        value = json.loads(signed.payload)
        approval = Approval(str(value["approver"]), str(value["approved_utc"]), signed.key)
        approved = value["packet_sha256"]
    except signing.SignatureError as error:
        return Approval(problem=f"approval.json: {error}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return Approval(problem="approval.json is no approval")
    if approved != store.sha256_of(root / store.MANIFEST_NAME):
        return Approval(problem=f"{approval.approver} approved another state of this packet")
    return approval
