"""Reads the pickles inside checkpoints without executing them, because a pickle is a program.

There is no unpickler here to restrict: `load` interprets the opcodes itself and has no way to call
anything. First the size is checked, then each opcode is counted and carried out on plain values. A
global becomes an inert `Symbol` if its name is on the allow-list, and is refused by name otherwise;
what a pickle would call becomes an inert `Made` that only remembers the call. Dictionaries stay
lists of pairs, so a hostile key is never hashed. Readers of a format then pick what they know out
of the result.

Limits keep a hostile pickle under 2 s and 512 MiB: 32 MiB of input, two million opcodes.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptdrill.errors import UserError
from ckptdrill.formats.layout import ITEM_SIZE_BYTES, STORAGE_DTYPE

MAX_SIZE_BYTES = 32 << 20
MAX_OPCODES = 2_000_000

ALLOWED: dict[str, frozenset[str]] = {
    "_codecs": frozenset({"encode"}),
    "_io": frozenset({"BytesIO"}),
    "argparse": frozenset({"Namespace"}),
    "builtins": frozenset(
        {"bool", "bytearray", "complex", "dict", "float", "frozenset", "int", "list", "range"}
        | {"set", "slice", "str", "tuple"}
    ),
    "collections": frozenset({"Counter", "OrderedDict", "defaultdict", "deque"}),
    "datetime": frozenset({"date", "datetime", "timedelta", "timezone"}),
    "deepspeed.runtime.fp16.loss_scaler": frozenset({"DynamicLossScaler", "LossScaler"}),
    "deepspeed.runtime.zero.config": frozenset({"ZeroStageEnum"}),
    "deepspeed.utils.tensor_fragment": frozenset({"fragment_address"}),
    "megatron.core.enums": frozenset({"ModelType"}),
    "megatron.core.rerun_state_machine": frozenset({"RerunMode", "RerunState"}),
    "megatron.core.transformer.enums": frozenset({"AttnBackend", "AttnMaskType", "ModelType"}),
    "numpy": frozenset({"dtype", "float32", "float64", "int32", "int64", "ndarray"}),
    "numpy._core.multiarray": frozenset({"_reconstruct", "scalar"}),
    "numpy.core.multiarray": frozenset({"_reconstruct", "scalar"}),
    "pathlib": frozenset({"PosixPath", "PurePosixPath"}),
    "pathlib._local": frozenset({"PosixPath", "PurePosixPath"}),
    "torch": frozenset({"Size", "Tensor", "device", *ITEM_SIZE_BYTES, *STORAGE_DTYPE}),
    "torch._tensor": frozenset({"Tensor", "_rebuild_from_type_v2"}),
    "torch._utils": frozenset(
        {"_rebuild_parameter", "_rebuild_parameter_with_state", "_rebuild_tensor_v2"}
        | {"_rebuild_tensor_v3", "_rebuild_wrapper_subclass"}
    ),
    "torch.distributed._mesh_layout": frozenset({"_FlatLayout", "_MeshLayout"}),
    "torch.distributed._shard.sharded_tensor.metadata": frozenset(
        {"MEM_FORMAT_ENCODING", "TensorProperties"}
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch.distributed.checkpoint.metadata": frozenset(
        {"BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"}
        | {"MEM_FORMAT_ENCODING", "StorageMeta", "TensorProperties", "TensorStorageMetadata"}
        | {"_MEM_FORMAT_ENCODING"}
    ),
    "torch.distributed.device_mesh": frozenset({"DeviceMesh"}),
    "torch.distributed.tensor": frozenset({"DTensor"}),
    "torch.distributed.tensor._dtensor_spec": frozenset(
        {"DTensorSpec", "ShardOrderEntry", "TensorMeta"}
    ),
    "torch.distributed.tensor.placement_types": frozenset(
        {"Partial", "Replicate", "Shard", "_StridedShard"}
    ),
    "torch.nn.parameter": frozenset({"Buffer", "Parameter"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch.storage": frozenset({"TypedStorage", "UntypedStorage"}),
    "torch.torch_version": frozenset({"TorchVersion"}),
}


class Refused(UserError):  # noqa: N818 - it names what happened, as verdicts do
    """The file asks for something that a checkpoint has no need of; nothing of it was executed."""


class Foreign(Refused):
    """The pickle is whole, and asks for a global that is not on the allow-list."""


class Pairs(list[tuple[Any, Any]]):
    """A dictionary as the pickle wrote it: later pairs win, keys are not hashed."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Symbol:
    """The name of a global on the allow-list, never the thing itself."""

    module: str
    name: str


