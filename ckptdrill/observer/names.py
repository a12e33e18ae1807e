"""Find the job's models and give every parameter the name it would have without any wrapper.

The models are found through the garbage collector once an optimizer exists (global module hooks
would disturb `torch.compile`): every live module that is no other module's child is a root. DDP,
FSDP, `torch.compile` and activation checkpointing insert name parts; they are stripped where a
wrapper stands, and which ones were seen is recorded, because a checkpoint whose keys carry them is
a classic silent failure.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import flat
from .zero import is_engine

# Whose classes keep what they wrap under `module`, which is also an honest name of an attribute.
_WRAPPING = (
    *("torch.nn.parallel", "torch.distributed", "torch.optim.swa_utils", "deepspeed"),
    *("accelerate", "apex", "fairscale", "megatron", "lightning", "pytorch_lightning"),
)
_WRAPPERS = frozenset(
    {"DistributedDataParallel", "DataParallel", "AveragedModel", "DeepSpeedEngine"}
)  # and what the user derives from them
WRAPPER_PARTS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "module")


@dataclass
class Roots:
    """The models of the job. `label` is empty for the first, so that ordinary names stay short."""

    found: list[tuple[str, Any]] = field(default_factory=list)  # (label, weak reference)
    wrappers: set[str] = field(default_factory=set)

    @property
    def modules(self) -> list[tuple[str, Any]]:
        """(label, module) of those still alive."""
        alive = [(label, reference()) for label, reference in self.found]
        return [(label, module) for label, module in alive if module is not None]

    def parameters(self) -> Iterator[tuple[str, flat.Parameter]]:
        """(canonical name, parameter), a tied parameter under each of its names; for what lies in
        a flat partition of FSDP1, the fragment that this rank holds.
        """
        for label, module in self.modules:
            for name, parameter in flat.named_parameters(module):
                yield label + self._canonical(name, module), parameter

    def buffers(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """(canonical name, buffer, whether it is persistent)."""
        for label, module in self.modules:
            for prefix, child in module.named_modules():
                hidden: set[str] = getattr(child, "_non_persistent_buffers_set", set())
                for name, tensor in child._buffers.items():
                    if tensor is not None:
                        path = f"{prefix}.{name}" if prefix else name
                        yield label + self._canonical(path, module), tensor, name not in hidden

    def layers(self) -> Iterator[tuple[str, Any]]:
        """(canonical name, module) of every module, each model before what is below it."""
        for label, module in self.modules:
            for path, child in module.named_modules():
                name = label + self._canonical(path, module)
                yield name or "the model", child

    def generators(self, is_generator: Callable[[Any], bool]) -> dict[str, Any]:
        """Generator objects that modules keep as attributes, by the name of the module."""
        return {
            label + self._canonical(f"{prefix}.{key}", module): value
            for label, module in self.modules
            for prefix, child in module.named_modules()
            for key, value in list(vars(child).items())
            if is_generator(value)
        }

    def by_parameter(self) -> flat.Inside:
        """id(what an optimizer knows) -> the parameters in it, each by its first canonical name:
        one, or all those of a flat partition.
        """
        found: flat.Inside = {}
        for name, parameter in self.parameters():
            whole = parameter.whole if isinstance(parameter, flat.Fragment) else parameter
            inside = found.setdefault(id(whole), {})
            if all(parameter is not known for known in inside.values()):
                inside[name] = parameter
        return found

    def _canonical(self, name: str, module: Any) -> str:
        parts = []
        holder, only_wrappers = module, True  # the module at this place, and all before it
        for part in name.split("."):
            if part in WRAPPER_PARTS and _is_wrapper_part(part, holder, module, only_wrappers):
                self.wrappers.add(part)
            else:
                parts.append(part)
                only_wrappers = False
            holder = _children(holder).get(part)
        return ".".join(parts)


def find_roots(optimized: Mapping[int, int]) -> Roots:
    """Every live root module that has state, those that are trained first, in the order in which
    the optimizers have them: a module that joins later follows those before it, as it does in a
    process that is given all of them at once.

    `optimized` has the place of each of the optimizers' parameters by its id.
    """
    modules = _live_modules()
    children = {
        id(child)
        for module in modules
        for child in module.__dict__.get("_modules", {}).values()
        if child is not None
    }
    # A pipeline keeps the layers of the other stages, too, in the list that it was made of.
    listed = {id(m) for module in modules for m in module.__dict__.get("_layer_specs", ())}
    roots = [m for m in modules if id(m) not in children | listed and _has_state(m)]
    lists = [m for m in roots if isinstance(m, torch.nn.ModuleList)]
    dealt = {id(m) for m in lists if any(_is_dealt(m, other, optimized) for other in roots)}
    roots = [m for m in roots if id(m) not in dealt]
    roots.sort(key=lambda m: (not trains(m, optimized), _place(m, optimized)))
    return Roots([(label, weakref.ref(module)) for label, module in _labelled(roots)])


def _live_modules() -> list[Any]:
    return [o for o in gc.get_objects() if issubclass(type(o), torch.nn.Module)]


def trains(module: Any, optimized: Mapping[int, int]) -> bool:
    """Whether a module has parameters that an optimizer steps on, be it through flat copies."""
    return is_engine(module) or any(id(p) in optimized for p in module.parameters())


def _is_dealt(layers: Any, other: Any, optimized: Mapping[int, int]) -> bool:
    """Whether a list of all layers was made to be dealt out, and another model has what of it is
    trained on this rank: what it holds beside that is trainable and nobody trains it here.
    """
    if other is layers or isinstance(other, torch.nn.ModuleList):
        return False
    mine, its = ({id(p): p for p in m.parameters()} for m in (layers, other))
    beside = [p for number, p in mine.items() if number not in its]
    trained = mine.keys() & optimized.keys()
    idle = all(p.requires_grad and id(p) not in optimized for p in beside)
    return bool(trained) and its.keys() <= mine.keys() and idle


def stand_for(copies: Sequence[torch.Size], module: Any, world_size: int) -> bool:
    """Whether tensors of these shapes are copies of what a module has: float32 masters of all of
    its parameters, one by one, or end to end in one vector, whole or a rank's slice of it.
    """
    own = [p.shape for p in module.parameters() if p.requires_grad]
    if not own or not copies:
        return False
    held, total = (sum(shape.numel() for shape in shapes) for shapes in (copies, own))
    flat = all(len(shape) == 1 for shape in copies)
    a_slice = flat and held * (world_size - 1) < total <= held * world_size
    return own == list(copies) or a_slice


def copies_of(optimizers: Iterable[Any]) -> list[list[torch.Size]]:
    """The shapes of what each optimizer steps on, where none of that is in a live module."""
    inside = {
        id(p)
        for m in _live_modules()
        for p in m.__dict__.get("_parameters", {}).values()
        if p is not None
    }
    stepped = [[p for g in o.param_groups for p in g["params"]] for o in optimizers]
    apart = [each for each in stepped if not any(id(p) in inside for p in each)]
    return [[p.shape for p in each] for each in apart]


def _place(module: Any, optimized: Mapping[int, int]) -> int:
    places = (optimized[id(p)] for p in module.parameters() if id(p) in optimized)
    return min(places, default=len(optimized))


def unwrapped(module: Any) -> Any:
    """The user's module inside DDP, FSDP1 and torch.compile wrappers."""
    while True:
        inner = None
        for part in WRAPPER_PARTS:
            child = module.__dict__.get("_modules", {}).get(part)
            if child is not None and len(module._modules) == 1:
                inner = child
        if inner is None:
            return module
        module = inner


