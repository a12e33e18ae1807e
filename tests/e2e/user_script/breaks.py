"""Resume mistakes of train.py, as edits of its text, because each must be found on real runs.

``BREAKS`` maps a name to one hunk ``(old, new)`` inside the resume part; ``write_variant`` applies
it to the text of ``train.py`` and writes the broken script. Every variant runs to its end with exit
code 0: only the training it continues is another one.
"""

from __future__ import annotations

from pathlib import Path

TRAIN = Path(__file__).with_name("train.py")

BREAKS: dict[str, tuple[str, str]] = {
    "moments": (
        'optimizer.load_state_dict(ckpt["optimizer"])',
        'optimizer.load_state_dict({**ckpt["optimizer"], "state": {}})',
    ),
    "scheduler": ('        scheduler.load_state_dict(ckpt["scheduler"])\n', ""),
    "lr": (
        '        scheduler.load_state_dict(ckpt["scheduler"])\n',
        """\
        scheduler.load_state_dict(ckpt["scheduler"])
        optimizer.param_groups[0]["lr"] = args.lr
""",
    ),
    "sampler": ('batches_done = ckpt["batches_done"]', "batches_done = 0"),
    "step": ('step = ckpt["step"]', 'step = ckpt["step"] + 1'),
    "prefix": (
        'model.load_state_dict(ckpt["model"])',
        'model.load_state_dict({f"module.{k}": v for k, v in ckpt["model"].items()}, strict=False)',
    ),
}


def broken(name: str) -> str:
    """Return the text of train.py with the mistake ``name``.

    Raises KeyError for an unknown name and ValueError if the hunk does not fit exactly once.
    """
    text = TRAIN.read_text(encoding="utf-8")
    old, new = BREAKS[name]
    if text.count(old) != 1:
        message = f"break {name!r} fits {text.count(old)} times in {TRAIN.name}, not once"
        raise ValueError(message)
    return text.replace(old, new)


def write_variant(name: str, folder: Path) -> Path:
    """Write the broken script to ``folder`` as ``train_<name>.py`` and return its path."""
    path = folder / f"train_{name}.py"
    path.write_text(broken(name), encoding="utf-8")
    return path
