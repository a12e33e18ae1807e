"""`approval.json`: who approved which packet, when, signed. It lies beside the list of checksums.

It speaks of the packet by the SHA-256 of that list, so it cannot be in the list: `seal-sha256.txt`
covers it instead, and `approved.html`, the page with the approval on it, whose SHA-256 it holds. A
packet that is derived anew with another content leaves its approval behind.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ckptdrill import packet, signing, store
from ckptdrill.gate.conditions import Approval, Condition
from ckptdrill.packet import ApprovalView, render_page
from ckptdrill.store import RunFolder

PAYLOAD_TYPE = "application/vnd.ckptdrill.approval+json"


def record(
    root: Path,
    approver: str,
    approved_utc: str,
    held: Sequence[Condition],
    key: Ed25519PrivateKey,
) -> Approval:
    """Write the approval of the packet at `root`, and the page that shows it, and seal both.

    `held` are the conditions that the approver saw.
    """
    public = key.public_key().public_bytes_raw().hex()
    packet_sha256 = store.sha256_of(root / store.MANIFEST_NAME)
    conditions = {each.name: each.found for each in held}
    shown = ApprovalView(approver, approved_utc, public, packet_sha256, tuple(conditions.items()))
    page = render_page(packet.read(RunFolder(root)), shown)
    store.write_atomic(root / store.APPROVED_PAGE_NAME, page)
    payload = {
        "approver": approver,
        "approved_utc": approved_utc,
        "packet_sha256": packet_sha256,
        "page_sha256": hashlib.sha256(page.encode()).hexdigest(),
        "conditions": conditions,
    }
    text = json.dumps(payload, indent=1, sort_keys=True) + "\n"
    envelope = signing.envelope(text.encode(), PAYLOAD_TYPE, key)
    store.write_atomic(root / store.APPROVAL_NAME, envelope)
    store.write_seal(root)
    return Approval(approver, approved_utc, public)


def read(root: Path) -> Approval | None:
    """The approval that lies with a packet; None when there is none."""
    path = root / store.APPROVAL_NAME
    if not path.is_file():
        return None
    try:
        signed = signing.opened(json.loads(path.read_bytes()), PAYLOAD_TYPE)
        value = json.loads(signed.payload)
        approval = Approval(str(value["approver"]), str(value["approved_utc"]), signed.key)
        approved, page_sha256 = value["packet_sha256"], value["page_sha256"]
    except signing.SignatureError as error:
        return Approval(problem=f"approval.json: {error}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return Approval(problem="approval.json is no approval")
    if approved != store.sha256_of(root / store.MANIFEST_NAME):
        why = f"{approval.approver} approved another state of this packet"
        return replace(approval, problem=why)
    page = root / store.APPROVED_PAGE_NAME
    if not page.is_file() or store.sha256_of(page) != page_sha256:
        why = f"{page.name} is not the page that {approval.approver} approved"
        return replace(approval, problem=why)
    return approval