def own_class(kind: Any) -> Any:
    """The user's class of a module: `fully_shard` puts one of its own, `FSDPNet`, over `Net`."""
    bases = kind.__bases__
    if len(bases) == 2 and bases[0].__module__.startswith("torch.distributed"):
        return bases[1]
    return kind


def _labelled(roots: list[Any]) -> list[tuple[str, Any]]:
    labelled: list[tuple[str, Any]] = []
    used: dict[str, int] = {}
    for position, module in enumerate(roots):
        name = own_class(type(unwrapped(module))).__name__
        used[name] = used.get(name, 0) + 1
        number = f"#{used[name]}" if used[name] > 1 else ""
        labelled.append(("" if position == 0 else f"{name}{number}:", module))
    return labelled


def _has_state(module: Any) -> bool:
    if "_parameters" not in module.__dict__:
        return False
    for child in module.modules():
        if any(p is not None for p in child._parameters.values()):
            return True
        if any(b is not None for b in child._buffers.values()):
            return True
    return False


def _is_wrapper_part(part: str, holder: Any, root: Any, outermost: bool) -> bool:
    """Whether a wrapper has put this part of a name where `holder` stands.

    A wrapper of the user's own is one around the whole model, which adds nothing to it.
    """
    if part != "module":
        return True
    if holder is None:  # a name that is no path
        return unwrapped(root) is not root
    kind = own_class(type(holder))
    if kind.__module__.startswith(_WRAPPING) or any(k.__name__ in _WRAPPERS for k in kind.__mro__):
        return True
    own = [*holder.__dict__.get("_parameters", ()), *holder.__dict__.get("_buffers", ())]
    return outermost and not own and list(_children(holder)) == [part]


def _children(module: Any) -> dict[str, Any]:
    found: dict[str, Any] = module.__dict__.get("_modules", {}) if module is not None else {}
    return found
