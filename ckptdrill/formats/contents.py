"""What a checkpoint holds, whichever stack wrote it: the nouns, and the reading of its parts.

A part is what can be read by itself: a DCP folder, a file of torch.save, a file of safetensors. All
of them are read first, then a stack (one module per on-disk format) recognises its own layout in
what was found, and gives each part its place: `optimizer.pt` of the Hugging Face Trainer becomes
`optimizer.…`. From then on keys tell what they hold, and formats can be laid beside each other.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from ckptdrill.errors import UserError
from ckptdrill.formats import dcp, leaves, listing, pickles, safetensors, torch_save
from ckptdrill.formats.layout import Chunk, TensorMeta
from ckptdrill.formats.leaves import Leaf

DCP = "dcp"
TORCH_SAVE = "torch.save"
SAFETENSORS = "safetensors"
HEAD_BYTES = 256
_MAX_PARTS = 20_000
_MAX_BLOBS = 2_000
# What all values of a DCP checkpoint that are no tensors may take together.
_MAX_BLOB_BYTES = 8 << 20
_MAX_JSON_BYTES = 16 << 20
_MAX_LEAVES = 50_000
# A number in a name or a file can claim any number of ranks.
_MAX_PROBLEMS = 1_000


@dataclass(frozen=True)
class Part:
    """One readable part. `path` is relative to the checkpoint; files of chunks are, too.

    `refusal` says why it could not be read (then nothing else is there); `foreign` that it is whole
    and asks for a class that no reader knows.
    """

    form: str
    path: str
    tensors: Mapping[str, TensorMeta] = field(default_factory=dict)
    leaves: Mapping[str, Leaf] = field(default_factory=dict)
    content: Any = None
    notes: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    refusal: str | None = None
    foreign: bool = False

    @property
    def name(self) -> str:
        """The last part of its path."""
        return PurePosixPath(self.path).name

    @cached_property
    def tops(self) -> frozenset[str]:
        """The first parts of its keys."""
        return frozenset(key.partition(".")[0] for key in (*self.tensors, *self.leaves))


@dataclass(frozen=True)
class Found:
    """What lies at a path: the names of all files relative to `root`, and the parts among them."""

    root: Path
    names: tuple[str, ...]
    parts: tuple[Part, ...]

    def json(self, name: str) -> Any:
        """The content of a small JSON file; None when it is none or not there."""
        content = listing.head(self.root / name, _MAX_JSON_BYTES)
        try:
            return json.loads(content.decode())
        except (ValueError, RecursionError):
            return None

    def matching(self, pattern: str) -> list[re.Match[str]]:
        """The matches of a pattern over whole file names relative to the root."""
        return [found for name in self.names if (found := re.fullmatch(pattern, name))]


@dataclass(frozen=True)
class Holdings:
    """What the checkpoint holds by placed key; `versions` of its writers, `problems` that make it
    incomplete, and `notes` that do not.
    """

    tensors: Mapping[str, TensorMeta] = field(default_factory=dict)
    leaves: Mapping[str, Leaf] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def also(self, *, problems: Iterable[str] = (), notes: Iterable[str] = ()) -> Holdings:
        """The same with more problems and notes; of endless problems, the first `_MAX_PROBLEMS`."""
        more = itertools.islice(problems, _MAX_PROBLEMS)
        return dataclasses.replace(
            self, problems=(*self.problems, *more), notes=(*self.notes, *notes)
        )


Place = Callable[[Part], str | None]


# --------------------------------------------------------------------------------------------------
# Finding and reading parts


def form_of(path: Path) -> str | None:
    """`torch.save` or `safetensors` for a file that begins like one, else None."""
    head = listing.head(path, HEAD_BYTES)
    if path.suffix != ".distcp" and torch_save.is_torch_save(head):
        return TORCH_SAVE
    return SAFETENSORS if safetensors.is_safetensors(head) else None


def find(path: Path) -> Found:
    """Read all parts of a checkpoint: a file, or a folder and what is below it.

    Raises UserError when there is nothing at the path, or more than any checkpoint has.
    """
    if path.is_file():
        form = form_of(path)
        parts = (read_part(form, path, path.parent),) if form else ()
        return Found(path.parent, (path.name,), parts)
    names = listing.names(path)
    places = list(_places(path, names))
    if len(places) > _MAX_PARTS:
        raise UserError(f"over {_MAX_PARTS} parts", where=str(path))
    return Found(path, names, tuple(read_part(form, path / name, path) for form, name in places))


def _places(root: Path, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(form, relative path) of the parts; a folder of shards without metadata is one, too."""
    seen: set[str] = set()
    for name in names:
        folder, _, file = name.rpartition("/")
        if (file == dcp.METADATA_NAME or file.endswith(".distcp")) and folder not in seen:
            seen.add(folder)
            yield DCP, folder or "."
        elif form := form_of(root / name):
            yield form, name


