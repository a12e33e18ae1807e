"""Real jobs on storage that fails or is slow for a while: what each makes of it.

The reference job under FSDP2 ends with the exception of its writer; the step before is whole. The
stranger's script is given three other habits: it swallows the error, it saves in the background
without ever waiting, and, as the healthy twin of that, it waits for the save before.
"""

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

REFERENCE = """
job:
  program: "{jobs}/torch_dcp.py"
  args: [--out, "{out}", --save-at, "6,8,10"]
  resume_args: [--resume, "{resume}"]
  checkpoint: "{out}/step-{step}"
  saves: [6, 8, 10]
  restore_step: 8
  env: {GLOBAL_BATCH: "12"}
  timeout_s: 120
topologies: {two: {dp_shard: 2}}
repeats: 0
matrix:
  - {source: two, drill: {storage-stall: {kind: enospc, seconds: 2.0}}}
"""
STRANGER = """
job:
  program: PROGRAM
  args: [--out, "{out}", --save-every, "2", --no-augment]
  resume_args: [--resume, "{resume}"]
  checkpoint: "{out}/ckpt-{step}.pt"
  saves: [8, 10, 12]
  restore_step: 10
  window: 7
  timeout_s: 120
topologies: {one: {dp: 1}}
policy:
  out_of_scope:
    rng: without augmentation the script draws no random number while it trains
    inventory: a pickle in one tensor, whose bytes depend on which of its texts are shared
repeats: 0
matrix:
  - {source: one, drill: {storage-stall: {PARAMETERS}}}
"""
# How the stranger's script saves: a call, its arguments, and what takes its place.
SAVE = "torch.save("
SWALLOWS = """
def quiet(state, path):
    try:
        torch.save(state, path)
    except OSError:
        pass
"""
BACKGROUND = """
import io
import torch.distributed.checkpoint as dcp
SAVES = []


def background(state, path):
    WAIT
    stream = io.BytesIO()
    torch.save(state, stream)
    blob = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)
    SAVES.append(dcp.async_save({"blob": blob}, checkpoint_id=path, no_dist=True))


def load(path):
    size = dcp.FileSystemReader(path).read_metadata().state_dict_metadata["blob"].size
    state = {"blob": torch.empty(size, dtype=torch.uint8)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return torch.load(io.BytesIO(state["blob"].numpy().tobytes()), weights_only=False)


"""


def script(folder: Path, name: str, extra: str, save: str) -> None:
    """The stranger's script with another habit of saving."""
    text = (Path(__file__).parent / "user_script" / "train.py").read_text()
    text = text.replace(SAVE, f"{save}(").replace("\nCLASSES = 11", f"\n{extra}\nCLASSES = 11")
    if save == "background":
        plain = 'torch.load(args.resume, map_location="cpu", weights_only=False)'
        text = text.replace(plain, "load(args.resume)")
    (folder / name).write_text(text)


def drilled(bench: Any, name: str, extra: str, save: str, parameters: str) -> dict[str, Any]:
    script(bench.folder, f"{name}.py", extra, save)
    text = STRANGER.replace("PROGRAM", f"{name}.py").replace("PARAMETERS", parameters)
    result = bench.drill(bench.matrix(name, text))
    verdict = next(v for cell, v in result.verdicts.items() if "storage-stall" in cell)
    return {**verdict, "out": result.out}


def test_the_reference_job_ends_loudly_and_its_older_step_is_whole(bench: Any) -> None:
    result = bench.drill(bench.matrix("reference", REFERENCE))
    verdict = result.verdicts["two_to_two.storage-stall.enospc.2.0"]
    assert (verdict["word"], verdict["reason"]) == ("Pass", "fell-back"), result.out
    storage = verdict["numbers"]["storage"]
    assert storage["fired"] > 0
    assert storage["surfaced"]
    assert (storage["restored_step"], storage["lost_steps"]) == (6, 2)
    assert result.judged["two_to_two.baseline"][:2] == ("Pass", "held")


def test_an_error_that_is_swallowed_is_found(bench: Any) -> None:
    verdict = drilled(bench, "swallows", SWALLOWS, "quiet", "kind: eio, seconds: 0.5")
    assert (verdict["word"], verdict["reason"]) == ("Unsupported", "unsafe-save"), verdict["out"]
    assert "nothing was said of it" in verdict["explanation"]


@pytest.mark.parametrize(
    ("name", "wait", "word"),
    [
        ("piles", "pass", "Unsupported"),
        ("waits", "SAVES and SAVES[-1].result()", "Pass"),
    ],
)
def test_background_saves_on_slow_storage(bench: Any, name: str, wait: str, word: str) -> None:
    extra = BACKGROUND.replace("WAIT", wait)
    verdict = drilled(bench, name, extra, "background", "kind: slow, seconds: 3.0")
    assert verdict["word"] == word, verdict["out"]
    flights = verdict["numbers"]["storage"]["peak"]["saves_in_flight"]
    assert (flights > 1) == (name == "piles")
