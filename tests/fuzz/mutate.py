"""Damages copies of small checkpoints in every way that storage, accidents and attackers know.

Each mutation is drawn from a random generator that is seeded by the case's own number, so one case
can be made again without the others. Hostile pickles would create the file `proof` beside the
checkpoint if anything executed them.
"""

import io
import os
import pickle
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random

PROOF = "proof"
_NUMBERS = (0, 1, 0x7F, 0xFF, 1 << 31, (1 << 32) - 1, (1 << 62) - 1, 1 << 63, (1 << 64) - 1)


class _Opens:
    """Pickled, it is a call of `open(PROOF, "w")`."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (self.path, "w"))


class _Runs(_Opens):
    """Pickled, it is a shell command."""

    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, (f"touch {self.path}",))


def _bombs() -> list[bytes]:
    """Small pickles that ask for endless work or memory."""
    head = b"\x80\x02"
    return [
        head + b"(" * 5_000 + b".",
        head + b"]" + b"\x85" * 5_000 + b".",
        head + b"]q\0" + b"(" + b"h\0" * 5_000 + b"e.",
        head + b"(K\x01t" + b"2\x86" * 60 + b".",
        head + b"]q\0" + b"](h\0h\0eq\0" * 60 + b".",
        head + b"\x8b\xff\xff\xff\x7f" + b"\xff" * 64,
        head + b"\x8a\xff" + b"\x7f" * 255 + b".",
        head + b"X\xff\xff\xff\xffaaaa",
        head + b"\x8e" + b"\xff" * 8,
        head + b"\x82\x01\x83\x01\x00\x84\x01\x00\x00\x00.",
        head + b"]r\xff\xff\xff\xff.",
        head + b"cbuiltins\neval\n(X\x01\0\0\x001tR.",
        head + b"cposix\nsystem\n(X\x04\0\0\x00truetR.",
    ]


BOMBS = _bombs()


def mutate(checkpoint: Path, random: Random) -> str:
    """Change 1 to 3 things in a copy; the names of what was done, in order."""
    done = []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        files = _ordinary(checkpoint)
        if not files:
            break
        target = random.choice(files)
        mutation = random.choice(_MUTATIONS)
        mutation(target, checkpoint, random)
        done.append(f"{mutation.__name__.strip('_')} {target.name}")
    return ", ".join(done)


def _ordinary(checkpoint: Path) -> list[Path]:
    """Regular files of a size that can be rewritten quickly."""
    files = (p for p in _files(checkpoint) if p.is_file() and not p.is_symlink())
    return sorted(p for p in files if p.stat().st_size < 1 << 20)


def _files(checkpoint: Path) -> list[Path]:
    return [checkpoint] if checkpoint.is_file() else list(checkpoint.rglob("*"))


def _proof(checkpoint: Path) -> str:
    return str(checkpoint.parent / PROOF)


# --------------------------------------------------------------------------------------------------
# What accidents do


def _flip_bits(target: Path, _: Path, random: Random) -> None:
    data = bytearray(target.read_bytes())
    for _i in range(random.choice((1, 1, 2, 8, 64)) if data else 0):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    target.write_bytes(data)


def _set_bytes(target: Path, _: Path, random: Random) -> None:
    data = bytearray(target.read_bytes())
    for _i in range(random.choice((1, 4, 32)) if data else 0):
        data[random.randrange(len(data))] = random.choice((0, 0xFF, 0x2E, random.randrange(256)))
    target.write_bytes(data)


def _truncate(target: Path, _: Path, random: Random) -> None:
    size = target.stat().st_size
    os.truncate(target, random.choice((0, 1, size // 2, max(size - 1, 0), random.randint(0, size))))


def _zero_fill(target: Path, _: Path, random: Random) -> None:
    data = bytearray(target.read_bytes())
    start = random.randint(0, len(data))
    end = min(len(data), start + random.choice((8, 512, 4096)))
    data[start:end] = bytes(end - start)
    target.write_bytes(data)


def _insert(target: Path, _: Path, random: Random) -> None:
    data = target.read_bytes()
    at = random.randint(0, len(data))
    target.write_bytes(data[:at] + random.randbytes(random.choice((1, 7, 300))) + data[at:])


def _remove_range(target: Path, _: Path, random: Random) -> None:
    data = target.read_bytes()
    at = random.randint(0, len(data))
    target.write_bytes(data[:at] + data[at + random.choice((1, 16, 1000)) :])


def _repeat_range(target: Path, _: Path, random: Random) -> None:
    data = target.read_bytes()
    at = random.randint(0, len(data))
    piece = data[at : at + random.choice((16, 200, 2000))]
    target.write_bytes(data[:at] + piece * random.choice((2, 5)) + data[at:])


def _delete(target: Path, checkpoint: Path, random: Random) -> None:
    if target != checkpoint:
        target.unlink()


def _swap(target: Path, checkpoint: Path, random: Random) -> None:
    other = random.choice(_ordinary(checkpoint))
    one, two = target.read_bytes(), other.read_bytes()
    target.write_bytes(two)
    other.write_bytes(one)


def _append_itself(target: Path, _: Path, random: Random) -> None:
    target.write_bytes(target.read_bytes() * 2)


# --------------------------------------------------------------------------------------------------
# What lies


def _lie_in_a_number(target: Path, _: Path, random: Random) -> None:
    data = bytearray(target.read_bytes())
    width = random.choice((1, 2, 4, 8))
    if len(data) >= width:
        at = random.randint(0, len(data) - width)
        number = random.choice(_NUMBERS) & ((1 << 8 * width) - 1)
        data[at : at + width] = number.to_bytes(width, random.choice(("little", "big")))
    target.write_bytes(data)


def _lie_in_the_directory(target: Path, _: Path, random: Random) -> None:
    """Change a field of a zip's directory or of its end."""
    data = bytearray(target.read_bytes())
    marks = [m.start() for m in re.finditer(rb"PK(\x01\x02|\x05\x06|\x06\x06|\x03\x04)", data)]
    if marks:
        at = min(random.choice(marks) + random.randrange(4, 46), len(data) - 4)
        struct.pack_into("<I", data, at, random.choice(_NUMBERS) & 0xFFFFFFFF)
    target.write_bytes(data)