@dataclass(slots=True, eq=False)
class Made:
    """What a call of `what(*args)` would have made; `state` is what would have been set on it,
    `items` what would have been appended, added, or set by key (then as pairs).
    """

    what: Symbol
    args: tuple[Any, ...]
    state: Any = None
    items: list[Any] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """A reference out of the pickle: in torch.save files, to a storage."""

    identifier: Any


def load(data: bytes, where: str) -> Any:
    """The content of a pickle as plain values, `Pairs`, `Symbol`, `Made` and `Persistent`.

    Sets arrive as lists. `where` names the file in errors. Raises Refused (a UserError) for an
    unknown opcode, a damaged pickle, or one beyond the limits; Foreign, which is one of them, for a
    global off the allow-list.
    """
    return load_next(data, 0, where)[0]


def load_next(data: bytes, position: int, where: str) -> tuple[Any, int]:
    """As `load`, of the pickle that begins at `position`; and the position after its end."""
    if len(data) > MAX_SIZE_BYTES:
        raise Refused(f"a pickle of {len(data)} bytes is over the limit of {MAX_SIZE_BYTES}")
    collecting = gc.isenabled()
    gc.disable()  # nothing is freed while reading, so looking for garbage doubles the time
    machine = _Machine(data, position)
    try:
        return machine.run(), machine.position
    except Refused as refusal:
        raise type(refusal)(refusal.what, where=where, hint=refusal.hint) from None
    except (ArithmeticError, LookupError, TypeError, ValueError, struct.error) as error:
        raise Refused(f"a damaged pickle: {error}", where=where) from error
    finally:
        if collecting:
            gc.enable()


class _Machine:
    """The pickle machine: a stack, marks into older stacks, a memo, and a position in `data`."""

    __slots__ = ("data", "marks", "memo", "position", "stack")

    def __init__(self, data: bytes, position: int = 0) -> None:
        self.data = data
        self.position = position
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, steps = self.data, _STEPS
        for _ in range(MAX_OPCODES):
            opcode = data[self.position]
            self.position += 1
            if opcode == _STOP:
                return self.stack.pop()
            steps[opcode](self)
        raise Refused(f"the pickle has more than {MAX_OPCODES} opcodes")

    def take(self, size: int) -> bytes:
        """The next `size` bytes; never more memory than the input holds."""
        end = self.position + size
        if end > len(self.data):
            raise Refused("a damaged pickle: it ends in the middle of a value")
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def number(self, size: int, *, signed: bool = False) -> int:
        """The next little-endian integer of `size` bytes."""
        return int.from_bytes(self.take(size), "little", signed=signed)

    def line(self) -> str:
        """The next text up to a newline."""
        end = self.data.index(b"\n", self.position)
        text = self.data[self.position : end].decode()
        self.position = end + 1
        return text

    def since_mark(self) -> list[Any]:
        """What was pushed since the last mark, which is removed."""
        pushed = self.stack
        self.stack = self.marks.pop()
        return pushed


_Step = Callable[[_Machine], None]
_STOP = ord(".")


def _unsupported(machine: _Machine) -> None:
    opcode = machine.data[machine.position - 1 : machine.position]
    raise Refused(f"the pickle uses opcode {opcode!r}, which is not supported")


def _mark(machine: _Machine) -> None:
    machine.marks.append(machine.stack)
    machine.stack = []


def _pop_mark(machine: _Machine) -> None:
    machine.since_mark()