def read_part(form: str, path: Path, root: Path) -> Part:
    """One part, read by its own format; what is wrong with it is in `refusal`."""
    relative = path.relative_to(root).as_posix()
    try:
        part = _READERS[form](path)
    except UserError as error:
        foreign = isinstance(error, pickles.Foreign)
        return Part(form, relative, refusal=error.what, foreign=foreign)
    folder = path if form == DCP else path.parent
    return dataclasses.replace(part, path=relative, tensors=moved(part.tensors, folder, root))


def _read_torch_save(path: Path) -> Part:
    saved = torch_save.load(path)
    found = leaves.below(saved.content)
    return Part(TORCH_SAVE, "", saved.tensors, found, saved.content, saved.notes)


def _read_safetensors(path: Path) -> Part:
    file = safetensors.read(path)
    return Part(SAFETENSORS, "", file.tensors, notes=file.notes)


def _read_dcp(folder: Path) -> Part:
    found = dcp.read(folder)
    tensors, shown = dict(found.tensors), dict[str, Leaf]()
    bytes_left = _MAX_BLOB_BYTES
    for name, (file, start, length) in list(found.blobs.items())[:_MAX_BLOBS]:
        bytes_left -= length
        if bytes_left < 0:
            shown[name] = leaves.leaf("not read: more than is read of such values")
            continue
        inner, inner_leaves = _blob(dcp.inside(folder, file), start, length)
        tensors |= {_below(name, key): tensor for key, tensor in inner.items()}
        shown |= {_below(name, key): leaf for key, leaf in inner_leaves.items()}
        if len(shown) > _MAX_LEAVES:
            break
    return Part(DCP, "", tensors, shown, None, found.notes, found.files)


def _blob(
    path: Path, start: int, length: int
) -> tuple[Mapping[str, TensorMeta], Mapping[str, Leaf]]:
    """What one value that is no tensor holds; one leaf that says why, when it cannot be read."""
    try:
        saved = torch_save.load(path, start, length)
        return saved.tensors, leaves.below(saved.content)
    except UserError as error:
        return {}, {"": leaves.leaf(f"not read: {error.what}")}


def _below(name: str, key: str) -> str:
    return f"{name}.{key}" if key else name


_READERS: Mapping[str, Callable[[Path], Part]] = {
    DCP: _read_dcp,
    TORCH_SAVE: _read_torch_save,
    SAFETENSORS: _read_safetensors,
}


def moved(found: Mapping[str, TensorMeta], folder: Path, root: Path) -> dict[str, TensorMeta]:
    """The same tensors with files relative to `root` instead of to `folder` in it."""
    prefix = folder.relative_to(root)
    if not prefix.parts:
        return dict(found)
    return {key: dataclasses.replace(t, chunks=_prefixed(t, prefix)) for key, t in found.items()}


def _prefixed(tensor: TensorMeta, prefix: Path) -> tuple[Chunk, ...]:
    return tuple(
        dataclasses.replace(chunk, file=(prefix / chunk.file).as_posix()) for chunk in tensor.chunks
    )


# --------------------------------------------------------------------------------------------------
# Giving parts their place