def _lie_in_json(target: Path, _: Path, random: Random) -> None:
    """Replace a number or a text of JSON, also in the header of safetensors."""
    data = target.read_bytes()
    spots = list(re.finditer(rb'(?<=[:,\[ ])-?\d+(?=[,\]} ])|"[^"]{1,40}"', data))
    if spots and b"{" in data[:16]:
        spot = random.choice(spots)
        new = random.choice(
            [b"-1", b"1e999", b"null", b"[]", b"{}", b"true", b'"../../x"', b'"F31"', b"9" * 400]
            + [str(number).encode() for number in _NUMBERS]
        )
        data = data[: spot.start()] + new + data[spot.end() :]
        if random.random() < 0.7 and data[8:9] == b"{":
            grown = int.from_bytes(data[:8], "little") + len(new) - (spot.end() - spot.start())
            data = max(grown, 0).to_bytes(8, "little") + data[8:]
    target.write_bytes(data)


def _deep_json(target: Path, _: Path, random: Random) -> None:
    depth = random.choice((100, 20_000))
    text = b'{"a":' * depth
    target.write_bytes(text if random.random() < 0.5 else struct.pack("<Q", len(text)) + text)


def _rename_paths(target: Path, _: Path, random: Random) -> None:
    """Point a path inside the file out of the folder, with no change of length."""
    data = target.read_bytes()
    for name in re.findall(rb"__\d_\d\.distcp", data)[:1]:
        bad = random.choice((b"../../x.dist", b"/etc/passwd0", b"__0_0.\0istcp", b"..//..//..//"))
        data = data.replace(name, bad.ljust(len(name), b"/")[: len(name)])
    target.write_bytes(data)


# --------------------------------------------------------------------------------------------------
# What attacks


def _pickle(checkpoint: Path, random: Random) -> bytes:
    kind = random.choice((_Opens, _Runs, None))
    if kind is None:
        return random.choice(BOMBS)
    return pickle.dumps(kind(_proof(checkpoint)), protocol=random.choice((2, 4)))


def _hostile_file(target: Path, checkpoint: Path, random: Random) -> None:
    target.write_bytes(_pickle(checkpoint, random))


def _hostile_in_zip(target: Path, checkpoint: Path, random: Random) -> None:
    """Another pickle in the same zip, by name and place."""
    target.write_bytes(_zip(_pickle(checkpoint, random), random))


def _zip(pickled: bytes, random: Random) -> bytes:
    buffer = io.BytesIO()
    method = random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/byteorder", random.choice((b"little", b"big")))
        archive.writestr("a/data/0", bytes(random.choice((0, 16, 100_000))))
        if random.random() < 0.3:
            archive.writestr("../../x", b"out")
    return buffer.getvalue()


def _hostile_splice(target: Path, checkpoint: Path, random: Random) -> None:
    """A call in the middle of a pickle that is otherwise sound."""
    data = target.read_bytes()
    at = data.find(b"\x80\x02")
    call = b"cposix\nsystem\n(X\x01\0\0\x001tR0"
    if at >= 0:
        where = at + random.choice((2, 2, random.randint(2, 200)))
        data = data[:where] + call + data[where + random.choice((0, len(call))) :]
    target.write_bytes(data)


def _other_opcode(target: Path, _: Path, random: Random) -> None:
    data = bytearray(target.read_bytes())
    at = data.find(b"\x80")
    if 0 <= at < len(data) - 2:
        where = min(at + random.randint(0, 400), len(data) - 1)
        data[where] = random.choice(b"Rbcioq(.\x81\x82\x8a\x8b\x93\x94Q}]htu")
    target.write_bytes(data)


def _link_out(target: Path, checkpoint: Path, random: Random) -> None:
    if target != checkpoint:
        target.unlink()
        target.symlink_to(random.choice(("/etc/passwd", "../../outside", target.name, "/dev/zero")))


def _pipe(target: Path, checkpoint: Path, random: Random) -> None:
    """Whoever opens it waits for ever."""
    if target != checkpoint:
        target.unlink()
        os.mkfifo(target)


def _folder_instead(target: Path, checkpoint: Path, random: Random) -> None:
    if target != checkpoint:
        target.unlink()
        target.mkdir()


def _sparse(target: Path, _: Path, random: Random) -> None:
    """A file that says it has gigabytes."""
    os.truncate(target, random.choice((1 << 26, 1 << 33)))


_Mutation = Callable[[Path, Path, Random], None]
_MUTATIONS: tuple[_Mutation, ...] = (
    _flip_bits, _flip_bits, _set_bytes, _truncate, _zero_fill, _insert, _remove_range,
    _repeat_range, _delete, _swap, _append_itself, _lie_in_a_number, _lie_in_a_number,
    _lie_in_the_directory, _lie_in_the_directory, _lie_in_json, _lie_in_json, _deep_json,
    _rename_paths, _hostile_file, _hostile_in_zip, _hostile_splice, _other_opcode, _other_opcode,
    _link_out, _pipe, _folder_instead, _sparse,
)  # fmt: skip


def fresh_copy(source: Path, target: Path) -> Path:
    """A private copy of a checkpoint in an empty folder."""
    shutil.rmtree(target.parent, ignore_errors=True)
    target.parent.mkdir(parents=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)
    return target
