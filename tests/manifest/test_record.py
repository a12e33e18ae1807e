"""The manifest file: every field of the restore contract, the schema, and what is no manifest."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from ckptdrill.errors import UserError
from ckptdrill.manifest import Facts, Manifest, record, sidecar
from ckptdrill.manifest.times import ns_of_utc, utc_of_ns

# Sections and fields as the contract lists them.
CONTRACT = {
    "manifest_version": (),
    "checkpoint_id": (),
    "status": (),
    "completed_step": (),
    "commit_marker": (),
    "software": ("torch", "cuda", "nccl", "framework", "image_digest"),
    "hardware": ("gpu_arch", "gpu_count"),
    "topology": (
        *("world_size", "dp", "tp", "pp", "cp", "ep"),
        *("zero_stage", "sharding", "optimizer_format"),
    ),
    "precision": ("param", "master", "scaler"),
    "training_state": ("epoch", "micro_step", "consumed_samples"),
    "fingerprints": ("model_config", "tokenizer", "dataset_manifest", "training_config"),
    "state_keys_sha256": (),
    "shapes_sha256": (),
    "files": (),
    "data_cursor": ("consumed_samples", "per_rank_state", "dp_size"),
    "rng": ("policy",),
    "storage": ("backend", "durable_commit_time_utc"),
    "omitted_state": (),
    "relaxations": (),
}


def test_every_field_of_the_contract() -> None:
    value = json.loads(Manifest().to_json())
    assert CONTRACT.keys() <= value.keys()
    for section, fields in CONTRACT.items():
        assert [name for name in fields if name not in value[section]] == []


def test_the_schema_beside_the_module_is_that_of_the_code() -> None:
    path = Path(record.__file__).with_name("manifest.schema.json")
    assert json.loads(path.read_bytes()) == Manifest.model_json_schema(by_alias=True)


def test_from_json_and_back() -> None:
    text = Manifest(
        completed_step=5,
        commit_marker=record.CommitMarker(file=".metadata", sha256="a" * 64),
        files=(record.FileRecord(path="ä", bytes=5, sha256="b" * 64),),
        relaxations=({"padded": [1, 2]}, "lenient"),
    ).to_json()
    assert Manifest.model_validate_json(text).to_json() == text


def test_what_could_not_be_read_again_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar, "_MAX_SIZE_BYTES", 1000)
    with pytest.raises(UserError, match="over the limit of 1000"):
        sidecar.write(tmp_path / "m.json", Manifest(omitted_state=("x" * 1000,)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        '{"completed_step": -1}',
        '{"completed_step": "many"}',
        '{"topology": {"dp": -2}}',
        '{"training_state": {"epoch": NaN}}',
        '{"software": {"torch": 2.13}}',
        '{"omitted_state": "rng"}',
        '{"unheard": 1}',
    ],
)
def test_facts_that_are_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        Facts.model_validate_json(text)


def test_open_sections_keep_what_they_do_not_know() -> None:
    facts = Facts.model_validate_json('{"software": {"apex": "24.04", "driver": {"cuda": 13}}}')
    manifest = Manifest(software=facts.software)
    assert json.loads(manifest.to_json())["software"]["driver"] == {"cuda": 13}


@pytest.mark.parametrize(
    ("time_ns", "text"),
    [
        (0, "1970-01-01T00:00:00.000000Z"),
        (1_764_461_112_123_456_789, "2025-11-30T00:05:12.123456Z"),
    ],
)
def test_times_are_exact_to_the_microsecond(time_ns: int, text: str) -> None:
    assert utc_of_ns(time_ns) == text
    assert ns_of_utc(text) == time_ns // 1000 * 1000


@pytest.mark.parametrize("text", [None, "", "2025", "2025-11-30T00:05:12Z", "zzzz"])
def test_what_is_no_time(text: str | None) -> None:
    assert ns_of_utc(text) is None
