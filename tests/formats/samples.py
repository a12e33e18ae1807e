"""Small checkpoints of every format, written as the frameworks write them, from one training state.

torch writes its own formats. The other folders are put together from files of torch.save, DCP and
JSON by the names and keys that the frameworks use, so that no test needs them installed.
"""

import dataclasses
import io
import json
import pickle
import struct
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dist_checkpoint
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

State = dict[str, Any]
SHAPES = {"a.weight": (5, 7), "a.bias": (5,), "b.weight": (3, 5), "b.bias": (3,)}
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclasses.dataclass(frozen=True)
class Training:
    """Weights and AdamW moments by parameter name, all in the order of `SHAPES`."""

    weights: dict[str, torch.Tensor]
    moments: dict[str, dict[str, torch.Tensor]]

    @property
    def optimizer(self) -> State:
        """As `torch.optim.AdamW.state_dict()` has it, by index."""
        state = {i: dict(moments) for i, moments in enumerate(self.moments.values())}
        group = {"lr": 0.001, "betas": (0.9, 0.999), "params": list(range(len(state)))}
        return {"state": state, "param_groups": [group]}

    @property
    def named_optimizer(self) -> State:
        """As `get_optimizer_state_dict` has it, by name."""
        groups = [{"lr": 0.001, "params": list(self.moments)}]
        return {"state": self.moments, "param_groups": groups}


def training(seed: int = 0, parameters: int = len(SHAPES)) -> Training:
    """The same numbers for the same seed; the first `parameters` of `SHAPES`."""
    generator = torch.Generator().manual_seed(seed)
    shapes = dict(list(SHAPES.items())[:parameters])
    weights = {k: torch.randn(shape, generator=generator) for k, shape in shapes.items()}
    moments = {
        key: {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(shape, generator=generator),
            "exp_avg_sq": torch.rand(shape, generator=generator),
        }
        for key, shape in shapes.items()
    }
    return Training(weights, moments)


SCHEDULER = {"last_epoch": 3, "_step_count": 4, "base_lrs": [0.001], "_last_lr": [0.001]}
RANDOM = {"python": [3, list(range(20)), None], "torch": torch.arange(16, dtype=torch.uint8)}


def torch_zip(path: Path, t: Training) -> Path:
    """One file, as a job writes it."""
    content = {
        "model": t.weights,
        "optimizer": t.optimizer,
        "scheduler": SCHEDULER,
        "step": 3,
        "rng": RANDOM,
        "data_loader": {"position": 24},
    }
    torch.save(content, path)
    return path


def torch_legacy(path: Path, t: Training) -> Path:
    """The same in the format before zips."""
    content = {"model": t.weights, "optimizer": t.optimizer, "step": 3}
    torch.save(content, path, _use_new_zipfile_serialization=False)
    return path


def safetensors(path: Path, t: Training) -> Path:
    """The weights only, as the library lays them out."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    payload = b""
    for name, tensor in t.weights.items():
        raw = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
        offsets = [len(payload), len(payload) + len(raw)]
        header[name] = {
            "dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets
        }  # fmt: skip
        payload += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + payload)
    return path


def dcp(folder: Path, state: State) -> Path:
    """What `dcp.save` writes in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist_checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def dcp_job(folder: Path, t: Training) -> Path:
    """A job's state in DCP."""
    state = {"model": t.weights, "optim": t.named_optimizer, "step": 3, "scheduler": SCHEDULER}
    return dcp(folder, state)


def dcp_sharded(folder: Path, tensors: Mapping[str, torch.Tensor], ranks: int, axis: int) -> Path:
    """Tensors cut along `axis` into a file per rank, without starting any."""
    folder.mkdir(parents=True)
    entries, storage = {}, {}
    for rank in range(ranks):
        with (folder / f"__{rank}_0.distcp").open("wb") as shard:
            for name, tensor in tensors.items():
                cut = axis if tensor.ndim > axis else 0
                pieces = list(tensor.chunk(ranks, cut))
                if rank >= len(pieces):
                    continue
                offsets = [0] * tensor.ndim
                offsets[cut] = sum(piece.shape[cut] for piece in pieces[:rank])
                buffer = io.BytesIO()
                torch.save(pieces[rank].clone(), buffer)
                where = _StorageInfo(shard.name.rpartition("/")[2], shard.tell(), buffer.tell())
                shard.write(buffer.getvalue())
                index = MetadataIndex(name, torch.Size(offsets))
                storage[index] = where
                chunk = ChunkStorageMetadata(torch.Size(offsets), pieces[rank].shape)
                entries.setdefault(name, []).append(chunk)
    named = {
        name: TensorStorageMetadata(
            TensorProperties(dtype=tensors[name].dtype), tensors[name].shape, chunks
        )
        for name, chunks in entries.items()
    }
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(named, storage_data=storage)))
    return folder


