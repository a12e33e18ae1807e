"""Checkpoints of the Hugging Face Trainer: `checkpoint-N/` with one file per part of the state.

Signature: `trainer_state.json` with `global_step` and `log_history`. The weights are safetensors
(or torch.save) files; under FSDP2 they and the optimizer are DCP folders.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ckptdrill.formats import contents, deepspeed, leaves
from ckptdrill.formats.contents import Found, Holdings, Part
from ckptdrill.formats.leaves import Leaf

NAME = "hf-trainer"
COMMIT = "none: the folder gets its files one by one, trainer_state.json near the end"
STATE = "trainer_state.json"
_WEIGHTS = re.compile(
    r"(model|pytorch_model|adapter_model|diffusion_pytorch_model)"
    r"(_\d+)?(-\d+-of-\d+)?\.(safetensors|bin|pt)"
)
_PLACES = (
    (re.compile(r"pytorch_model_fsdp_\d+|optimizer_\d+"), ""),
    (_WEIGHTS, "model"),
    (re.compile(r"optimizer(_\d+)?\.(pt|bin)"), "optimizer"),
    (re.compile(r"scheduler(_\d+)?\.(pt|bin)"), "lr_scheduler"),
    (re.compile(r"scaler\.pt"), "scaler"),
    (re.compile(r"sampler(_\d+)?\.bin"), "sampler"),
    (re.compile(r"dl_state_dict(_\d+)?\.bin"), "dataloader"),
)
_RNG = re.compile(r"(?:rng_state|random_states)(?:_(\d+))?\.(?:pth|pkl)")


def recognises(found: Found) -> bool:
    """By the keys in `trainer_state.json`."""
    state = found.json(STATE) if STATE in found.names else None
    return isinstance(state, dict) and {"global_step", "log_history"} <= state.keys()


def holdings(found: Found) -> Holdings:
    """Parts by their file names; counters from `trainer_state.json`."""
    held = placed(found, place)
    shown = {**held.leaves, **_counters(found.json(STATE))}
    versions = {**held.versions, **_versions(found)}
    whole = Holdings(held.tensors, shown, versions, held.problems, held.notes)
    return whole.also(problems=missing_random_states(found))


def placed(found: Found, where: contents.Place) -> Holdings:
    """Parts by their place; what DeepSpeed has put into the folder is assembled."""
    held = contents.placed(found, where)
    return deepspeed.assembled(found, held) if deepspeed.recognises(found) else held


def place(part: Part) -> str | None:
    """Where a part belongs; None for what no resume needs (arguments of the writer)."""
    name = part.name
    if name == "training_args.bin":
        return None
    for pattern, prefix in _PLACES:
        if pattern.fullmatch(name):
            return prefix
    random = _RNG.fullmatch(name)
    return f"rng.{random[1] or 0}" if random else contents.plain_place(part)


def missing_random_states(found: Found) -> Iterator[str]:
    """Ranks below the highest that have no file of random states."""
    ranks = {int(r[1]) for name in found.names if (r := _RNG.fullmatch(name)) and r[1]}
    for rank in range(max(ranks, default=0)):
        if rank not in ranks:
            yield f"the random states of rank {rank} are missing"


def _counters(state: Any) -> dict[str, Leaf]:
    keys = ("global_step", "epoch", "max_steps", "train_batch_size", "num_input_tokens_seen")
    return {key: leaves.leaf(state[key]) for key in keys if state.get(key) is not None}


def _versions(found: Found) -> dict[str, str]:
    config = found.json("config.json")
    said = config.get("transformers_version") if isinstance(config, dict) else None
    return {"transformers_version": said[:64]} if isinstance(said, str) else {}
