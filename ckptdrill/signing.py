"""Signatures over small JSON documents: ed25519 keys in PEM files, DSSE envelopes around the bytes.

DSSE (https://github.com/secure-systems-lab/dsse) signs the payload together with its type, so that
a signed approval can never be shown as a signed attestation. The key id of an envelope is the
public key itself, in hex: an envelope can be checked alone, and whoever knows which key to expect
compares that text. What a signature proves is only ever "the holder of this key".
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from ckptdrill.errors import UserError
from ckptdrill.model import JsonValue

_MAKE = "make one: openssl genpkey -algorithm ed25519 -out sign.pem"
_MAKE_PUBLIC = "take it from the private one: openssl pkey -in sign.pem -pubout -out sign.pub.pem"


class SignatureError(Exception):
    """An envelope that is none, or whose signature does not fit its content."""


@dataclass(frozen=True)
class Signed:
    """The content of an envelope whose signature fits, and the public key (hex) that it fits."""

    payload: bytes
    key: str


def private_key(path: Path) -> Ed25519PrivateKey:
    """The unencrypted PEM key at `path`. Raises UserError when it is none."""
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise UserError(
            f"cannot read the key: {error.strerror}", where=str(path), hint=_MAKE
        ) from (error)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError("this is no unencrypted PEM key", where=str(path), hint=_MAKE) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError("the key is not an ed25519 key", where=str(path), hint=_MAKE)
    return key


def public_key(path: Path) -> str:
    """The PEM public key at `path`, in hex. Raises UserError when it is none."""
    try:
        key = load_pem_public_key(path.read_bytes())
    except OSError as error:
        what = f"cannot read the key: {error.strerror}"
        raise UserError(what, where=str(path), hint=_MAKE_PUBLIC) from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError("this is no PEM public key", where=str(path), hint=_MAKE_PUBLIC) from error
    if not isinstance(key, Ed25519PublicKey):
        raise UserError("the key is not an ed25519 key", where=str(path), hint=_MAKE_PUBLIC)
    return key.public_bytes_raw().hex()


def envelope(payload: bytes, payload_type: str, key: Ed25519PrivateKey) -> str:
    """The DSSE envelope (JSON text) of `payload`, signed."""
    signature = key.sign(_encoded(payload_type, payload))
    value = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": payload_type,
        "signatures": [
            {
                "keyid": key.public_key().public_bytes_raw().hex(),
                "sig": base64.b64encode(signature).decode(),
            }
        ],
    }
    return json.dumps(value, indent=1) + "\n"


def is_envelope(value: JsonValue) -> bool:
    """Whether a JSON document is meant as a DSSE envelope."""
    return isinstance(value, Mapping) and "payloadType" in value


def opened(value: JsonValue, payload_type: str) -> Signed:
    """What is in an envelope of this type, its one signature checked.

    Raises SignatureError for anything else.
    """
    try:
        payload = base64.b64decode(value["payload"], validate=True)
        (only,) = value["signatures"]
        signature, key = base64.b64decode(only["sig"], validate=True), str(only["keyid"])
        found_type = value["payloadType"]
        verifier = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise SignatureError(f"this is no signed envelope ({type(error).__name__})") from error
    if found_type != payload_type:
        raise SignatureError(f"it holds {found_type!r}, not {payload_type!r}")
    try:
        verifier.verify(signature, _encoded(payload_type, payload))
    except InvalidSignature as error:
        raise SignatureError("the signature does not fit the content") from error
    return Signed(payload, key)


def _encoded(payload_type: str, payload: bytes) -> bytes:
    """The pre-authentication encoding of DSSE: what is really signed."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
