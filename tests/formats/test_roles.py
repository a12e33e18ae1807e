"""Roles and ranks of the files of a checkpoint, by content first and by name last."""

import shutil
from pathlib import Path

import pytest

from ckptdrill import formats
from ckptdrill.errors import UserError
from ckptdrill.formats import roles
from ckptdrill.formats.layout import Role, StoredFile


def test_a_dcp_folder_and_what_a_job_puts_beside_it(
    dcp_source: Path, torch_save_source: Path, tmp_path: Path
) -> None:
    shutil.copytree(dcp_source, tmp_path / "c" / "global_step4")
    shutil.copy(torch_save_source, tmp_path / "c" / "rng_state_1.pth")
    (tmp_path / "c" / "latest").write_text("global_step4\n")
    (tmp_path / "c" / "commit_success.txt").write_text("")
    (tmp_path / "c" / "notes.txt").write_text("two words")
    (tmp_path / "c" / "out").symlink_to("/etc/passwd")
    assert formats.files(tmp_path / "c") == (
        StoredFile("commit_success.txt", Role.MARKER),
        StoredFile("global_step4/.metadata", Role.METADATA),
        StoredFile("global_step4/__0_0.distcp", Role.DATA, 0),
        StoredFile("latest", Role.POINTER),
        StoredFile("notes.txt", Role.OTHER),
        StoredFile("rng_state_1.pth", Role.DATA, 1),
    )


def test_a_single_file_and_nothing(torch_save_source: Path, tmp_path: Path) -> None:
    assert formats.files(torch_save_source) == (StoredFile("step-1.pt", Role.DATA),)
    with pytest.raises(UserError, match="no such file"):
        formats.files(tmp_path / "missing")


def test_a_number_is_a_pointer_only_beside_what_it_numbers(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    assert formats.files(tmp_path)[0].role is Role.OTHER
    (tmp_path / "iter_0000004").mkdir()
    assert formats.files(tmp_path)[0].role is Role.POINTER


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("__3_0.distcp", 3),
        ("global_step4/bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt", 2),
        ("global_step4/mp_rank_01_model_states.pt", 1),
        ("extra_state/extra_state_rank_7.pt", 7),
        ("random_states_5.pkl", 5),
        ("rank-1.pt", 1),
        ("rank12/model.pt", 12),
        ("default/ocdbt.process_3/d/0a", 3),
        ("model-00001-of-00002.safetensors", None),
        ("frank2.pt", None),
    ],
)
def test_the_rank_is_read_from_the_name(name: str, rank: int | None) -> None:
    assert roles.rank(name) == rank
