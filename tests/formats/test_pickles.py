"""The pickle reader: it understands what checkpoints hold, executes nothing, and ends.

Python's own pickler writes the good cases. Bombs are also read in a process of their own, held to
512 MiB and to 2 s of processor time.
"""

import argparse
import collections
import contextlib
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptdrill.errors import UserError
from ckptdrill.formats import pickles

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.lists(inner).map(tuple),
    max_leaves=20,
)


@given(PLAIN, st.sampled_from([2, 3, 4, 5]))
def test_plain_values_come_back_in_every_protocol(value: object, protocol: int) -> None:
    if protocol == 2 and "bytes" in repr([type(v) for v in _leaves(value)]):
        protocol = 3  # protocol 2 writes bytes as a call
    assert pickles.load(pickle.dumps(value, protocol), "here") == value


def _leaves(value: object) -> list[object]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def test_a_dictionary_stays_a_list_of_pairs_and_the_last_one_wins() -> None:
    loaded = pickles.load(b"}(X\x01\0\0\0aK\x01X\x01\0\0\0aK\x02u.", "here")
    assert loaded == pickles.Pairs([("a", 1), ("a", 2)])
    assert pickles.texts(loaded, 2) == {"a": 2}
    with pytest.raises(UserError, match="at most 1"):
        pickles.texts(loaded, 1)


def test_an_allowed_call_is_remembered_not_made() -> None:
    ordered = collections.OrderedDict(a=1)
    made = pickles.load(pickle.dumps([ordered, argparse.Namespace(lr=0.5)]), "here")
    assert made[0].what == pickles.Symbol("collections", "OrderedDict")
    assert made[0].items == [("a", 1)]
    assert pickles.texts(made[1].state, 9) == {"lr": 0.5}


class _Writes:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.path),))


def test_a_global_off_the_list_is_refused_by_name_and_not_called(tmp_path: Path) -> None:
    data = pickle.dumps(_Writes(tmp_path / "proof"))
    with pytest.raises(pickles.Refused, match=r"posix\.mkdir.*nothing was executed"):
        pickles.load(data, "here")
    assert not (tmp_path / "proof").exists()
    pickle.loads(data)  # noqa: S301 - the twin: the pickle really does what was refused
    assert (tmp_path / "proof").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"cbuiltins\neval\n.",
        b"ctorch.storage\n_load_from_bytes\n.",
        b"X\x05\0\0\0torchX\x04\0\0\0load\x93.",
        b"ctorch\nserialization.os.system\n.",
        b"(S'true'\nios\nsystem\n.",
        b"\x82\x01.",
        b"K\x01)R.",
        b"]]\x93.",
    ],
)
def test_other_ways_to_call_something_are_refused(data: bytes) -> None:
    with pytest.raises(pickles.Refused):
        pickles.load(data, "here")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"K",
        b"X\xff\xff\xff\xffa.",
        b"h\x07.",
        b"t.",
        b"e.",
        b"K\x01K\x02a.",
        b"](K\x01u.",
        b"X\x01\x00\x00\x00\xff.",
        b"\x8e" + b"\xff" * 8,
        b"ctorch",
        b"\x85.",
        b"}K\x01a.",
        b"]NNs.",
    ],
)
def test_a_damaged_pickle_is_refused_with_its_place(data: bytes) -> None:
    with pytest.raises(pickles.Refused) as caught:
        pickles.load(data, "step-4/.metadata")
    assert caught.value.where == "step-4/.metadata"


@given(st.binary(max_size=200))
def test_any_bytes_give_a_value_or_a_refusal(data: bytes) -> None:
    with contextlib.suppress(UserError):
        pickles.load(data, "here")


def test_sizes_and_counts_hold_their_bounds() -> None:
    assert pickles.sizes((2, 0)) == (2, 0)
    for bad in (-1, True, 1 << 62, 1.0, None, "1"):
        with pytest.raises(pickles.Refused):
            pickles.sizes((bad,))
    with pytest.raises(pickles.Refused):
        pickles.sizes((1,) * 17)


LARGE = (pickles.MAX_SIZE_BYTES - 16) // 16 * 16
BOMBS = {
    "empty dictionaries": b"}" * LARGE,
    "memoised dictionaries": b"}\x94" * (LARGE // 2),
    "marks": b"(" * LARGE,
    "nested lists": b"]" + b"\x85" * (LARGE - 2) + b".",
    "calls": b"ctorch\nSize\n" + b"q\0" + b"h\0)R" * (LARGE // 4 - 8),
    "wide text": b"X"
    + (LARGE // 2).to_bytes(4, "little")
    + b"a" * (LARGE // 2 - 4)
    + b"\xf0\x9f\x98\x80",
    "long number": b"\x8b" + (LARGE - 8).to_bytes(4, "little") + b"\x7f" * (LARGE - 8) + b".",
    "doubling": b"(K\x01t" + b"2\x86" * 2_000_000 + b".",
    "memo at the end of the numbers": b"]r\xff\xff\xff\xff" * 100 + b".",
    "colliding numbers": b"}("
    + b"".join(
        b"\x8a\x0c" + (number * ((1 << 61) - 1)).to_bytes(12, "little") + b"N"
        for number in range(400_000)
    )
    + b"u.",
}
READ = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
from ckptdrill.errors import UserError
from ckptdrill.formats import dcp, torch_save
from pathlib import Path
try:
    getattr(sys.modules["ckptdrill.formats." + sys.argv[1]], "read")(Path(sys.argv[2]))
except UserError as error:
    print("refused:", error.what)
"""


def read_within_limits(form: str, path: Path, repository: Path) -> str:
    """What a reader says in a process of 512 MiB; fails over 2 s of processor time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", READ, form, str(path)],
        cwd=repository, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr[-2000:]
    assert after.ru_utime - before.ru_utime < 2.0
    return done.stdout


@pytest.mark.e2e
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_within_the_limits(name: str, tmp_path: Path, repository: Path) -> None:
    (tmp_path / ".metadata").write_bytes(BOMBS[name])
    assert "refused:" in read_within_limits("dcp", tmp_path, repository)


def test_an_endless_pickle_is_refused_by_its_count_and_by_its_size() -> None:
    with pytest.raises(pickles.Refused, match="opcodes"):
        pickles.load(b"N0" * (pickles.MAX_OPCODES // 2 + 1), "here")
    with pytest.raises(pickles.Refused, match="over the limit"):
        pickles.load(b"N" * (pickles.MAX_SIZE_BYTES + 1), "here")
