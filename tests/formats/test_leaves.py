"""Leaves: what is shown, what cannot reach a terminal, and that bombs of references end."""

import collections
import pickle
import random
import time

from ckptdrill.formats import leaves, pickles


def below(content: object) -> dict[str, leaves.Leaf]:
    return leaves.below(pickles.load(pickle.dumps(content), "here"))


def test_values_are_leaves_by_dotted_key_and_plain_lists_are_one() -> None:
    found = below({"step": 4, "optimizer": {"param_groups": [{"lr": 0.5, "params": [0, 1]}]}})
    assert found["step"].value == 4
    assert found["optimizer.param_groups.0.lr"].value == 0.5
    assert found["optimizer.param_groups.0.params"].text == "[0, 1]"


def test_a_long_value_is_cut_and_its_digest_is_not() -> None:
    state = random.Random(0).getstate()
    one, two = below({"rng": state}), below({"rng": random.Random(1).getstate()})
    assert len(one["rng.1"].text) <= 100
    assert one["rng.1"].digest != two["rng.1"].digest
    assert one == below({"rng": state})


def test_nothing_that_a_terminal_would_act_on_is_shown() -> None:
    found = below({"name": "\x1b[2Jgone\u202e", "huge": 1 << 100_000, "raw": b"\x1b" * 9})
    assert found["name"].text == "\\x1b[2Jgone\\u202e"
    assert found["huge"].text == "an integer of 100001 bits"
    assert found["raw"].text == "9 bytes"


def test_known_containers_are_opened_and_calls_are_only_shown() -> None:
    found = below({"c": collections.OrderedDict(a=1), "deque": collections.deque([1, 2], 5)})
    assert found["c.a"].value == 1
    assert found["deque"].text.startswith("deque(")


def test_references_without_end_are_given_up_in_time() -> None:
    started = time.process_time()
    itself = b"]q\0" + b"(" + b"h\0" * 100_000 + b"e."
    leaves.below(pickles.load(itself, "here"))
    calls = (
        b"](" + b"K\x01" * 200_000 + b"eq\0" + b"](" + b"ctorch\nSize\nh\0\x85R" * 50_000 + b"e."
    )
    leaves.below(pickles.load(calls, "here"))
    assert time.process_time() - started < 20  # unbounded, they would take hours
