"""Which versions wrote a checkpoint and which read it: what a drill of version skew rests on.

Only what both processes really imported is compared. Two environments that differ in nothing the
job uses have skewed nothing, and a restore between them proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptdrill.model import LaunchRecord

_ALWAYS = ("torch", "python", "cuda")


@dataclass(frozen=True)
class Skew:
    """Writer and reader in words (`torch 2.13.0, python 3.11.7`), what differs first."""

    writer: str
    reader: str
    differing: tuple[str, ...]

    @property
    def text(self) -> str:
        """`written by torch 2.13.0, read by torch 2.14.0`."""
        return f"written by {self.writer}, read by {self.reader}"


def skew(source: LaunchRecord, restore: LaunchRecord) -> Skew:
    """The versions of two launches, side by side."""
    writer, reader = _versions(source), _versions(restore)
    both = sorted(writer.keys() & reader.keys())
    differing = tuple(name for name in both if writer[name] != reader[name])
    shown = differing or tuple(name for name in _ALWAYS if name in both)
    return Skew(_words(writer, shown), _words(reader, shown), differing)


def _versions(record: LaunchRecord) -> Mapping[str, str]:
    """Name -> version; what the processes said at their start outranks what is installed."""
    found: dict[str, str] = {}
    for fact in record.of("imported"):
        found |= {str(name): str(version) for name, version in fact.data["packages"].items()}
    for fact in record.of("started")[:1]:
        found |= {name: str(fact.data[name]) for name in _ALWAYS if fact.data.get(name)}
    return found


def _words(versions: Mapping[str, str], names: tuple[str, ...]) -> str:
    return ", ".join(f"{name} {versions[name]}" for name in names) or "unknown versions"
