"""Every format is recognised by its content, and classed by what it holds and what is missing."""

import json
import shutil
from pathlib import Path

import pytest

from ckptdrill.errors import UserError
from ckptdrill.formats import stacks
from ckptdrill.formats.classify import Classification, Usable, classify
from ckptdrill.formats.kinds import Kind

samples = pytest.importorskip("tests.formats.samples")

NO_OPTIMIZER = {"safetensors/model.safetensors"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint of each format; tests that write copy it first."""
    root = tmp_path_factory.mktemp("samples")
    for name in samples.ALL:
        samples.write(root, name)
    return root


def classed(path: Path) -> Classification:
    return classify(stacks.read(path))


@pytest.mark.parametrize("name", samples.ALL)
def test_a_format_is_recognised_under_any_name(name: str, written: Path, tmp_path: Path) -> None:
    path = written / name
    copy = tmp_path / "elsewhere"
    (shutil.copytree if path.is_dir() else shutil.copy)(path, copy)
    for place in (path, copy):
        found = stacks.read(place)
        expected = name.partition("/")[0]
        assert expected.startswith(found.form)
        assert found.problems == ()
        assert {
            t.sort.name for t in found.tensors if t.sort.kind in (Kind.WEIGHT, Kind.MASTER)
        } == {*samples.SHAPES}


@pytest.mark.parametrize("name", samples.ALL)
def test_the_class_says_what_it_is_good_for(name: str, written: Path) -> None:
    said = classed(written / name)
    expected = Usable.MODEL_ONLY if name in NO_OPTIMIZER else Usable.RESUMABLE
    if name.startswith("deepspeed-universal"):
        expected = Usable.UNIVERSAL
    assert (said.usable, said.because[0][:9]) in {
        (expected, "4 weights"), (Usable.MODEL_ONLY, "weights a"),
    }  # fmt: skip
    assert said.usable is expected


@pytest.mark.parametrize("name", sorted(set(samples.ALL) - NO_OPTIMIZER))
def test_every_parameter_has_its_moments(name: str, written: Path) -> None:
    found = stacks.read(written / name)
    moments = [t.sort for t in found.tensors if t.sort.kind is Kind.MOMENT]
    assert len(moments) == 2 * len(samples.SHAPES)
    assert len({(sort.name, sort.moment) for sort in moments}) == len(moments)


def test_versions_of_the_writers_are_told(written: Path) -> None:
    said = {name: dict(stacks.read(written / name).versions) for name in samples.ALL}
    assert said["deepspeed/global_step3"]["ds_version"] == "0.19.8"
    assert said["lightning/step=3.ckpt"]["pytorch-lightning_version"] == "2.6.6"
    assert said["hf-trainer/checkpoint-3"]["transformers_version"] == "5.24.0"
    assert said["megatron/iter_0000003"]["megatron sharded_backend"] == "torch_dist"
    assert said["dcp/step-3"]["dcp metadata version"] == "1.0.0"


MISSING = [
    ("dcp/step-3", ".metadata", "no readable .metadata"),
    ("dcp/step-3", "__0_0.distcp", "__0_0.distcp is missing"),
    ("hf-trainer/checkpoint-3", "rng_state_0.pth", "random states of rank 0 are missing"),
    ("hf-trainer-fsdp/checkpoint-3", "optimizer_0/.metadata", "optimizer_0: no readable"),
    ("deepspeed/global_step3", "zero_pp_rank_1_mp_rank_00_optim_states.pt", "rank 1 of 2"),
    ("deepspeed/global_step3", "mp_rank_00_model_states.pt", "no file of model states"),
    ("deepspeed-universal/global_step3_uni", "zero/a.bias/exp_avg.pt", "a.bias has no exp_avg.pt"),
    ("bytecheckpoint/global_step_3", "extra_state/extra_state_rank_0.pt", "state of rank 0"),
    ("megatron/iter_0000003", "common.pt", "common.pt is missing"),
    ("orbax/3", "default/manifest.ocdbt", "manifest.ocdbt is missing"),
    ("lightning-folder/step=3.ckpt", "__0_0.distcp", "__0_0.distcp is missing"),
]


@pytest.mark.parametrize(("name", "file", "why"), MISSING)
def test_a_missing_file_makes_it_incomplete(
    name: str, file: str, why: str, written: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(written / name, tmp_path / "c" / Path(name).name)
    (copy / file).unlink()
    said = classed(copy)
    assert said.usable is Usable.INCOMPLETE
    assert why in " ".join(said.because)


@pytest.mark.parametrize(
    "name", ["dcp/step-3", "deepspeed/global_step3", "accelerate/checkpoint_3"]
)
def test_a_torn_file_makes_it_incomplete(name: str, written: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(written / name, tmp_path / Path(name).name)
    largest = max((p for p in copy.iterdir()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    said = classed(copy)
    assert said.usable is Usable.INCOMPLETE
    assert largest.name in " ".join(said.because)


def test_without_its_optimizer_files_a_trainer_folder_is_model_only(
    written: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(written / "hf-trainer/checkpoint-3", tmp_path / "c")
    (copy / "optimizer.pt").unlink()
    assert classed(copy).usable is Usable.MODEL_ONLY


def test_shards_of_deepspeed_in_a_trainer_folder_are_put_together(tmp_path: Path) -> None:
    t = samples.training()
    folder = samples.hf_trainer(tmp_path / "checkpoint-3", t)
    (folder / "model.safetensors").unlink()
    (folder / "optimizer.pt").unlink()
    samples.deepspeed(folder / "global_step3", t, 3)
    found = stacks.read(folder)
    assert found.form == "hf-trainer"
    keys = {tensor.key for tensor in found.tensors}
    assert {"master.a.weight", "optimizer.state.a.weight.exp_avg"} <= keys
    assert classify(found).usable is Usable.RESUMABLE


def test_weights_without_one_of_two_moments_are_incomplete(tmp_path: Path) -> None:
    t = samples.training()
    del t.moments["a.bias"]["exp_avg_sq"]
    samples.dcp_job(tmp_path / "step-3", t)
    said = classed(tmp_path / "step-3")
    assert said.usable is Usable.INCOMPLETE
    assert "exp_avg_sq is missing for a.bias" in said.because


def test_what_the_files_do_not_hold_is_named(written: Path) -> None:
    said = " ".join(classed(written / "dcp/step-3").because)
    assert "not in the files: random state, data position" in said
    assert "not in the files" not in " ".join(classed(written / "torch.save/step-3.pt").because)


def test_an_index_that_names_a_missing_file_or_one_outside(written: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(written / "hf-trainer/checkpoint-3", tmp_path / "c")
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "model-00002-of-00002.safetensors"}}))
    assert "model-00002-of-00002" in classed(copy).because[0]
    index.write_text(json.dumps({"weight_map": {"x": "../../secret"}}))
    with pytest.raises(UserError, match="outside its folder"):
        classed(copy)


# --------------------------------------------------------------------------------------------------
# Roots of generations


def test_a_pointer_chooses_the_generation_and_a_lying_one_is_refused(
    written: Path, tmp_path: Path
) -> None:
    for step in (3, 6):
        shutil.copytree(written / "deepspeed/global_step3", tmp_path / f"global_step{step}")
    with pytest.raises(UserError, match="2 generations are here"):
        stacks.read(tmp_path)
    (tmp_path / "latest").write_text("global_step3")
    found = stacks.read(tmp_path)
    assert found.path.name == "global_step3"
    assert "the pointer latest names global_step3" in found.notes
    (tmp_path / "latest").write_text("global_step9")
    with pytest.raises(UserError, match="'global_step9', which is not there"):
        stacks.read(tmp_path)


def test_a_numbered_pointer_and_the_only_generation(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "megatron/iter_0000003", tmp_path / "iter_0000003")
    assert stacks.read(tmp_path).form == "megatron"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    assert "names iter_0000003" in stacks.read(tmp_path).notes[0]


def test_folders_of_ranks_are_one_checkpoint(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank{rank}").mkdir()
        samples.torch_zip(tmp_path / f"rank{rank}" / "state.pt", samples.training(rank))
    found = stacks.read(tmp_path)
    assert found.path == tmp_path
    assert "rank1/state.pt:model.a.bias" in {t.key for t in found.tensors}


def test_nothing_known_is_said_with_what_is_known(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(UserError) as caught:
        stacks.read(tmp_path)
    assert "megatron" in str(caught.value)
    with pytest.raises(UserError, match="no such file"):
        stacks.read(tmp_path / "missing")