def hf_trainer(folder: Path, t: Training) -> Path:
    """`checkpoint-3` of the Trainer, two ranks."""
    folder.mkdir(parents=True)
    safetensors(folder / "model.safetensors", t)
    torch.save(t.optimizer, folder / "optimizer.pt")
    torch.save(SCHEDULER, folder / "scheduler.pt")
    for rank in range(2):
        torch.save({"cpu": RANDOM["torch"]}, folder / f"rng_state_{rank}.pth")
    state = {"global_step": 3, "epoch": 0.5, "log_history": [], "max_steps": 10}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    (folder / "config.json").write_text(json.dumps({"transformers_version": "5.24.0"}))
    return folder


def hf_trainer_fsdp(folder: Path, t: Training) -> Path:
    """`checkpoint-3` of the Trainer under FSDP2."""
    folder.mkdir(parents=True)
    dcp(folder / "pytorch_model_fsdp_0", {"model": t.weights})
    dcp(folder / "optimizer_0", {"optimizer": t.named_optimizer})
    torch.save(SCHEDULER, folder / "scheduler.pt")
    torch.save({"cpu": RANDOM["torch"]}, folder / "rng_state_0.pth")
    state = {"global_step": 3, "epoch": 0.5, "log_history": []}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


def accelerate(folder: Path, t: Training) -> Path:
    """What `save_state` writes."""
    folder.mkdir(parents=True)
    safetensors(folder / "model.safetensors", t)
    torch.save(t.optimizer, folder / "optimizer.bin")
    torch.save(SCHEDULER, folder / "scheduler.bin")
    states = {"step": 3, "random_state": RANDOM["python"], "torch_manual_seed": RANDOM["torch"]}
    torch.save(states, folder / "random_states_0.pkl")
    torch.save({"seen": 24}, folder / "custom_checkpoint_0.pkl")
    return folder


def _lightning(t: Training) -> State:
    return {
        "pytorch-lightning_version": "2.6.6",
        "global_step": 3,
        "epoch": 0,
        "state_dict": t.weights,
        "loops": {"fit_loop": {"epoch_loop.batch_progress": {"total": {"ready": 3}}}},
        "optimizer_states": [t.optimizer],
        "lr_schedulers": [SCHEDULER],
    }


def lightning(path: Path, t: Training) -> Path:
    """A file `.ckpt`."""
    torch.save(_lightning(t), path)
    return path


def lightning_folder(folder: Path, t: Training) -> Path:
    """A folder `.ckpt`, as the strategies that shard write it."""
    whole = _lightning(t)
    dcp(folder, {"state_dict": t.weights, "optimizer_0": t.named_optimizer})
    kept = {k: v for k, v in whole.items() if k not in ("state_dict", "optimizer_states")}
    torch.save(kept, folder / "meta.pt")
    return folder


def torchtitan(folder: Path, t: Training) -> Path:
    """`step-3`: the weights at the root of the keys."""
    state = {
        **t.weights,
        "optimizer": t.named_optimizer,
        "lr_scheduler": SCHEDULER,
        "dataloader": {"dp_rank_0": {"position": 24}, "world_size": 1},
        "train_state": {"step": 3},
    }
    return dcp(folder, state)


def bytecheckpoint(folder: Path, t: Training) -> Path:
    """`global_step_3` of two ranks."""
    dcp(folder / "model", t.weights)
    dcp(folder / "optimizer", {"optimizer": t.named_optimizer})
    (folder / "extra_state").mkdir()
    for rank in range(2):
        extra = {"rng": RANDOM, "lr_scheduler": SCHEDULER, "global_step": 3}
        torch.save(extra, folder / "extra_state" / f"extra_state_rank_{rank}.pt")
    return folder


def megatron(folder: Path, t: Training) -> Path:
    """`iter_0000003` of the backend `torch_dist`."""
    moments = {
        f"optimizer.state.{moment}.{name}": held[moment]
        for name, held in t.moments.items()
        for moment in ("exp_avg", "exp_avg_sq")
    }
    masters = {f"optimizer.state.fp32_param.{name}": value for name, value in t.weights.items()}
    rng = {"rng_state/shard_0_1": RANDOM}
    dcp(folder, {**t.weights, **moments, **masters, **rng})
    common = {"iteration": 3, "checkpoint_version": 3.0, "opt_param_scheduler": SCHEDULER}
    torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    return folder


