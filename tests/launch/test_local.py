"""What the runner decides before it starts anything: command line, environment, warm or cold."""

from pathlib import Path
from typing import Any

from ckptdrill.launch.local import cold_command, import_time_differences, job_environment


def test_the_cold_command_is_the_one_of_production(bench: Any) -> None:
    keys = {"world_size": 2, "args": ["--steps", 3], "python": "/job/python"}
    launch = bench.describe("", id="a", **keys)
    assert (
        cold_command(launch)
        == (
            "/job/python -m torch.distributed.run --nproc-per-node 2 --nnodes 1 "
            "--rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id a --local-addr 127.0.0.1 "
            f"-m ckptdrill_observer {bench.folder / 'program.py'} --steps 3"
        ).split()
    )
    launch["module"] = "my.train"
    assert cold_command(launch)[-5:] == ["ckptdrill_observer", "-m", "my.train", "--steps", "3"]


def test_the_environment_of_a_job_is_an_allow_list() -> None:
    base = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "/mine",
        "AWS_SECRET_ACCESS_KEY": "no",
        "HTTPS_PROXY": "no",
        "RANK": "3",
        "CKPTDRILL_LAUNCH": "an outer one",
    }
    given = job_environment(base, {"SEED": "1"}, Path("/pack"), Path("/l.json"))
    assert given == {
        "PATH": "/bin",
        "LC_ALL": "C",
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "/pack:/mine",
        "SEED": "1",
        "OMP_NUM_THREADS": "1",
        "CKPTDRILL_LAUNCH": "/l.json",
    }


def test_what_is_read_at_import_decides_between_warm_and_cold() -> None:
    warm = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "SEED": "1", "TORCH_LOGS": "x"}
    taken_over = {**warm, "OMP_NUM_THREADS": "4", "SEED": "2", "CUDA_VISIBLE_DEVICES": "1"}
    assert import_time_differences(warm, taken_over) == []
    read_before = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "SEED": "1", "PYTHONPATH": "/other"}
    assert import_time_differences(warm, read_before) == ["PYTHONPATH", "TORCH_LOGS"]
