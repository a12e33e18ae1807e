"""Makes checkpoint folders of plain bytes; their commit marker is `trainer_state.json`."""

from pathlib import Path

FILES = {
    "part-0.bin": b"zero" * 1000,
    "sub/part-1.bin": b"one" * 1000,
    "trainer_state.json": b'{"global_step": 7}',
}


def make(folder: Path, files: dict[str, bytes] | None = None) -> Path:
    """Write `files` (default: all of FILES) by relative path and return the folder."""
    for name, data in (FILES if files is None else files).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder
