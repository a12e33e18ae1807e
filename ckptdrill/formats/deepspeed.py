"""DeepSpeed's native checkpoints: model states per model-parallel rank, flat optimizer shards.

Signature: files `*_model_states.pt` of torch.save with the key `ds_version` (or, when they are torn
or missing, `*_optim_states.pt` with it). Under ZeRO 1 and 2 the parameters of a group are laid end
to end and cut into one equal piece per rank; under ZeRO 3 each parameter is cut by itself. Which
parameter is where, `param_shapes` tells: from it every parameter becomes one logical tensor again,
whose chunks are runs of elements in the files of the ranks.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckptdrill.formats import contents, pickles, torch_save
from ckptdrill.formats.contents import Found, Holdings, Part
from ckptdrill.formats.layout import ITEM_SIZE_BYTES, Chunk, TensorMeta

NAME = "deepspeed"
COMMIT = "none in the folder: the pointer `latest` beside it moves before all ranks have written"
_MODEL = re.compile(r"(?:.*/)?(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:.*/)?(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_STAGE_3 = "optimizer_state_dict.fp32_flat_groups."
# Where the flat pieces are: the key up to the group, and what the pieces are.
_FLAT = re.compile(
    r"optimizer_state_dict\.(?:(?:single_partition_of_fp32_groups|fp32_flat_groups)\.(?P<master>\d+)"
    r"|(?:base_optimizer_state|optimizer_state_dict)\.state\.(?P<group>\d+)\.(?P<moment>[a-z_]+))"
)
_MODULE = re.compile(r"^([^:]*:)?module\.")
_MAX_PARAMETERS = 50_000


# Of one group: `fp32` or the moment, and the flat piece of it.
_Flats = dict[str, TensorMeta]


@dataclass(frozen=True)
class _Group:
    """The parameters of a flat group in order: (name, shape)."""

    parameters: tuple[tuple[str, tuple[int, ...]], ...]


def recognises(found: Found) -> bool:
    """By names and the version inside; a torn file beside sound ones does not hide it."""
    ours = [p for p in found.parts if _MODEL.fullmatch(p.path) or _OPTIMIZER.fullmatch(p.path)]
    return any("ds_version" in part.tops for part in ours) or (
        bool(ours) and all(part.refusal for part in ours)
    )


def holdings(found: Found) -> Holdings:
    """Weights, and the logical tensors that flat shards make up; missing ranks are problems."""
    return assembled(found, contents.placed(found))


def assembled(found: Found, held: Holdings) -> Holdings:
    """`held` with the flat shards of ZeRO put together; also inside another stack's folder."""
    logical, notes = _logical(found)
    kept = {
        key: tensor
        for key, tensor in held.tensors.items()
        if not _FLAT.search(key) and not repeated(key) and not _emptied(key, tensor, logical)
    }
    whole = dataclasses.replace(held, tensors=under_model({**kept, **logical}))
    return whole.also(problems=_missing_ranks(found), notes=notes)


def under_model(tensors: Mapping[str, TensorMeta]) -> dict[str, TensorMeta]:
    """The same tensors with the weights, which DeepSpeed has under `module`, under `model`."""
    return {_MODULE.sub(r"\1model.", key): tensor for key, tensor in tensors.items()}


def buffers(found: Found) -> frozenset[str]:
    """The names of buffers, which have no moments."""
    names: set[str] = set()
    for part in _parts(found, _MODEL):
        listed = _top(part).get("buffer_names")
        if isinstance(listed, list):
            names |= {name for name in listed if isinstance(name, str)}
    return frozenset(names)


def _parts(found: Found, pattern: re.Pattern[str]) -> list[Part]:
    return [p for p in found.parts if pattern.fullmatch(p.path) and p.refusal is None]


def _top(part: Part) -> Mapping[str, object]:
    return {key: value for key, value in torch_save.children(part.content) if isinstance(key, str)}


def repeated(key: str) -> bool:
    """Whether a rank only repeats what the first one of its model-parallel rank has, as buffers."""
    match = _MODEL.match(key)
    return match is not None and int((match[1] or "0")[:9]) > 0


