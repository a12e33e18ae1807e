"""What anyone runs first: every cell of the quickstart comes out true, and the packet holds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.packet.chromium import EXECUTABLE, MISSING, Chromium, opened

pytestmark = pytest.mark.e2e

PASSED = ("two_to_two.baseline", "two_to_one.dp-shrink", "two_to_four.dp-grow")
FLIPPED = "two_to_two.corrupt-shard.bit-flip"
DAMAGED = ("two_to_two.corrupt-shard.truncate", "two_to_two.corrupt-shard.delete")


def test_exit_code_says_that_all_is_as_expected(quickstart: Any) -> None:
    assert quickstart.code == 0, quickstart.out + quickstart.err
    assert "none against expectation" in quickstart.out
    assert str(quickstart.root / "index.html") in quickstart.out.replace("\n", "")


def test_the_rest_of_the_world_is_named_in_no_verdict(quickstart: Any) -> None:
    assert set(quickstart.verdicts) == {*PASSED, "two_to_three.dp-grow", FLIPPED, *DAMAGED}


@pytest.mark.parametrize("cell", PASSED)
def test_supported_topologies_pass_with_every_item_held(quickstart: Any, cell: str) -> None:
    verdict = quickstart.verdicts[cell]
    assert (verdict["word"], verdict["reason"]) == ("Pass", "held")
    statuses = {row["item"]: row["status"] for row in verdict["checks"]}
    allowed = {"held"} if cell == "two_to_two.baseline" else {"held", "out of scope"}
    assert set(statuses.values()) <= allowed
    assert {item for item, status in statuses.items() if status != "held"} <= {"random state"}


def test_three_ranks_cannot_carry_the_batch_plan(quickstart: Any) -> None:
    word, reason, _, subject = quickstart.judged["two_to_three.dp-grow"]
    assert (word, reason, subject) == ("Unsupported", "batch-plan", "batch plan")


def test_a_flipped_bit_is_found_in_the_tensor_that_it_hit(quickstart: Any) -> None:
    damage = json.loads((quickstart.root / "damages" / f"damage.{FLIPPED}.json").read_bytes())
    word, reason, item, subject = quickstart.judged[FLIPPED]
    assert (word, reason, item) == ("Unsupported", "diverged", "weights")
    assert damage["file"] in subject
    tensor = damage["tensor"].removeprefix("model.")
    assert subject == f"{damage['file']}: {tensor}"
    weights = quickstart.check(FLIPPED, "weights")
    assert weights["subjects"] == [tensor]


@pytest.mark.parametrize("cell", DAMAGED)
def test_a_broken_file_is_refused_by_the_stack(quickstart: Any, cell: str) -> None:
    word, reason, _, subject = quickstart.judged[cell]
    assert (word, reason) == ("Unsupported", "refused")
    assert subject.endswith(".distcp")


def test_what_dcp_documents_stands_beside_each_verdict(quickstart: Any) -> None:
    packet = json.loads((quickstart.root / "packet.json").read_bytes())
    said = {
        cell["id"]: {each["claim"]: each["agreement"] for each in cell["documented"]}
        for cell in packet["cells"]
    }
    confirmed = "the drill confirms the documentation"
    assert said["two_to_one.dp-shrink"]["dcp-other-world-size"] == confirmed
    assert said["two_to_four.dp-grow"]["dcp-optimizer-names"] == confirmed
    # Three ranks feed other batches, and yet the state came back as documented.
    assert said["two_to_three.dp-grow"]["dcp-other-world-size"] == confirmed
    silent = "measured, where the documentation states nothing"
    assert said[FLIPPED] == {"dcp-corruption": silent}
    assert packet["documentation"]["disagreements"] == 0


def test_manifests_are_of_the_source_and_of_the_save_after_the_restore(quickstart: Any) -> None:
    packet = json.loads((quickstart.root / "packet.json").read_bytes())
    told = {cell["id"]: cell["manifests"] for cell in packet["cells"]}
    for cell in PASSED:
        source, after = told[cell]
        assert [(each["of"], each["step"]) for each in (source, after)] == [
            ("source", 8),
            ("after the restore", 12),
        ]
        record = json.loads((quickstart.root / after["path"]).read_bytes())
        assert (record["status"], record["completed_step"]) == ("committed", 12)
        assert record["software"]["torch"]
    source, after = told["two_to_two.baseline"]  # at other sizes ranks save other keys of their own
    assert source["shapes"] == after["shapes"] != ""
    assert [each["of"] for each in told[DAMAGED[0]]] == ["source"]


def test_rates_are_equal_and_losses_differ_by_round_off_only(quickstart: Any) -> None:
    largest = {}
    for cell in PASSED:
        rates = quickstart.check(cell, "learning-rate schedule")["numbers"]
        assert len(rates["steps"]) == 5
        assert rates["restored"] == rates["reference"]
        assert len({tuple(group) for group in rates["reference"]}) == 5  # a schedule that moves
        loss = quickstart.check(cell, "loss")["numbers"]
        assert len(loss["deviation"]) == 5
        largest[cell] = max(loss["deviation"])
        assert largest[cell] <= loss["band"]
    assert largest["two_to_two.baseline"] == 0.0
    assert 0 < max(largest.values()) < 1e-5  # other topologies add in another order


def test_sources_ran_cold_and_the_rest_warm_after_the_two_agreed(quickstart: Any) -> None:
    def launcher(launch_id: str) -> str:
        text = (quickstart.launch(launch_id) / "exit.json").read_text()
        return str(json.loads(text)["launcher"])

    assert launcher("source.two") == "torchrun"
    assert launcher("restore.two.baseline") == "warm"
    assert quickstart.about["launchers"] == {
        "default": "sources torchrun, then warm: both recorded the same facts"
    }


def test_source_checkpoints_are_unchanged(quickstart: Any) -> None:
    assert quickstart.about["source_unchanged"] is True
    assert quickstart.about["source_changes"] == []
    assert quickstart.about["status"] == "judged"


def test_what_passed_leaves_no_checkpoint_and_what_failed_does(quickstart: Any) -> None:
    kept = {path.name for path in (quickstart.root / "work").iterdir()}
    assert not {"restore.two_to_one.dp-shrink", "restore.two_to_four.dp-grow"} & kept
    assert {"source.two", f"restore.{FLIPPED}", *(f"restore.{cell}" for cell in DAMAGED)} <= kept


def test_packet_verifies_with_and_without_ckptdrill(quickstart: Any, bench: Any) -> None:
    assert bench.ckptdrill("verify", quickstart.root).code == 0
    manifest = quickstart.root / "manifest-sha256.txt"
    listed = subprocess.run(
        ["sha256sum", "--check", "--quiet", "--strict", manifest.name],
        cwd=quickstart.root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert listed.returncode == 0, listed.stdout
    names = {line[66:] for line in manifest.read_text().splitlines()}
    assert {"run.json", "matrix.yaml", "journal.jsonl", "index.html", "packet.json"} <= names
    assert f"cells/{FLIPPED}/verdict.json" in names
    assert "launches/source.two/rank0.jsonl" in names


def test_launchers_are_told_what_is_verified(quickstart: Any, bench: Any) -> None:
    def allowed(target: str) -> int:
        route = ("--from", "two", "--to", target, "--packet", quickstart.root)
        return int(bench.ckptdrill("allow", *route).code)

    assert (allowed("four"), allowed("one"), allowed("three")) == (0, 0, 1)


def test_the_gate_knows_what_ran_and_is_closed(quickstart: Any, bench: Any) -> None:
    """The planned path holds a cell that is Unsupported, although the matrix expects it."""
    checkpoint = bench.folder / "step-8"
    _copy(quickstart.root / "work/source.two/out/step-8", checkpoint)
    assert bench.ckptdrill("manifest", "write", checkpoint).code == 0
    told = ("--checkpoint", checkpoint, "--python", sys.executable, "--json")
    result = bench.ckptdrill("gate", quickstart.root, *told)
    assert result.code == 1
    standing = {each["name"]: each["standing"] for each in json.loads(result.out)}
    assert standing.pop("image") == "not known"
    assert {name for name, is_now in standing.items() if is_now != "held"} == {
        "planned path",
        "data cursor",
        "durable fallback",
        "approver",
    }


def test_the_ledger_has_all_that_was_measured(quickstart: Any, bench: Any) -> None:
    found = json.loads(bench.ckptdrill("ledger", quickstart.root, "--json").out)["restores"]
    by_cell = {each["cell"]: each for each in found}
    for cell in PASSED:
        assert set(by_cell[cell]["phases_s"]) == {"read", "initialize", "validate"}
        assert by_cell[cell]["merged"] == ["read", "deserialize", "reshard"]
        assert by_cell[cell]["step_s"] > 0


@pytest.mark.skipif(EXECUTABLE is None, reason=MISSING)
def test_the_page_of_a_real_run_is_whole_and_silent(quickstart: Any, tmp_path: Path) -> None:
    address = (quickstart.root / "index.html").as_uri()
    browser = Chromium(tmp_path)
    with opened(browser, address, 390) as tab:
        tab.run("document.querySelector('[data-open=yes]').click()")
        assert tab.run("document.querySelectorAll('details[open] .body').length") == 7
        assert tab.run("document.documentElement.scrollWidth") == 390
        text = tab.run("document.body.innerText")
        assert (tab.problems, tab.asked) == ([], [address])
    browser.close()
    for told in ("Ledger", "Gate and approval", "FIRST UPDATE", "MANIFESTS", "DAMAGE"):
        assert told.lower() in text.lower()


def test_a_changed_fact_is_found(quickstart: Any, bench: Any) -> None:
    copy = bench.folder / "packet"
    _copy(quickstart.root, copy)
    facts = copy / "launches" / "source.two" / "rank1.jsonl"
    facts.write_bytes(facts.read_bytes().replace(b'"step":5', b'"step":6', 1))
    result = bench.ckptdrill("verify", copy)
    assert result.code == 1
    assert "launches/source.two/rank1.jsonl" in result.out


def test_judging_again_without_a_launch_gives_the_same_verdicts(
    quickstart: Any, bench: Any
) -> None:
    copy = bench.folder / "packet"
    _copy(quickstart.root, copy)
    before = {path.parent.name: path.read_bytes() for path in copy.glob("cells/*/verdict.json")}
    assert bench.ckptdrill("judge", copy).code == 0
    after = {path.parent.name: path.read_bytes() for path in copy.glob("cells/*/verdict.json")}
    assert after == before
    assert bench.ckptdrill("verify", copy).code == 0


def _copy(packet: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", packet, target], check=True)