def placed(found: Found, place: Place | None = None) -> Holdings:
    """Everything in the parts under the prefix that `place` gives each; None leaves a part out.
    Without `place`, keys stay what they are.

    Where two parts have the same key, the later one is listed as `path:key`.
    """
    tensors: dict[str, TensorMeta] = {}
    shown: dict[str, Leaf] = {}
    versions: dict[str, str] = {}
    problems: list[str] = []
    notes: list[str] = []
    for part in found.parts:
        prefix = place(part) if place else ""
        if part.refusal is not None:
            (notes if part.foreign or prefix is None else problems).append(_refusal(part))
        elif prefix is not None:
            _add(tensors, part.tensors, prefix, part.path)
            _add(shown, _news(part.leaves, prefix, shown), prefix, part.path)
            versions |= _versions(part)
            problems += _missing_bytes(found.root, part)
    return Holdings(tensors, shown, versions, tuple(problems), tuple(notes))


def _refusal(part: Part) -> str:
    where = "" if part.path == "." else f"{part.path}: "
    return f"{where}{part.refusal}"


def _add(target: dict[str, Any], new: Mapping[str, Any], prefix: str, path: str) -> None:
    for key, value in new.items():
        full = _placed_key(prefix, key)
        target[f"{path}:{full}" if full in target else full] = value


def _news(new: Mapping[str, Leaf], prefix: str, known: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Without what another part has said already: ranks repeat each other."""
    return {
        key: leaf
        for key, leaf in new.items()
        if (said := known.get(_placed_key(prefix, key))) is None or said.digest != leaf.digest
    }


def _placed_key(prefix: str, key: str) -> str:
    return _below(prefix, key) if prefix else key


def _versions(part: Part) -> dict[str, str]:
    """What the part says about the software that wrote it."""
    said = {
        key.rpartition(".")[2]: str(leaf.value)
        for key, leaf in part.leaves.items()
        if key.endswith("version") and leaf.value is not None
    }
    about = {key: value for key, value in part.notes.items() if key != "byteorder"}
    return {f"{part.form} {key}": value[:64].strip() for key, value in about.items()} | said


def _missing_bytes(root: Path, part: Part) -> list[str]:
    """Files that chunks need and that are not there, or end too early; and zips that are torn."""
    needed: dict[str, list[Chunk]] = {}
    for tensor in part.tensors.values():
        for chunk in tensor.chunks:
            needed.setdefault(chunk.file, []).append(chunk)
    for file in part.files:
        needed.setdefault(file if part.path == "." else f"{part.path}/{file}", [])
    return [what for file, chunks in needed.items() if (what := _missing(root, file, chunks))]


def _missing(root: Path, file: str, chunks: list[Chunk]) -> str | None:
    path = root / file
    if not path.is_file():
        return f"{file} is missing"
    end = max((chunk.offset_bytes + chunk.length_bytes for chunk in chunks), default=0)
    if path.stat().st_size < end:
        return f"{file} has {path.stat().st_size} bytes, and {end} are needed"
    zipped = sorted((c for c in chunks if c.zipped), key=lambda chunk: chunk.offset_bytes)
    try:
        for chunk in (*zipped[:1], *zipped[-1:]):
            dcp.payload(root, chunk)
    except UserError as error:
        return f"{file}: {error.what}"
    return None


def plain_place(part: Part) -> str:
    """The place that the content of a part tells: an optimizer's state, a bare mapping of weights.

    Anything else keeps its own keys.
    """
    if {"state", "param_groups"} <= part.tops:
        return "optimizer"
    if {"last_epoch", "_step_count"} <= part.tops:
        return "lr_scheduler"
    bare = part.form == TORCH_SAVE and part.tensors and not part.leaves and _only_tensors(part)
    return "model" if bare or part.form == SAFETENSORS else ""


def _only_tensors(part: Part) -> bool:
    return isinstance(part.content, (pickles.Pairs, pickles.Made)) and all(
        torch_save.as_tensor(value) is not None for _, value in torch_save.children(part.content)
    )
