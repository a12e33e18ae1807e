"""A small made-up training run, as pure arithmetic: what its state is at every step, and which part
of it a rank of a topology holds.

Digests are sums over elements, as the observer's are: whatever the sharding, the parts add up to
the same tensor. Each sample has its own loss, so uneven shares change the mean of means by
themselves, as they do in a real job.
"""

import hashlib
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from ckptdrill.model import Topology

Entry = list[Any]  # [dtype, global shape, offsets, sizes, digest]
PARAMETERS = {"embed.weight": (6, 4), "mix.weight": (4, 4), "head.bias": (5,)}
BUFFERS = {"positions": (3,)}
STEPS_PER_EPOCH = 6
_AXES = {"ddp": "dp_replicate", "fsdp": "dp_shard", "tp": "tp", "cp": "cp"}


def topology(short: str) -> Topology:
    """`fsdp2tp2` or `ddp1` to the topology of that name."""
    degrees = {_AXES[axis]: int(n) for axis, n in re.findall(r"([a-z]+)(\d+)", short)}
    return Topology(short, **degrees)


@dataclass(frozen=True)
class Layout:
    """Where a rank stands: ranks count through tensor parallelism first, replicas last."""

    topology: Topology
    rank: int

    @property
    def tp(self) -> int:
        return self.rank % self.topology.tp

    @property
    def shard(self) -> int:
        return self.rank // (self.topology.tp * self.topology.cp) % self.topology.dp_shard

    @property
    def dp(self) -> int:
        return self.rank // (self.topology.tp * self.topology.cp)

    def part(self, shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """Offsets and sizes of this rank's part: rows over shards, columns over tp."""
        cuts = [_chunk(shape[0], self.topology.dp_shard, self.shard)]
        cuts += [_chunk(size, self.topology.tp, self.tp) for size in shape[1:]]
        return [begin for begin, _ in cuts], [size for _, size in cuts]


def _chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """`torch.chunk`: equal shares, rounded up; the last ones may be short or empty."""
    share = -(-size // parts)
    begin = min(index * share, size)
    return begin, min(share, size - begin)


@cache
def words(*about: object) -> tuple[int, int]:
    """Two 64-bit words that depend on nothing but `about`."""
    digest = hashlib.blake2b(repr(about).encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8]), int.from_bytes(digest[8:])


def hex_digest(*about: object) -> str:
    return "".join(f"{word:016x}" for word in words(*about))


def entry(content: object, shape: tuple[int, ...], layout: Layout) -> Entry:
    """The part of one tensor that a rank holds; `content` says which values are in it."""
    offsets, sizes = layout.part(shape)
    places = itertools.product(*(range(o, o + s) for o, s in zip(offsets, sizes, strict=True)))
    return ["float32", list(shape), offsets, sizes, _total(words(content, p) for p in places)]


def projection(content: object, shape: tuple[int, ...], layout: Layout) -> list[float]:
    """Two linear sums over the same part, as `first updates` needs them."""
    offsets, sizes = layout.part(shape)
    places = itertools.product(*(range(o, o + s) for o, s in zip(offsets, sizes, strict=True)))
    pairs = [(words(content, place)[0] / 2**64, words(place)[0] / 2**64) for place in places]
    return [sum(value for value, _ in pairs), sum(value * key for value, key in pairs)]


def _total(pairs: Iterable[tuple[int, int]]) -> str:
    high = low = 0
    for first, second in pairs:
        high, low = (high + first) % 2**64, (low + second) % 2**64
    return f"{high:016x}{low:016x}"


@dataclass(frozen=True)
class Training:
    """One job. `shares` is how a global batch is cut: `even`, `dropping` what does not divide, or
    `uneven`.
    """

    global_batch: int = 8
    shares: str = "even"
    epochs: bool = True  # False: every sample is new, the job never comes round
    loss_factor: float = 1.0  # what another order of sums does to the loss
    gradient_factor: float = 1.0  # what a sum in place of a mean does to the gradients
    draws: bool = True  # False: nothing random in the job

    # ------------------------------------------------------------ state after `step` steps

    def state(self, step: int, layout: Layout) -> dict[str, Any]:
        moments = {
            f"{name}.{key}": entry((name, key, step), shape, layout)
            for name, shape in PARAMETERS.items()
            for key in ("exp_avg", "exp_avg_sq")
            if step
        }
        whole = Layout(topology("ddp1"), 0)  # buffers are not sharded
        counts = {f"{name}.step": float(step) for name in PARAMETERS if step}
        return {
            "weights": {n: entry((n, step), s, layout) for n, s in PARAMETERS.items()},
            "buffers": {n: entry(n, s, whole) for n, s in BUFFERS.items()},
            "optimizer": {**moments, **counts},
            "groups": [[self._group(step, list(PARAMETERS))]],
            "schedulers": [
                {
                    "class": "LambdaLR",
                    "drives": 0,
                    "state": {"last_epoch": step, "_last_lr": [lr(step + 1)]},
                }
            ],
            "scalers": [{"scale": 65536.0 * 2 ** (step // 4), "_growth_tracker": step}],
            "projections": {n: projection((n, step), s, layout) for n, s in PARAMETERS.items()},
        }

    def gradients(self, step: int, layout: Layout) -> dict[str, Any]:
        """What the optimizer is handed in the step that completes `step`: eight projections of each
        parameter's gradient and, as what adds up over shards, a ninth number for its size. It is
        that of the mean over ranks of what their own samples ask for.
        """
        topology = layout.topology
        ranks = [Layout(topology, n * topology.tp * topology.cp) for n in range(topology.dp)]
        factor = self.gradient_factor * sum(self.losses(step, each)[0] for each in ranks)
        factor /= self.loss_factor * topology.dp
        found = {}
        for name, shape in PARAMETERS.items():
            sums = projection((name, "gradient", step), shape, layout)
            numbers = [*(factor * value for value in sums * 4), factor * factor * sums[0]]
            place = entry((name, "gradient", step, factor), shape, layout)
            found[name] = {"entry": place, "projection": numbers}
        return found

    def leaves(self, step: int, layout: Layout) -> dict[str, Any]:
        """What the job itself saves: its weights, and numbers that only it knows."""
        tensors = {
            f"model.{name}": {
                "entry": entry((name, step), shape, layout),
                "projection": projection((name, step), shape, layout),
            }
            for name, shape in PARAMETERS.items()
        }
        return {**tensors, "trainer.step": step, "trainer.cursor": step * self.global_batch}

    def _group(self, step: int, members: list[str]) -> dict[str, Any]:
        hyper = {"lr": lr(step + 1), "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
        return {"members": members, "hyper": hyper}

    def rng(self, step: int, layout: Layout) -> dict[str, str]:
        moved = step if self.draws else 0
        return {
            "python": hex_digest("python", layout.rank),
            "torch": hex_digest("torch", layout.rank, moved),
        }

    # ------------------------------------------------------------ the step that leads to `step`

    def rows(self, step: int, layout: Layout) -> list[str]:
        """The samples this rank consumes, as 16 hex digits each."""
        epoch, position = divmod(step - 1, STEPS_PER_EPOCH)
        if not self.epochs:
            epoch, position = 0, step - 1
        size = self.global_batch
        order = [(position * size + i) * 5 + epoch * 7 for i in range(size)]
        samples = [n % (size * STEPS_PER_EPOCH) if self.epochs else n for n in order]
        return [f"{words('sample', s)[0]:016x}" for s in samples[self._share(layout)]]

    def _share(self, layout: Layout) -> slice:
        dp = layout.topology.dp
        size = -(-self.global_batch // dp) if self.shares == "uneven" else self.global_batch // dp
        return slice(layout.dp * size, (layout.dp + 1) * size)

    def losses(self, step: int, layout: Layout) -> list[float]:
        rows = self.rows(step, layout)
        each = [5.0 - 0.02 * step + int(row[:4], 16) / 2**18 for row in rows]
        return [self.loss_factor * sum(each) / len(each)]

    def counters(self, step: int, local_step: int) -> dict[str, int]:
        """What the loop counts while it makes `step`; `batch_index` counts in this process only."""
        epoch = (step - 1) // STEPS_PER_EPOCH if self.epochs else 0
        return {
            "main.state[step]": step - 1,
            "main.state[epoch]": epoch,
            "main.batch_index": local_step - 1,
            "main.micro_step": 0,
        }


def lr(step: int) -> float:
    """The LR with which `step` is made: a warm-up of four steps, then a slow decay."""
    return 0.003 * min(step / 4, 1.0) * 0.999 ** max(step - 4, 0)
