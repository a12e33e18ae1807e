"""Envelopes: read by a library that is not ours, bound to their type, and refused when changed."""

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import SSlibKey

from ckptdrill import signing
from ckptdrill.errors import UserError
from ckptdrill.signing import SignatureError

TYPE = "application/vnd.test+json"
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw().hex()
PEM = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)


def their_key() -> SSlibKey:
    return SSlibKey(PUBLIC, "ed25519", "ed25519", {"public": PUBLIC})


def test_securesystemslib_verifies_our_envelope() -> None:
    envelope = Envelope.from_dict(json.loads(signing.envelope(b'{"a": 1}', TYPE, KEY)))
    assert envelope.verify([their_key()], 1)
    assert envelope.payload == b'{"a": 1}'


def test_securesystemslib_refuses_it_when_the_content_is_changed() -> None:
    envelope = Envelope.from_dict(json.loads(signing.envelope(b'{"a": 1}', TYPE, KEY)))
    envelope.payload = b'{"a": 2}'
    with pytest.raises(VerificationError):
        envelope.verify([their_key()], 1)


def test_an_envelope_opens_and_names_its_key() -> None:
    signed = signing.opened(json.loads(signing.envelope(b"x", TYPE, KEY)), TYPE)
    assert (signed.payload, signed.key) == (b"x", PUBLIC)


def test_every_flipped_bit_of_an_envelope_is_refused() -> None:
    value = json.loads(signing.envelope(b"content", TYPE, KEY))
    (only,) = value["signatures"]
    for holder, name in ((value, "payload"), (value, "payloadType"), (only, "keyid")):
        text = holder[name]
        for n in range(len(text)):
            holder[name] = text[:n] + chr(ord(text[n]) ^ 1) + text[n + 1 :]
            with pytest.raises(SignatureError):
                signing.opened(value, TYPE)
        holder[name] = text
    assert signing.opened(value, TYPE)


def test_one_kind_of_document_is_never_taken_for_another() -> None:
    value = json.loads(signing.envelope(b"x", "application/other", KEY))
    with pytest.raises(SignatureError, match="application/other"):
        signing.opened(value, TYPE)


@pytest.mark.parametrize("value", [None, [], {}, {"payload": 1}, {"payload": "", "signatures": []}])
def test_what_is_no_envelope_is_refused(value: object) -> None:
    with pytest.raises(SignatureError):
        signing.opened(value, TYPE)


def test_keys_come_from_pem_files(tmp_path: Path) -> None:
    private, public = tmp_path / "key.pem", tmp_path / "key.pub.pem"
    private.write_bytes(KEY.private_bytes(*PEM, serialization.NoEncryption()))
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(KEY.public_key().public_bytes(PEM[0], form))
    assert signing.private_key(private).private_bytes_raw() == bytes(range(32))
    assert signing.public_key(public) == PUBLIC
    with pytest.raises(UserError, match="no unencrypted PEM key"):
        signing.private_key(public)
    with pytest.raises(UserError, match="no PEM public key"):
        signing.public_key(private)


def test_a_key_that_cannot_sign_is_a_user_error(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    with pytest.raises(UserError, match="cannot read"):
        signing.private_key(path)
    path.write_bytes(KEY.private_bytes(*PEM, serialization.BestAvailableEncryption(b"secret")))
    with pytest.raises(UserError, match="unencrypted"):
        signing.private_key(path)
    rsa = generate_private_key(65537, 2048)
    path.write_bytes(rsa.private_bytes(*PEM, serialization.NoEncryption()))
    with pytest.raises(UserError, match="not an ed25519 key"):
        signing.private_key(path)
