"""The manifests of a packet: of each checkpoint that is restored, and of the one saved after it.

When a launch has ended, and before anything that it saved can be deleted, its checkpoints are
described file by file: those of a source that others restore, and of a restore the first one that
it saves itself. A checkpoint that can have no manifest (it was torn, or never committed) is told
with the reason. `manifests.json` in the folder of the launch lists them; the files beside it are
manifests as `ckptdrill manifest write` makes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ckptdrill import manifest
from ckptdrill.errors import UserError
from ckptdrill.model import Checkpoint, JsonValue, Launch, Role
from ckptdrill.step import Setting, checkpoint_path, first_step, restored_checkpoints
from ckptdrill.store import LAUNCH_MANIFESTS_NAME, read_json, write_atomic, write_json


def write_manifests(setting: Setting, launch: Launch) -> None:
    """Describe what `launch` saved, as far as the packet speaks of it; nothing, if it does not."""
    found = [_described(setting, launch, step, path) for step, path in _saved(setting, launch)]
    if found:
        write_json(setting.run.launch(launch.id) / LAUNCH_MANIFESTS_NAME, found)


def _saved(setting: Setting, launch: Launch) -> Iterator[tuple[int, Path]]:
    """(step, place) of the checkpoints that are told."""
    if launch.role is Role.SOURCE:
        uses = {each for each in restored_checkpoints(setting) if each.launch_id == launch.id}
        steps = sorted({each.step for each in uses if not (each.state or each.template)})
    elif launch.role is Role.RESTORE and launch.waits_for is None:
        restored = first_step(setting, launch)
        steps = [s for s in setting.matrix.job.saves if restored < s <= launch.stop_step][:1]
    else:
        return
    for step in steps:
        path = checkpoint_path(setting, Checkpoint(launch.id, step))
        if path.exists():
            yield step, path


def _described(
    setting: Setting, launch: Launch, step: int, checkpoint: Path
) -> dict[str, JsonValue]:
    name = f"step-{step}.manifest.json"
    try:
        record = manifest.describe(checkpoint, _facts(setting, launch, step))
    except UserError as error:
        return {"step": step, "file": None, "refused": error.what}
    write_atomic(setting.run.launch(launch.id) / name, record.to_json())
    return {"step": step, "file": name, "refused": None}


def _facts(setting: Setting, launch: Launch, step: int) -> manifest.Facts:
    """What the run knows of a checkpoint beside its files."""
    run_json = setting.run.run_json
    about = read_json(run_json) if run_json.exists() else {}
    topology = launch.topology
    degrees = {axis: getattr(topology, axis) for axis in ("dp", "tp", "pp", "cp", "ep")}
    return manifest.Facts.model_validate(
        {
            "completed_step": step,
            "software": _software(about, launch.environment),
            "topology": {
                "world_size": topology.world_size,
                "zero_stage": topology.zero_stage,
                **degrees,
            },
        }
    )


def _software(about: Mapping[str, JsonValue], environment: str) -> dict[str, JsonValue]:
    installed = (about.get("installed") or {}).get(environment) or {}
    return {**installed, "image_digest": about.get("image_digest")}
