"""What a damage step does: harm a private copy, or make pointers lie, and record what came of it.

First the checkpoint is copied. A harmed copy is held against a manifest of what it was, so that a
verdict can say who noticed; with a guard, what is whole is selected as a launcher does that
verifies before it loads. Pointers are set to the restored step, as they were when it was the
newest, and then made to say what is not so. The record is written last: without it the damage has
not happened.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptdrill import damage as damage_kinds
from ckptdrill import manifest, pointers
from ckptdrill.errors import UserError
from ckptdrill.isolate import private_copy
from ckptdrill.model import Checkpoint, Damage, DamageKind, Guard, PointerLie
from ckptdrill.step import (
    Setting,
    checkpoint_path,
    lying_pointers,
    older,
    out_of,
    renamed,
    set_pointers,
    torn,
)
from ckptdrill.store import write_json


def inflict(setting: Setting, damage: Damage) -> None:
    """Copy the checkpoint, damage the copy, and record what was changed and what a manifest says.

    Raises UserError when there is nothing of the wanted kind to damage.
    """
    source, target = (
        checkpoint_path(setting, replace(damage.checkpoint, damage_id=each))
        for each in (None, damage.id)
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    guard = private_copy(source, target)
    lies = damage.kind is DamageKind.POINTER
    record = _lie(setting, damage) if lies else _harm(setting, damage, target)
    write_json(setting.run.damage(damage.id), {**record, "guard": str(guard)})


def _harm(setting: Setting, damage: Damage, copy: Path) -> dict[str, Any]:
    """Damage the private copy, and ask a manifest of what it was whether it is still that.

    With a guard, choose what is restored in its place, as a launcher does that verifies first.
    """
    launch_id, step = damage.checkpoint.launch_id, damage.checkpoint.step
    whole, why = _described(copy, step)
    foreign = damage.parameters.get("foreign_step")
    other = None if foreign is None else checkpoint_path(setting, Checkpoint(launch_id, foreign))
    record = damage_kinds.apply(damage, copy, other)
    record |= {"foreign_step": foreign, "manifest": _verified(copy, whole, why)}
    if damage.parameters.get("guard") == Guard.MANIFEST:
        if whole is None:
            raise UserError(f"the checkpoint cannot have a manifest: {why}")
        manifest.write(manifest.path_of(copy), whole)
        record |= _guarded(setting, damage)
    return record


def _described(checkpoint: Path, step: int) -> tuple[manifest.Manifest | None, str | None]:
    """The manifest of a checkpoint, or why it can have none."""
    try:
        return manifest.describe(checkpoint, manifest.Facts(completed_step=step)), None
    except UserError as error:
        return None, error.what


def _verified(copy: Path, whole: manifest.Manifest | None, why: str | None) -> dict[str, Any]:
    """The problems that a manifest finds: a kind and a path each; None if there is no manifest."""
    if whole is None:
        return {"problems": None, "refused": why}
    try:
        problems = manifest.verify(copy, whole)
    except UserError as error:  # a checkpoint of one file that is gone
        return {"problems": [{"kind": "missing", "path": copy.name}], "refused": error.what}
    return {"problems": [{"kind": p.kind.value, "path": p.path} for p in problems]}


def _guarded(setting: Setting, damage: Damage) -> dict[str, Any]:
    """What a launcher restores that selects before the load: the newest generation that is whole.

    The one before is copied beside the damaged one, with a manifest of its own. Where none is
    whole, the guard refuses: nothing will be started.
    """
    damaged = checkpoint_path(setting, replace(damage.checkpoint, damage_id=damage.id))
    steps: dict[Path, int | None] = {damaged.resolve(): None}
    for each in older(setting, damage.checkpoint):
        source, place = (
            checkpoint_path(setting, replace(each, damage_id=of)) for of in (None, damage.id)
        )
        if source.exists() and not place.exists():
            private_copy(source, place)
            whole, _ = _described(place, each.step)
            if whole is not None:
                manifest.write(manifest.path_of(place), whole)
                steps[place.resolve()] = each.step
    found = manifest.select(setting.run.work(damage.id))
    chosen = found.chosen
    return {
        "guarded_by": Guard.MANIFEST.value,
        "selected_step": None if chosen is None else steps[chosen.path],
        "guard_refused": chosen is None,
        "passed_over": [f"{g.path.name}: {g.why}" for g in found.generations if g.problems],
    }


# --------------------------------------------------------------------------------------------------
# A lying pointer


def _lie(setting: Setting, damage: Damage) -> dict[str, Any]:
    """Set the pointers to the restored step, then make them lie; the record of the lie."""
    kind = PointerLie(damage.parameters["lie"])
    named = damage.parameters.get("named_step")
    lying = lying_pointers(setting, damage.id)
    set_pointers(
        setting, damage.checkpoint, lying, out_of(setting.run, damage.checkpoint.launch_id)
    )
    step = damage.checkpoint.step
    texts = {} if named is None else renamed(setting, damage.checkpoint, step, int(named))
    record = pointers.lie(lying, kind, texts)
    tears = [_tear(setting, damage, each) for each in torn(setting, damage.id)]
    about = {"id": damage.id, "kind": damage.kind.value, "lie": kind.value, "named_step": named}
    fired = record["fired"] and all(tear["fired"] for tear in tears)
    return {**record, **about, "torn": tears, "fired": fired}


def _tear(setting: Setting, damage: Damage, later: Checkpoint) -> dict[str, Any]:
    """A private copy of a later step, left as by a writer that died before its commit."""
    copy = checkpoint_path(setting, later)
    private_copy(checkpoint_path(setting, replace(later, damage_id=None)), copy)
    return damage_kinds.tear(damage, copy)