def shapes(found: Found) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter, as the model states tell."""
    groups = [group for part in _parts(found, _MODEL) for group in _groups(part)]
    return {name: shape for group in groups for name, shape in group.parameters}


def _emptied(key: str, tensor: TensorMeta, logical: Mapping[str, TensorMeta]) -> bool:
    """Whether it only stands for a parameter that ZeRO 3 has given to the ranks."""
    _, _, name = key.rpartition("module.")
    return tensor.shape == (0,) and f"master.{name}" in logical


# --------------------------------------------------------------------------------------------------
# From flat pieces to parameters


def _logical(found: Found) -> tuple[dict[str, TensorMeta], list[str]]:
    """Master weights and moments by placed key, of each model-parallel rank."""
    logical: dict[str, TensorMeta] = {}
    notes: list[str] = []
    of_rank = {_ranks(_OPTIMIZER, part): part for part in _parts(found, _OPTIMIZER)}
    for part in _parts(found, _MODEL):
        dp, mp = _ranks(_MODEL, part)
        if dp:
            continue  # under ZeRO 3 each rank repeats what the first one says
        pieces = {rank: _flats(p) for (rank, model), p in of_rank.items() if model == mp}
        groups = _groups(part)
        if pieces and not groups:
            notes.append(f"{part.path} does not say which parameters the flat shards hold")
        prefix = f"mp_rank_{mp:02d}:" if mp else ""
        stage_3 = any(key.startswith(_STAGE_3) for p in of_rank.values() for key in p.tensors)
        for number, group in enumerate(groups):
            held = {rank: flats[number] for rank, flats in pieces.items() if number in flats}
            logical |= _of_group(group, held, prefix, by_parameter=stage_3)
    return logical, notes


def _ranks(pattern: re.Pattern[str], part: Part) -> tuple[int, int]:
    match = pattern.fullmatch(part.path)
    return (int((match[1] or "0")[:9]), int(match[2][:9])) if match else (0, 0)


def _groups(part: Part) -> list[_Group]:
    listed = _top(part).get("param_shapes")
    if not isinstance(listed, list) or isinstance(listed, pickles.Pairs):
        listed = [listed]
    found = []
    for entry in listed[:_MAX_PARAMETERS]:
        pairs = [pair for pair in torch_save.children(entry) if isinstance(pair[0], str)]
        if len(pairs) > _MAX_PARAMETERS:
            raise pickles.Refused(f"over {_MAX_PARAMETERS} parameters in one group")
        found += (
            [_Group(tuple((name, pickles.sizes(size)) for name, size in pairs))] if pairs else []
        )
    return found


def _flats(part: Part) -> dict[int, _Flats]:
    """What a rank has of each group: `fp32` and its moments, and its step."""
    found: dict[int, _Flats] = {}
    for key, tensor in part.tensors.items():
        match = _FLAT.fullmatch(key)
        if match and tensor.chunks:
            number = int((match["master"] or match["group"])[:9])
            found.setdefault(number, {})[match["moment"] or "fp32"] = tensor
    return found


def _of_group(
    group: _Group, held: Mapping[int, _Flats], prefix: str, *, by_parameter: bool
) -> dict[str, TensorMeta]:
    """Every parameter of one group: its master weight, its moments, and the step of the group."""
    found: dict[str, TensorMeta] = {}
    cut = _cut_by_parameter if by_parameter else _cut_end_to_end
    for state in dict.fromkeys(state for flats in held.values() for state in flats):
        flat = {rank: flats[state] for rank, flats in held.items() if state in flats}
        first = next(iter(flat.values()))
        if state == "step" and not first.shape:
            for name, _ in group.parameters:
                found[f"{prefix}optimizer.state.{name}.step"] = first
            continue
        if any(len(tensor.shape) != 1 for tensor in flat.values()):
            continue
        for name, shape, runs in cut(group, flat):
            key = f"master.{name}" if state == "fp32" else f"optimizer.state.{name}.{state}"
            found[prefix + key] = TensorMeta(first.dtype, shape, tuple(runs), flat=True)
    return found


_Cut = Iterator[tuple[str, tuple[int, ...], list[Chunk]]]


def _cut_end_to_end(group: _Group, flat: Mapping[int, TensorMeta]) -> _Cut:
    """ZeRO 1 and 2: rank r has the elements from r times the length of the first piece on."""
    length = max((tensor.shape[0] for tensor in flat.values()), default=0)
    start = 0
    for name, shape in group.parameters:
        count = math.prod(shape)
        runs = []
        for rank, tensor in sorted(flat.items()):
            first = max(start, rank * length)
            end = min(start + count, rank * length + tensor.shape[0])
            if first < end:
                runs.append(_run(tensor, first - rank * length, first - start, end - first))
        yield name, shape, runs
        start += count


def _cut_by_parameter(group: _Group, flat: Mapping[int, TensorMeta]) -> _Cut:
    """ZeRO 3: each parameter is cut into equal pieces, the last one shorter.

    With a rank missing at the end the pieces would be taken for larger ones; the missing rank is a
    problem by itself.
    """
    start, world = 0, max(flat, default=0) + 1
    for name, shape in group.parameters:
        count = math.prod(shape)
        piece = -(-count // world)
        runs = []
        for rank, tensor in sorted(flat.items()):
            size = min(piece, count - rank * piece, tensor.shape[0] - start)
            if size > 0:
                runs.append(_run(tensor, start, rank * piece, size))
        yield name, shape, runs
        start += piece


def _run(flat: TensorMeta, position: int, first: int, count: int) -> Chunk:
    """`count` elements from `position` of a flat piece: those from `first` on of a tensor."""
    (whole,) = flat.chunks
    item = ITEM_SIZE_BYTES[flat.dtype]
    start = whole.offset_bytes + position * item
    return Chunk((first,), (count,), whole.file, start, count * item)


# --------------------------------------------------------------------------------------------------
# Whether all ranks have written


def _missing_ranks(found: Found) -> Iterator[str]:
    """Files of ranks that the recorded degrees ask for and that are not there."""
    there = {_ranks(_OPTIMIZER, p) for p in found.parts if _OPTIMIZER.fullmatch(p.path)}
    models = [p for p in found.parts if _MODEL.fullmatch(p.path)]
    if not models:
        yield "no file of model states"
    dp, mp = _degree(found, "dp_world_size"), _degree(found, "mp_world_size")
    for rank in range(mp):
        if not any(_ranks(_MODEL, part)[1] == rank for part in models):
            yield f"the model states of model-parallel rank {rank} of {mp} are missing"
    if not there and not _needs_shards(found):
        return
    for model in range(mp):
        for rank in range(dp):
            if (rank, model) not in there:
                yield f"the optimizer states of rank {rank} of {dp} (model {model}) are missing"


def _needs_shards(found: Found) -> bool:
    """Whether ZeRO was on: then the optimizer's state is in files of its own."""
    key = "ds_config.zero_optimization.stage"
    stages = [part.leaves[key].value for part in found.parts if key in part.leaves]
    return any(isinstance(stage, int) and stage > 0 for stage in stages)


def _degree(found: Found, key: str) -> int:
    values = [p.leaves[key].value for p in _parts(found, _MODEL) if key in p.leaves]
    counts = [value for value in values if isinstance(value, int) and 0 < value <= 100_000]
    return max(counts, default=1)