def _pop(machine: _Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.since_mark()


def _dup(machine: _Machine) -> None:
    machine.stack.append(machine.stack[-1])


def _nothing(size: int) -> _Step:
    def step(machine: _Machine) -> None:
        machine.take(size)

    return step


def _constant(value: Any) -> _Step:
    def step(machine: _Machine) -> None:
        machine.stack.append(value)

    return step


def _empty(kind: Callable[[], Any]) -> _Step:
    def step(machine: _Machine) -> None:
        machine.stack.append(kind())

    return step


def _integer(size: int, *, signed: bool = False) -> _Step:
    def step(machine: _Machine) -> None:
        machine.stack.append(machine.number(size, signed=signed))

    return step


def _long(length_size: int) -> _Step:
    def step(machine: _Machine) -> None:
        machine.stack.append(machine.number(machine.number(length_size), signed=True))

    return step


def _float(machine: _Machine) -> None:
    machine.stack.append(struct.unpack(">d", machine.take(8))[0])


def _text(length_size: int) -> _Step:
    def step(machine: _Machine) -> None:
        machine.stack.append(machine.take(machine.number(length_size)).decode())

    return step


def _bytes(length_size: int) -> _Step:
    def step(machine: _Machine) -> None:
        machine.stack.append(machine.take(machine.number(length_size)))

    return step


def _tuple_of(count: int) -> _Step:
    def step(machine: _Machine) -> None:
        stack = machine.stack
        if len(stack) < count:
            raise IndexError("too little on the stack")
        stack[-count:] = [tuple(stack[-count:])]

    return step


def _tuple(machine: _Machine) -> None:
    pushed = machine.since_mark()
    machine.stack.append(tuple(pushed))


def _list(machine: _Machine) -> None:
    pushed = machine.since_mark()
    machine.stack.append(pushed)


def _frozenset(machine: _Machine) -> None:
    _list(machine)


def _dict(machine: _Machine) -> None:
    pushed = machine.since_mark()
    machine.stack.append(Pairs(_in_pairs(pushed)))


def _in_pairs(flat: list[Any]) -> list[tuple[Any, Any]]:
    if len(flat) % 2:
        raise ValueError("a key without a value")
    return list(zip(flat[::2], flat[1::2], strict=True))


def _append(machine: _Machine) -> None:
    value = machine.stack.pop()
    _extend(machine.stack[-1], [value])


def _appends(machine: _Machine) -> None:
    pushed = machine.since_mark()
    _extend(machine.stack[-1], pushed)


def _set_item(machine: _Machine) -> None:
    value = machine.stack.pop()
    key = machine.stack.pop()
    _extend(machine.stack[-1], [(key, value)], pairs=True)


def _set_items(machine: _Machine) -> None:
    pushed = machine.since_mark()
    _extend(machine.stack[-1], _in_pairs(pushed), pairs=True)


def _extend(container: Any, items: list[Any], *, pairs: bool = False) -> None:
    if isinstance(container, Made):
        if container.items is None:
            container.items = Pairs() if pairs else []
        container = container.items
    if not isinstance(container, list) or isinstance(container, Pairs) is not pairs:
        raise TypeError("items for something that holds none")
    container.extend(items)


def _global(machine: _Machine) -> None:
    module = machine.line()
    machine.stack.append(_symbol(module, machine.line()))


def _stack_global(machine: _Machine) -> None:
    name = machine.stack.pop()
    module = machine.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise TypeError("a global without a name")
    machine.stack.append(_symbol(module, name))


def _symbol(module: str, name: str) -> Symbol:
    if name not in ALLOWED.get(module, ()):
        raise Foreign(
            f"the pickle asks for the global {f'{module}.{name}'[:200]!r}, "
            "which is not on the allow-list; nothing was executed",
            hint="save plain values and tensors only, or treat the file as hostile",
        )
    return Symbol(module, name)


def _make(machine: _Machine) -> None:
    args = machine.stack.pop()
    _push_made(machine, machine.stack.pop(), args)


def _make_with_keywords(machine: _Machine) -> None:
    machine.stack.pop()
    _make(machine)


def _push_made(machine: _Machine, what: Any, args: Any) -> None:
    if not isinstance(what, Symbol) or not isinstance(args, tuple):
        raise Refused("the pickle calls something that is not a named global")
    machine.stack.append(Made(what, args))


def _build(machine: _Machine) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if not isinstance(target, Made):
        raise TypeError("state for something that has none")
    target.state = state


def _persistent(machine: _Machine) -> None:
    machine.stack.append(Persistent(machine.stack.pop()))


def _put(size: int) -> _Step:
    def step(machine: _Machine) -> None:
        machine.memo[machine.number(size)] = machine.stack[-1]

    return step


def _get(size: int) -> _Step:
    def step(machine: _Machine) -> None:
        machine.stack.append(machine.memo[machine.number(size)])

    return step


def _memoize(machine: _Machine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


# Protocols 2 to 5, without extensions, text numbers and out-of-band buffers: nothing that writes
# checkpoints uses those.
_OPCODES: dict[bytes, _Step] = {
    b"\x80": _nothing(1),  # PROTO
    b"\x95": _nothing(8),  # FRAME
    b"(": _mark,
    b"1": _pop_mark,
    b"0": _pop,
    b"2": _dup,
    b"N": _constant(None),
    b"\x88": _constant(True),
    b"\x89": _constant(False),
    b"K": _integer(1),
    b"M": _integer(2),
    b"J": _integer(4, signed=True),
    b"\x8a": _long(1),
    b"\x8b": _long(4),
    b"G": _float,
    b"\x8c": _text(1),
    b"X": _text(4),
    b"\x8d": _text(8),
    b"C": _bytes(1),
    b"B": _bytes(4),
    b"\x8e": _bytes(8),
    b"\x96": _bytes(8),  # BYTEARRAY8
    b")": _constant(()),
    b"\x85": _tuple_of(1),
    b"\x86": _tuple_of(2),
    b"\x87": _tuple_of(3),
    b"t": _tuple,
    b"]": _empty(list),
    b"\x8f": _empty(list),  # EMPTY_SET
    b"}": _empty(Pairs),
    b"l": _list,
    b"d": _dict,
    b"\x91": _frozenset,
    b"a": _append,
    b"e": _appends,
    b"\x90": _appends,  # ADDITEMS
    b"s": _set_item,
    b"u": _set_items,
    b"c": _global,
    b"\x93": _stack_global,
    b"R": _make,
    b"\x81": _make,  # NEWOBJ
    b"\x92": _make_with_keywords,
    b"b": _build,
    b"Q": _persistent,
    b"q": _put(1),
    b"r": _put(4),
    b"h": _get(1),
    b"j": _get(4),
    b"\x94": _memoize,
}
_STEPS = [_OPCODES.get(bytes([code]), _unsupported) for code in range(256)]


# --------------------------------------------------------------------------------------------------
# Picking known things out of the result


def is_made(value: Any, *names: str) -> bool:
    """True when `value` is a call of one of the globals `names` (without their module)."""
    return isinstance(value, Made) and value.what.name in names


def texts(pairs: Any, limit: int) -> dict[str, Any]:
    """The entries of `Pairs` whose key is a text, the last of each key.

    Raises Refused when `pairs` is no dictionary of at most `limit` entries.
    """
    if not isinstance(pairs, Pairs) or len(pairs) > limit:
        raise Refused(f"a damaged pickle: not a dictionary of at most {limit} entries")
    return {key: value for key, value in pairs if isinstance(key, str)}


def sizes(value: Any) -> tuple[int, ...]:
    """A torch.Size, or a plain tuple or list, of at most 16 integers from 0 to 2**62.

    Raises Refused for anything else.
    """
    if is_made(value, "Size") and len(value.args) == 1:
        value = value.args[0]
    if isinstance(value, (tuple, list)) and len(value) <= 16:
        return tuple(count(item) for item in value)
    raise Refused("a damaged pickle: a size was expected")


def count(value: Any) -> int:
    """An integer from 0 to 2**62, as counts, offsets and sizes are.

    Raises Refused for anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62:
        return value
    raise Refused("a damaged pickle: a count was expected")
