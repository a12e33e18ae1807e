"""How a launch ended, read from its facts and its exit record. Exit codes alone prove nothing.

The earliest failing rank is the cause; the others often only report that a peer closed the
connection. A launch whose ranks have all made the last wanted step and its saves has ended well,
whatever its teardown did: what came after is a note.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from ckptdrill.model import Fact, LaunchRecord

_LOADING = re.compile(r", in (_?load\w*|_?restore\w*|_?resume\w*)\n")
_SAVING = re.compile(r", in (_?save\w*|_?async_save\w*|_?checkpoint\w*|_?dump\w*)\n")
# What a typing error in the script raises: no word of the stack about the checkpoint.
_MISTAKES = frozenset(
    {
        "NameError",
        "UnboundLocalError",
        "ImportError",
        "ModuleNotFoundError",
        "SyntaxError",
        "IndentationError",
    }
)
_TELLING = re.compile(r"unsupported|error:|missing|unexpected|mismatch", re.IGNORECASE)


# What a rank reports whose peer has died: a consequence, never the cause.
_PEER_GONE = re.compile(r"(closed|reset) by peer|remote worker|Broken pipe", re.IGNORECASE)


class End(StrEnum):
    """The ways a launch can end."""

    TRAINED = "trained"  # every rank reached the wanted step, or the program its end
    REFUSED = "refused"  # an exception out of a load call, before the first step
    CRASHED = "crashed"
    HUNG_IN_RESTORE = "hung in restore"
    TIMED_OUT = "timed out"
    DIED = "died"  # no exception was recorded: a signal, an exit, or nothing started


@dataclass(frozen=True)
class Ending:
    """How, in one sentence, and the facts that say so."""

    how: End
    text: str
    rank: int | None = None
    facts: tuple[str, ...] = ()
    remedy: str = ""  # what to do about this very ending, where it is known
    note: str = ""  # what happened when all was trained


def ending(record: LaunchRecord) -> Ending:
    """The ending of a launch that has an exit record."""
    return record.derived.once("ending", lambda: _ending(record))


def _ending(record: LaunchRecord) -> Ending:
    if record.ended is None:
        return Ending(End.DIED, "the launch left no exit record")
    finished = {f.rank for f in record.of("stopped")} | {
        f.rank for f in record.of("exited") if f.data.get("code") == 0
    }
    if len(finished) == record.world_size:
        return Ending(End.TRAINED, "every rank finished", note=_stood(record))
    last = _last_step(record)
    if last is not None and _has_trained(record, last, finished):
        note = _afterwards(record, finished)
        return Ending(End.TRAINED, f"every rank made step {last} and its saves", note=note)
    failure = _first_failure(record)
    if failure is not None:
        return failure
    if record.ended.get("timed_out"):
        return _timed_out(record)
    return _died(record, finished)


def _last_step(record: LaunchRecord) -> int | None:
    """The last wanted step, in steps of the process; None where it was not recorded, and for
    launches that are interrupted.
    """
    later = {fact.rank: fact.data["last_step"] for fact in record.of("until")}
    told = {fact.rank: fact.data.get("last_step") for fact in record.of("started")} | later
    steps = [step for step in told.values() if step is not None]
    return min(steps) if steps and len(steps) == len(told) else None


def _has_trained(record: LaunchRecord, last: int, finished: set[int]) -> bool:
    """Whether every rank has made its last step, and all that it saved is on storage."""
    ranks = range(record.world_size)
    stepped = {f.rank for f in record.of("stepped") if f.step >= last} | finished
    if not stepped >= set(ranks) or any(_is_saving(record, rank, last) for rank in ranks):
        return False
    return not any(_SAVING.search(f.data.get("traceback", "")) for f in record.of("crashed"))


def _is_saving(record: LaunchRecord, rank: int, last: int) -> bool:
    """Whether a save of the last step, or one that goes on beside the loop, has not come to its
    good end.
    """
    begun, ended = record.of("save_begin", rank), record.of("save_end", rank)
    beside = sum(fact.data["call"] == "async_save" for fact in begun)
    uploaded = [f for f in record.of("uploaded", rank) if not f.data.get("error")]
    return len(uploaded) < beside or any(
        not any(e.line > b.line and e.data["call"] == b.data["call"] for e in ended)
        for b in begun
        if b.step >= last
    )


def _afterwards(record: LaunchRecord, finished: set[int]) -> str:
    """How a launch ended that had trained, in words."""
    crashes = sorted(record.of("crashed"), key=record.t)
    if crashes:
        return f"after its last step rank {crashes[0].rank} raised {cause(crashes[0])}"
    left = sorted(set(range(record.world_size)) - finished)
    if (record.ended or {}).get("timed_out"):
        return f"after their last step ranks {left} never ended; the time limit did it"
    return f"after their last step: {_died(record, finished).text}"


def _stood(record: LaunchRecord) -> str:
    """Which rank was still waiting at its end when the program of another was over, and where. A
    rank that waits for one that the drill holds is no matter.
    """
    if not record.of("exited"):
        return ""
    waiting = [f for f in record.of("stopped") if f.data.get("waiting")]
    return "; ".join(
        f"after its last step rank {f.rank} stood in {f.data['waiting']['function']} "
        f"({f.data['waiting']['module']}) while the programs of others had ended"
        for f in waiting[:1]
    )


def _first_failure(record: LaunchRecord) -> Ending | None:
    crashes = sorted(record.of("crashed"), key=record.t)
    if not crashes:
        return None
    crash = crashes[0]
    refusal = _refusal_behind(record, crash)
    if refusal is None and _PEER_GONE.search(cause(crash)) and _killed(record):
        return _died(record, set())
    vanished = _vanished(record)
    if refusal is None and vanished and _PEER_GONE.search(cause(crash)):
        return Ending(
            End.DIED,
            f"rank {vanished[0]} died without an exception; rank {crash.rank} then lost its "
            "connection to it",
            vanished[0],
            (record.ref(crash),),
        )
    definite = refusal is not None or _raised_by_a_load(crash)
    how = End.REFUSED if definite and crash.step == 0 else End.CRASHED
    fact = refusal or crash
    name = fact.data.get("call") or (_loading(crash) if how is End.REFUSED else None)
    call = f" in {name}" if name else ""
    return Ending(
        how,
        f"rank {crash.rank}{call}: {cause(fact)}",
        crash.rank,
        record.refs(f for f in (refusal, crash) if f),
    )


def _raised_by_a_load(crash: Fact) -> bool:
    """The exception came out of a function that loads, by its name, and is no plain mistake."""
    kind = crash.data["error"][-1]["type"]
    return _loading(crash) is not None and kind.removeprefix("builtins.") not in _MISTAKES


def _loading(crash: Fact) -> str | None:
    """The innermost function of the traceback that loads, by its name."""
    names = [match[1] for match in _LOADING.finditer(crash.data.get("traceback", ""))]
    return names[-1] if names else None


def _killed(record: LaunchRecord) -> tuple[int, str] | None:
    """The rank that the launcher saw ended by a signal first, and the name of that signal."""
    failure = (record.ended or {}).get("first_failure") or {}
    name = failure.get("signal")
    return (int(failure["local_rank"]), str(name)) if name else None


def _vanished(record: LaunchRecord) -> list[int]:
    """The ranks that started and left no word of how they ended, the first to fall silent first."""
    ended = {f.rank for kind in ("crashed", "exited", "stopped") for f in record.of(kind)}
    last = {f.rank: record.t(f) for f in record.facts if f.rank not in ended}
    return sorted(last, key=lambda rank: last[rank])


def _refusal_behind(record: LaunchRecord, crash: Fact) -> Fact | None:
    """The load refusal that the crashing rank died of, or else the earliest of another rank.

    A refusal that the job caught and lived on with is not what a later crash is about.
    """
    loading = (f for f in record.of("refused") if f.data.get("during") == "load")
    refusals = [f for f in loading if record.t(f) <= record.t(crash)]
    said = {(link["type"], link["message"]) for link in crash.data["error"]}
    own = [f for f in refusals if f.rank == crash.rank]
    died_of = [f for f in own if any((e["type"], e["message"]) in said for e in f.data["error"])]
    if own:
        return died_of[-1] if died_of else None
    return min(refusals, key=record.t, default=None)


def cause(fact: Fact) -> str:
    """The innermost exception of a chain, which says what happened, with its type."""
    links = fact.data["error"]
    with_rank = [link for link in links if "failed_rank" in link]
    link = with_rank[0] if with_rank else links[-1]
    name = link["type"].removeprefix("builtins.")
    lines = [line.strip() for line in link["message"].strip().splitlines() if line.strip()]
    telling = [line for line in lines[1:] if _TELLING.search(line)]
    said = " … ".join([*lines[:1], *telling[:1]])
    return f"{name}: {said[:400]}" if said else name


def _timed_out(record: LaunchRecord) -> Ending:
    compiling = _compiling(record)
    if compiling is not None:
        return compiling
    loading = [
        f
        for f in record.of("load_begin")
        if not any(g.rank == f.rank and record.t(g) >= record.t(f) for g in record.of("load_end"))
    ]
    if loading:
        ranks = sorted({f.rank for f in loading})
        return Ending(
            End.HUNG_IN_RESTORE,
            f"ranks {ranks} never came back from {loading[0].data['call']}",
            ranks[0],
            record.refs(loading),
        )
    if record.of("load_end") and not record.of("stepped"):
        return Ending(
            End.HUNG_IN_RESTORE, "the checkpoint was read, and no rank came to its first step"
        )
    steps = dict(record.last_steps)
    return Ending(
        End.TIMED_OUT, f"the time limit ended it; steps completed by rank: {steps or 'none'}"
    )


def _compiling(record: LaunchRecord) -> Ending | None:
    """The time limit came while an extension of torch was compiled, or while ranks waited for a
    build that no rank of this launch makes: what was killed before it left its lock behind.
    """
    last = {(f.rank, f.data["lock"]): f for f in record.of("extension")}
    builds = [f for f in last.values() if f.data["does"] == "builds"]
    waits = [f for f in last.values() if f.data["does"] == "waits"]
    for fact in sorted(builds, key=record.t):
        text = (
            f"the time limit came while rank {fact.rank} compiled the torch extension "
            f"{_extension(fact)}, which is done once"
        )
        what = f"let it be compiled before, or raise job.timeout_s; or {_PREVENTION}"
        return Ending(End.TIMED_OUT, text, fact.rank, (record.ref(fact),), what)
    if not waits:
        return None
    lock, name = waits[0].data["lock"], _extension(waits[0])
    ranks = sorted({f.rank for f in waits})
    text = (
        f"ranks {ranks} waited for another process to compile the torch extension {name}, and no "
        f"rank of this launch did: {lock} was left behind by a build that was killed"
    )
    what = f"remove {lock} if no other process compiles; or {_PREVENTION}"
    return Ending(End.TIMED_OUT, text, ranks[0], record.refs(waits), what)


_PREVENTION = (
    "give the job a TORCH_EXTENSIONS_DIR of its own (job.env), or do without the extension: in a "
    'DeepSpeed job `deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False` before '
    "deepspeed.init_distributed, and a client torch.optim optimizer"
)


def _extension(fact: Fact) -> str:
    """The name of an extension: that of the folder in which it is built."""
    return str(fact.data["lock"]).rsplit("/", 2)[-2]


def _died(record: LaunchRecord, finished: set[int]) -> Ending:
    ended = record.ended or {}
    killed = _killed(record)
    if killed:
        return Ending(End.DIED, f"rank {killed[0]} was ended by {killed[1]}", killed[0])
    codes = [f for f in record.of("exited") if f.data.get("code") != 0]
    if codes:
        return Ending(
            End.DIED,
            f"rank {codes[0].rank} exited with code {codes[0].data['code']}",
            codes[0].rank,
            (record.ref(codes[0]),),
        )
    if ended.get("error"):
        return Ending(End.DIED, str(ended["error"]))
    silent = sorted(set(range(record.world_size)) - finished)
    how = (
        f"signal {ended['signal']}"
        if ended.get("signal")
        else f"exit code {ended.get('returncode')}"
    )
    return Ending(
        End.DIED,
        f"ranks {silent} died without an exception (launcher: {how})",
        silent[0] if silent else None,
    )
