"""How ranks leave together that cannot all come around: real processes, jobs without a barrier."""

import time
from pathlib import Path
from typing import Any

from ckptdrill.fact_files import read_folder
from ckptdrill.judge.ending import End, ending

PIPELINE = """
    import os, sys, time
    import torch, torch.distributed as dist
    from torch import nn
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    stages = [nn.Linear(4, 8), nn.Linear(8, 3)]
    net = stages[rank]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(1000):
        x, y = torch.ones(6, 4) * step / 1000, torch.zeros(6, 3)
        if rank:
            x = torch.empty(6, 8)
            WAIT
            x.requires_grad_()
        out = net(x)
        optimizer.zero_grad()
        if rank:
            (out - y).pow(2).mean().backward()
            dist.send(x.grad, 0)
        else:
            dist.send(out.detach(), 1)
            grad = torch.empty_like(out)
            dist.recv(grad, 1)
            out.backward(grad)
        optimizer.step()
        AFTER
"""


def pipeline(wait: str = "dist.recv(x, 0)", after: str = "pass") -> str:
    return PIPELINE.replace("WAIT", wait).replace("AFTER", after)


def how_it_ended(observed: Any, ranks: int = 2) -> Any:
    return ending(read_folder(observed.folder, "observed", ranks))


def test_a_stage_that_waits_for_a_peer_that_we_hold_leaves_with_it(observe: Any) -> None:
    observed = observe(pipeline(), ranks=2, stop_step=3, sample_steps=[3])
    observed.is_whole(2)
    assert [observed.column("stopped", "step", rank) for rank in (0, 1)] == [[3], [3]]
    assert observed.column("stopped", "waiting", 1) == [
        {"function": "recv", "module": "torch.distributed.distributed_c10d"}
    ]
    assert observed.column("stopped", "waiting", 0) == [None]
    stepped, stopped = observed.facts("stepped", 1)[-1], observed.facts("stopped", 1)[0]
    assert stopped["t"] - stepped["t"] < 4.0
    assert observed.state(3, rank=1)["weights"].keys() >= {"weight", "bias"}
    found = how_it_ended(observed)
    assert (found.how, found.note) == (End.TRAINED, "")


def test_a_wait_for_a_request_of_ones_own_is_one_too(observe: Any) -> None:
    observed = observe(pipeline("request = dist.irecv(x, 0); request.wait()"), ranks=2, stop_step=2)
    observed.is_whole(2)
    assert observed.column("stopped", "waiting", 1) == [{"function": "wait", "module": "__main__"}]


def test_a_rank_that_saves_late_is_not_made_to_leave_before(observe: Any, tmp_path: Path) -> None:
    """Rank 0 goes on at once, rank 2 is slow, and rank 1 waits for it before it saves."""
    text = """
        import time
        import torch, torch.distributed as dist
        from torch import nn
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        late = dist.new_group([1, 2])
        net = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for step in range(1000):
            net(torch.ones(2, 4)).mean().backward()
            optimizer.step()
            if step == 1 and rank:
                for _ in range(50 * (rank == 2)):
                    time.sleep(0.1)
                dist.barrier(late)
                torch.save(net.state_dict(), f"{rank}.pt")
    """
    observed = observe(text, ranks=3, stop_step=2)
    observed.is_whole(3)
    assert observed.column("stopped", "waiting", 1) == [None]
    assert len(observed.facts("save_end", 1)) == len(observed.facts("save_end", 2)) == 1
    assert (tmp_path / "1.pt").exists()


def test_a_rank_whose_peer_has_come_to_its_own_end_need_not_come_around(observe: Any) -> None:
    text = pipeline(after="if step == 2 and not rank: sys.exit(0)", wait="dist.recv(x, 0)")
    observed = observe(text, ranks=2, stop_step=3)
    assert observed.column("exited", "code", 0) == [0]
    found = how_it_ended(observed)
    assert found.how is End.TRAINED


def test_a_rank_that_hangs_at_its_end_is_a_note(observe: Any) -> None:
    text = pipeline(after="if step == 2: sys.exit(0) if rank else time.sleep(1000)")
    began = time.monotonic()
    observed = observe(text, ranks=2, stop_step=3, agree_timeout_s=6.0)
    assert time.monotonic() - began < 30.0
    found = how_it_ended(observed)
    assert found.how is End.TRAINED
    assert "rank 0 stood in sleep (__main__)" in found.note


def test_a_rank_that_hangs_before_the_last_step_is_not_excused(observe: Any) -> None:
    text = pipeline(after="if step == 1 and rank: time.sleep(1000)")
    observed = observe(text, ranks=2, stop_step=3, agree_timeout_s=2.0, timeout_s=6.0)
    assert how_it_ended(observed).how is End.TIMED_OUT


def test_a_save_that_hangs_after_the_last_step_is_not_excused(observe: Any) -> None:
    text = pipeline(after="if step == 2 and rank: torch.save(Slow(), 'x.pt')").replace(
        "    dist.init_process_group",
        """    class Slow:
        def __reduce__(self):
            time.sleep(1000)
    dist.init_process_group""",
    )
    observed = observe(text, ranks=2, stop_step=3, agree_timeout_s=3.0, timeout_s=10.0)
    assert not observed.facts("stopped", 1)
    assert how_it_ended(observed).how is End.TIMED_OUT


def test_an_exception_after_all_is_trained_is_a_note(observe: Any) -> None:
    text = pipeline(after="if step == 2 and rank: raise ValueError('at the end')")
    observed = observe(text, ranks=2, stop_step=3)
    found = how_it_ended(observed)
    assert found.how is End.TRAINED
    assert "after its last step rank 1 raised ValueError: at the end" in found.note
