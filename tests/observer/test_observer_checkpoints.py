"""What the observer sees of saves, loads and the end of a launch, and that it changes nothing.

Each script is ordinary; several ranks are real processes over gloo.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.e2e

COMMON = """
    import json, os, sys, time
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    import torch.nn.functional as F
    from torch import nn

    RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    DATA = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    TARGET = torch.randn(64, 3, generator=torch.Generator().manual_seed(2))

    def build():
        layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3)
        return nn.Sequential(*layers)

    def batch(step):
        rows = slice(8 * step + RANK * 8 // WORLD, 8 * step + (RANK + 1) * 8 // WORLD)
        return DATA[rows], TARGET[rows]
"""

DDP = (
    COMMON
    + """
    from torch.nn.parallel import DistributedDataParallel
    model = build()
    net = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    step = 0
    while step < 6:
        x, y = batch(step)
        loss = F.mse_loss(net(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        step += 1
        if step % 2 == 0 and RANK == 0:
            torch.save({"model": model.state_dict(), "step": step}, f"ckpt-{step}.pt")
    torch.save([model.state_dict(), optimizer.state_dict(), torch.get_rng_state()], sys.argv[1]
               + f".{RANK}")
    """
)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_final_state_is_bitwise_that_of_an_unobserved_run(
    observe: Any, unobserved: Callable[..., None], tmp_path: Path, ranks: int
) -> None:
    unobserved(DDP, "plain", ranks=ranks)
    observed = observe(DDP, "observed", ranks=ranks, sample_steps=[0, 1, 2, 3, 4, 5])
    observed.is_whole(ranks)
    for rank in range(ranks):
        plain = (tmp_path / f"plain.{rank}", tmp_path / f"observed.{rank}")
        ours, theirs = (torch.load(path, weights_only=False) for path in plain)
        assert _leaves(ours) == _leaves(theirs)
        assert _leaves(ours)  # and there was something to compare


def _leaves(value: Any) -> list[Any]:
    """Every leaf of a nested state, tensors as dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        return [value.dtype, value.shape, value.numpy().tobytes()]
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in (key, *_leaves(item))]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def test_data_parallel_ranks_agree_on_names_and_share_the_batch(observe: Any) -> None:
    observed = observe(DDP, "out", ranks=2, sample_steps=[4], stop_step=5)
    observed.is_whole(2)
    assert observed.state(4, rank=0)["weights"] == observed.state(4, rank=1)["weights"]
    assert set(observed.state(4)["weights"]) == {f"{n}.{p}" for n in (0, 1, 3) for p in PARTS}
    assert observed.state(4)["buffers"].keys() == {f"1.{name}" for name in RUNNING}
    assert observed.facts("roots")[0]["wrappers"] == ["module"]
    rows = [
        row for rank in (0, 1) for each in observed.column("batch", "rows", rank) for row in each
    ]
    assert len(rows) == len(set(rows)) == 40
    assert [observed.column("stopped", "agreed", rank) for rank in (0, 1)] == [[True], [True]]
    assert observed.column("process_group", "backend") == ["gloo"]


PARTS = ("weight", "bias")
RUNNING = ("running_mean", "running_var", "num_batches_tracked")


def test_the_step_of_get_state_dict_is_not_a_training_step(observe: Any) -> None:
    text = (
        COMMON
        + """
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def state():
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    if sys.argv[1] == "resume":
        loaded = state()  # the optimizer is fresh: this steps it once with a rate of 0
        dcp.load(loaded, checkpoint_id="step-3")
        set_state_dict(model, optimizer, model_state_dict=loaded["model"],
                       optim_state_dict=loaded["optimizer"])
    for step in range(3):
        x, y = batch(step)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        dcp.save(state(), checkpoint_id=f"step-{step + 1}")
    """
    )
    first = observe(text, "begin", name="first", stop_step=3)
    first.is_whole()
    assert first.column("stepped", "step") == [1, 2, 3]
    paths = [Path(path).name for path in first.column("save_begin", "path")]
    assert list(zip(paths, first.column("save_begin", "step"), strict=True)) == [
        ("step-1", 1),
        ("step-2", 2),
        ("step-3", 3),
    ]
    resumed = observe(text, "resume", name="resumed", first_step=3, sample_steps=[0])
    resumed.is_whole()
    assert resumed.column("stepped", "step") == [1, 2, 3]
    (began,) = resumed.facts("load_begin")
    (ended,) = resumed.facts("load_end")
    assert (began["call"], Path(began["path"]).name, began["step"]) == ("load", "step-3", 0)
    assert began["t"] <= ended["t"]
    saved, restored = first.state(3, "save"), resumed.state(0)
    assert restored["weights"] == saved["weights"]
    assert restored["optimizer"] == saved["optimizer"]


def test_an_asynchronous_save_is_completed_before_a_launch_ends(
    observe: Any, tmp_path: Path
) -> None:
    text = (
        COMMON
        + """
    from torch.distributed.checkpoint import FileSystemWriter

    class Slow(FileSystemWriter):
        def write_data(self, *args):
            time.sleep(1.5)
            return super().write_data(*args)

    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(50):
        x, y = batch(step % 4)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if step == 1:
            dcp.async_save({"model": model.state_dict()}, storage_writer=Slow("saved"))
    """
    )
    observed = observe(text, stop_step=2)
    observed.is_whole()
    assert observed.column("stopped", "step") == [2]
    assert observed.column("save_begin", "call") == ["async_save"]
    assert (tmp_path / "saved" / ".metadata").exists()
    assert observed.column("uploaded", "error") == [None]
    assert max(observed.column("usage", "saves_in_flight")) == 1


def test_a_launch_ends_on_all_ranks_although_one_is_late(observe: Any) -> None:
    text = (
        COMMON
        + """
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(1000):
        x, y = batch(step % 4)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        if step == 2 and RANK == 1:
            time.sleep(1.0)
        optimizer.step()
    """
    )
    observed = observe(text, ranks=2, stop_step=3)
    observed.is_whole(2)
    for rank in (0, 1):
        assert observed.column("stopped", "step", rank) == [3]
        assert observed.column("stopped", "agreed", rank) == [True]
    ends = [observed.facts("stopped", rank)[0]["t"] for rank in (0, 1)]
    assert abs(ends[0] - ends[1]) < 1.0  # rank 0 has waited


def test_a_fallback_of_the_users_own_is_recorded_and_not_disturbed(observe: Any) -> None:
    text = (
        COMMON
        + """
    import pickle
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.save(model.state_dict(), "older.pt")
    with open("newest.pt", "wb") as stream:
        stream.write(b"PK torn")
    for path in ("missing.pt", "newest.pt", "older.pt"):
        try:
            model.load_state_dict(torch.load(path))
            break
        except FileNotFoundError as error:
            print("no", error.filename)
        except Exception as error:
            print("not", path)
    for step in range(3):
        x, y = batch(step)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    print("trained from", path)
    """
    )
    observed = observe(text)
    observed.is_whole()
    assert observed.out().split("\n")[:3] == [
        "no missing.pt",
        "not newest.pt",
        "trained from older.pt",
    ]
    refusals = observed.facts("refused")
    assert [Path(fact["path"]).name for fact in refusals] == ["missing.pt", "newest.pt"]
    assert {fact["during"] for fact in refusals} == {"load"}
    assert refusals[0]["error"][0]["type"] == "builtins.FileNotFoundError"
    assert [Path(path).name for path in observed.column("load_end", "path")] == ["older.pt"]
    assert len(observed.facts("stepped")) == 3


def test_the_cause_of_a_refusal_by_dcp_is_recorded_with_its_rank(observe: Any) -> None:
    text = (
        COMMON
        + """
    model = build()
    dcp.save({"model": model.state_dict()}, checkpoint_id="saved")
    wider = {"model": {**build().state_dict(), "extra.weight": torch.zeros(3)}}
    dcp.load(wider, checkpoint_id="saved")
    """
    )
    observed = observe(text)
    assert observed.ended["returncode"] == 1
    (refused,) = observed.facts("refused")
    assert (refused["during"], Path(refused["path"]).name) == ("load", "saved")
    causes = [link for link in refused["error"] if "failed_rank" in link]
    assert causes[0]["failed_rank"] == 0
    assert "extra.weight" in causes[0]["message"]
    (crashed,) = observed.facts("crashed")
    assert crashed["during"] == "load"
    assert observed.column("exited", "code") == [1]


def test_an_exception_that_cannot_be_described_still_reaches_the_job_unchanged(
    observe: Any,
) -> None:
    text = (
        COMMON
        + """
    class Awkward(Exception):
        failures = {0: ValueError("inner"), "zero": (KeyError("other"), None)}
        def __str__(self):
            raise RuntimeError("not even its text")

    class Stream:
        name = "made-up.pt"
        def read(self, *args):
            raise Awkward
        readline = seek = tell = read

    try:
        torch.load(Stream())
    except Awkward:
        print("caught my own")
    """
    )
    observed = observe(text)
    assert observed.ended["returncode"] == 0
    assert observed.out().splitlines() == ["caught my own"]
    assert not observed.facts("crashed")


def test_odd_leaves_of_a_checkpoint_never_disturb_the_save(observe: Any) -> None:
    text = (
        COMMON
        + """
    class Hostile:
        def __getattribute__(self, name):
            if name.startswith("__") and name != "__dict__":
                return object.__getattribute__(self, name)
            raise RuntimeError(name)

    loop = {"name": "loop"}
    loop["self"] = loop
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.save({"model": model.state_dict(), "set": {1, "a"}, "hostile": Hostile(),
                "loop": loop, "meta": torch.empty(3, device="meta"), 7: [1, "x", b"y"],
                "sparse": torch.eye(3).to_sparse(), "nan": float("nan")}, "odd.pt")
    print(len(torch.load("odd.pt", weights_only=False)))
    """
    )
    observed = observe(text)
    assert observed.ended["returncode"] == 0, observed.err()
    assert observed.out().splitlines() == ["8"]
    assert len(observed.facts("save_end")) == len(observed.facts("load_end")) == 1


def test_facts_are_whole_json_lines_whatever_the_job_prints(observe: Any) -> None:
    text = """
    import os, sys
    os.write(1, b"bytes \\xff\\xfe that are no text\\n")
    print("a" * 100_000)
    sys.stderr.write("no newline at the end")
    sys.exit("leaving with a message")
    """
    observed = observe(text)
    assert [fact["fact"] for fact in observed.facts()] == ["started", "imported", "exited"]
    assert observed.column("exited", "code") == [1]
    assert (observed.folder / "rank0.out").stat().st_size > 100_000
    assert observed.err().endswith("leaving with a message\n")
    assert json.loads((observed.folder / "exit.json").read_text())["returncode"] == 1
