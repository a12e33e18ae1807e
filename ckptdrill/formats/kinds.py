"""Tells from a key what it holds: a weight, a moment of which parameter, a counter, a random state.

Keys are dotted, and begin with the place that the format gave them (`optimizer.state.0.exp_avg`).
The names are those that PyTorch, DeepSpeed, Megatron, Lightning, Hugging Face and Optax write.
First the parts of a key that only wrappers add are taken off, then the first pattern that fits
decides; a tensor that none fits is a weight when its type is floating.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What state a key belongs to. The value is how it is shown."""

    WEIGHT = "weights"
    MASTER = "master weights"
    MOMENT = "optimizer moments"
    PARAMETER_STEP = "optimizer steps"
    GROUPS = "parameter groups"
    SCHEDULER = "scheduler"
    SCALER = "loss scaler"
    EMA = "averaged weights"
    STEP = "step counter"
    RNG = "random state"
    DATA = "data position"
    OTHER = "other"


@dataclass(frozen=True)
class Sort:
    """The kind of a key, and of a tensor the parameter it belongs to: `name`, `moment` of it."""

    kind: Kind
    name: str
    moment: str = ""
    wrappers: tuple[str, ...] = ()


WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
_LEADING_WRAPPER = "module"
_WRAPPED = re.compile(rf"^{_LEADING_WRAPPER}\.|(^|\.)({'|'.join(WRAPPERS)})\.")
# What jobs call the mapping that holds the model, or all of the state.
_MODEL = re.compile(
    r"(model|module|net|network|weights|params|state_dict|model_state|model_state_dict"
    r"|model_weights)\."
)
_OUTER = re.compile(
    r"(app|state|checkpoint|ckpt|train_state|default)\.(?=(model|net|params|optim|opt|state_dict))"
)
_OPTIMIZER = re.compile(
    r"((chained_\d+|\d+)\.)?(optimizers?|optim|opt|osd|optimizer_states?|opt_state|optim_state"
    r"|optim(izer)?_state_dict)([._]\d+)?(\.optimizer(?=\.(state|param_groups)))?\."
)
_MOMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta"}
    | {"grad_avg", "sum", "mu", "nu", "prev", "step", "count", "fp32_param", "master_param", "fp32"}
)
_MASTERS = frozenset({"fp32_param", "master_param", "fp32"})
_STEPS = frozenset({"step", "count"})
_DATA = (
    r"data_?loader|(^|[._])(data|loader|sampler|cursor)([._]|$)|consumed_"
    r"|samples_seen|batches_that_stepped|batch_progress"
)
_STEP = (
    r"(^|[._])(global_?steps?|global_samples|num_input_tokens_seen|completed_steps?|steps?|iteration|iter|epoch|current_epoch"
    r"|num_steps|_step_count)$"
)
_WORDS = tuple(
    (kind, re.compile(words, re.IGNORECASE))
    for kind, words in (
        (Kind.RNG, r"(^|[._])(c?rng|random(?!_ltd))([._]|$)|rng_state|generator|manual_seed"),
        (Kind.SCHEDULER, r"(^|[._])(lr_)?sched(uler)?s?([._]|$)|opt_param_scheduler"),
        (Kind.SCALER, r"(^|[._])(grad_?)?scaler|loss_scale"),
        (Kind.DATA, _DATA),
        (Kind.STEP, _STEP),
    )
)
_EMA = re.compile(
    r"(^|[._])(ema|averaged?)(_model|_weights|_state_dict)?\.(?P<name>.+)", re.IGNORECASE
)


def sort(key: str, *, weight_like: bool) -> Sort:
    """What the leaf or tensor at `key` is; `weight_like` for a tensor of a floating type.

    A path in front of the key, up to a colon, is passed over.
    """
    bare, wrappers = without_wrappers(key.rpartition(":")[2])
    outer = _OUTER.match(bare)
    bare = bare[outer.end() :] if outer else bare
    optimizer = _OPTIMIZER.match(bare)
    if optimizer:
        return _of_optimizer(bare[optimizer.end() :], wrappers)
    if bare.startswith("master."):
        return Sort(Kind.MASTER, bare.removeprefix("master."), wrappers=wrappers)
    model = _MODEL.match(bare)
    if model:
        name, more = without_wrappers(bare[model.end() :])
        return Sort(Kind.WEIGHT, name, wrappers=(*wrappers, *more))
    return _by_words(bare, wrappers, weight_like=weight_like)


def _by_words(bare: str, wrappers: tuple[str, ...], *, weight_like: bool) -> Sort:
    average = _EMA.search(bare)
    if average:
        return Sort(Kind.EMA, average["name"], wrappers=wrappers)
    for kind, words in _WORDS:
        if words.search(bare):
            return Sort(kind, bare, wrappers=wrappers)
    return Sort(Kind.WEIGHT if weight_like else Kind.OTHER, bare, wrappers=wrappers)


def _of_optimizer(rest: str, wrappers: tuple[str, ...]) -> Sort:
    """Of what stands behind the name of an optimizer."""
    if rest.startswith("param_groups.") or ".param_groups." in rest:
        return Sort(Kind.GROUPS, rest, wrappers=wrappers)
    rest = rest.removeprefix("state.")
    if rest in _STEPS:
        return Sort(Kind.PARAMETER_STEP, "", rest, wrappers)
    first, _, behind = rest.partition(".")
    before, _, last = rest.rpartition(".")
    if last in _MOMENTS and before:
        return _moment(before, last, wrappers)
    if first in _MOMENTS and behind:  # as Megatron and Optax have it
        return _moment(behind, first, wrappers)
    second = rest.split(".")[1:2]
    if second and second[0] in _MOMENTS:  # a chain of transformations: 0.mu.layer.kernel
        return _moment(rest.split(".", 2)[-1], second[0], wrappers)
    return Sort(Kind.OTHER, f"optimizer.{rest}", wrappers=wrappers)


def _moment(name: str, moment: str, wrappers: tuple[str, ...]) -> Sort:
    name, more = without_wrappers(name)
    model = _MODEL.match(name)
    name = name[model.end() :] if model and model[1] == "params" else name
    if moment in _MASTERS:
        return Sort(Kind.MASTER, name, wrappers=(*wrappers, *more))
    kind = Kind.PARAMETER_STEP if moment in _STEPS else Kind.MOMENT
    return Sort(kind, name, moment, (*wrappers, *more))


def without_wrappers(key: str) -> tuple[str, tuple[str, ...]]:
    """The key without the parts that wrappers added, and those parts, each once.

    `module` is one only in front, where DDP puts it: models have parts of that name, too.
    """
    if not _WRAPPED.search(key):
        return key, ()
    parts = key.split(".")
    seen: list[str] = []
    while len(parts) > 1 and parts[0] in (_LEADING_WRAPPER, *WRAPPERS):
        seen.append(parts.pop(0))
    seen += [part for part in parts if part in WRAPPERS]
    bare = ".".join(part for part in parts if part not in WRAPPERS)
    return bare, tuple(dict.fromkeys(seen))