def orbax(folder: Path, t: Training) -> Path:
    """Step 3: the JSON of the trees; the database is bytes that nothing here reads."""
    item = folder / "default"
    (item / "d").mkdir(parents=True)
    keys = [("params", *name.split(".")) for name in t.weights]
    keys += [
        ("opt_state", "0", moment, *name.split("."))
        for moment in ("mu", "nu")
        for name in t.moments
    ]
    tree = {
        str(key): {
            "key_metadata": [{"key": part, "key_type": 2} for part in key],
            "value_metadata": {
                "value_type": "jax.Array",
                "write_shape": list(SHAPES[".".join(key[-2:])]),
            },
        }
        for key in keys
    }
    (item / "_METADATA").write_text(json.dumps({"tree_metadata": tree, "use_ocdbt": True}))
    (item / "_sharding").write_text("{}")
    (item / "manifest.ocdbt").write_bytes(b"\x0c\xdb\x3a\x2a" + bytes(60))
    (item / "d" / "c5371eb2332bbc15").write_bytes(bytes(range(200)))
    about = {"item_handlers": {"default": "Standard"}, "commit_timestamp_nsecs": 1795998044}
    (folder / "_CHECKPOINT_METADATA").write_text(json.dumps(about))
    (folder / "commit_success.txt").write_text("Checkpoint commit was successful")
    return folder


def _model_states(t: Training, stage: int, ranks: int) -> State:
    shapes = OrderedDict((name, value.shape) for name, value in t.weights.items())
    empty = {name: torch.empty(0) for name in t.weights}
    return {
        "module": empty if stage == 3 else t.weights,
        "buffer_names": [],
        "optimizer": None if stage else t.optimizer,
        "param_shapes": [shapes] if stage else None,
        "lr_scheduler": SCHEDULER,
        "global_steps": 3,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": stage}},
        "ds_version": "0.19.8",
    }


def _pieces(values: list[torch.Tensor], stage: int, ranks: int) -> list[torch.Tensor]:
    """The flat piece of each rank."""
    if stage == 3:
        cut = [
            torch.nn.functional.pad(v.flatten(), (0, -v.numel() % ranks)).chunk(ranks)
            for v in values
        ]
        return [torch.cat([pieces[rank] for pieces in cut]) for rank in range(ranks)]
    flat = torch.cat([v.flatten() for v in values])
    return list(torch.nn.functional.pad(flat, (0, -flat.numel() % ranks)).chunk(ranks))


def deepspeed(folder: Path, t: Training, stage: int = 1, ranks: int = 2) -> Path:
    """`global_step3` of native ZeRO."""
    folder.mkdir(parents=True)
    states = _model_states(t, stage, ranks)
    if stage < 3:
        torch.save(states, folder / "mp_rank_00_model_states.pt")
    masters = _pieces(list(t.weights.values()), stage, ranks)
    moments = {
        name: _pieces([held[name] for held in t.moments.values()], stage, ranks)
        for name in ("exp_avg", "exp_avg_sq")
    }
    names = ("optimizer_state_dict", "fp32_flat_groups") if stage == 3 else (
        "base_optimizer_state", "single_partition_of_fp32_groups"
    )  # fmt: skip
    for rank in range(ranks if stage else 0):
        if stage == 3:
            torch.save(states, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        own = {name: pieces[rank].clone() for name, pieces in moments.items()}
        inner = {"state": {0: {"step": torch.tensor(3.0), **own}}, "param_groups": [{"lr": 0.001}]}
        whole = {names[0]: inner, names[1]: [masters[rank].clone()], "zero_stage": stage}
        torch.save(
            {"optimizer_state_dict": whole, "ds_version": "0.19.8"},
            folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    return folder


def universal(folder: Path, t: Training) -> Path:
    """What `ds_to_universal` makes of it."""
    for name, held in t.moments.items():
        inner = folder / "zero" / name
        inner.mkdir(parents=True)
        states = {"fp32": t.weights[name], **held}
        for state, value in states.items():
            torch.save({"param": value} if value.ndim else value, inner / f"{state}.pt")
    torch.save(_model_states(t, 1, 2), folder / "mp_rank_00_model_states.pt")
    return folder


# Name of the folder or file, and who writes it.
ALL: Mapping[str, Callable[[Path, Training], Path]] = {
    "dcp/step-3": dcp_job,
    "torch.save/step-3.pt": torch_zip,
    "torch.save-legacy/step-3.pt": torch_legacy,
    "safetensors/model.safetensors": safetensors,
    "hf-trainer/checkpoint-3": hf_trainer,
    "hf-trainer-fsdp/checkpoint-3": hf_trainer_fsdp,
    "accelerate/checkpoint_3": accelerate,
    "lightning/step=3.ckpt": lightning,
    "lightning-folder/step=3.ckpt": lightning_folder,
    "torchtitan/step-3": torchtitan,
    "bytecheckpoint/global_step_3": bytecheckpoint,
    "megatron/iter_0000003": megatron,
    "orbax/3": orbax,
    "deepspeed/global_step3": deepspeed,
    "deepspeed-universal/global_step3_uni": universal,
}


def write(root: Path, name: str, seed: int = 0, parameters: int = len(SHAPES)) -> Path:
    """The checkpoint `name` of `ALL` below `root`."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return ALL[name](path, training(seed, parameters))
