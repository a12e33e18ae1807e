"""The documented claims: complete, short, closed in their words, and set against verdicts."""

import re

import pytest

from ckptdrill import claims, drill, matrix
from ckptdrill.claims import Agreement, Change, Label, MigrationCase
from ckptdrill.errors import UserError
from ckptdrill.model import Check, Claim, Held, Item, Reason, Topology, Verdict, VerdictWord

ONE, TWO = Topology("one"), Topology("two", dp_shard=2)
TWO_TP = Topology("tp", dp_shard=1, tp=2)
# Every system that a platform owner asks about keeps its row.
SYSTEMS = {
    "dcp-ddp",
    "dcp-fsdp1",
    "dcp-fsdp2",
    "dcp-hsdp",
    "dcp-tp",
    "dcp-fsdp-tp",
    "dcp-pp",
    "deepspeed-native",
    "deepspeed-universal",
    "deepspeed-zero-to-fp32",
    "hf-trainer",
    "accelerate",
    "lightning",
    "torchtitan",
    "megatron-dp-reshardable",
    "megatron-fully-reshardable",
    "nemo",
    "megatron-bridge",
    "nemo-automodel",
    "orbax",
    "bytecheckpoint",
    "ml-flashpoint",
    "safetensors",
    "posix",
    "s3",
    "s3-express",
    "gcs",
}


def named(claim_id: str) -> claims.DocumentedClaim:
    return next(claim for claim in claims.every() if claim.id == claim_id)


def ids(stack: str | None, source: Topology, target: Topology, name: str) -> set[str]:
    return {claim.id for claim in claims.for_cell(stack, source, target, name)}


def verdict(
    word: VerdictWord = VerdictWord.PASS,
    reason: Reason = Reason.HELD,
    blame: Item | None = None,
    **rows: Held,
) -> Verdict:
    checks = tuple(Check(Item[name.upper()], status, "") for name, status in rows.items())
    return Verdict("a", Claim.CONTINUES, word, reason, "", blame_item=blame, checks=checks)


DIVERGED = (VerdictWord.UNSUPPORTED, Reason.DIVERGED)
REFUSED = verdict(VerdictWord.UNSUPPORTED, Reason.REFUSED)


# --------------------------------------------------------------------------------------------------
# The file


def test_every_system_has_its_row_and_every_row_a_claim() -> None:
    assert set(claims.stacks()) == SYSTEMS
    assert [name for name in SYSTEMS if not claims.of_stack(name)] == []


def test_no_two_claims_share_a_name() -> None:
    found = [claim.id for claim in claims.every()]
    assert len(found) == len(set(found)) > 100


@pytest.mark.parametrize("claim", claims.every(), ids=lambda claim: claim.id)
def test_a_claim_is_complete(claim: claims.DocumentedClaim) -> None:
    source = claim.source
    assert all((claim.says, source.title, source.address, source.version))
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", source.read)
    assert re.match(r"https?://|not stated$", source.address)
    assert len(claim.quote.split() if claim.quote else []) <= claims.QUOTE_LIMIT_WORDS
    assert claim.says[-1] != "."


@pytest.mark.parametrize("claim", claims.every(), ids=lambda claim: claim.id)
def test_a_label_fits_its_quote(claim: claims.DocumentedClaim) -> None:
    """What is not stated cannot be quoted; what is stated is quoted, or said to be unverified."""
    if claim.label is Label.UNPROVEN:
        assert claim.quote is None
        assert claim.says.startswith("not stated")
    elif claim.verified:
        assert claim.quote
    assert claim.label is Label.LIMIT or not claim.excludes


def test_what_was_not_found_at_its_source_names_the_report_that_cites_it() -> None:
    unverified = {claim.source.title for claim in claims.every() if not claim.verified}
    assert len(unverified) == 1
    assert "report" in unverified.pop()


def test_every_label_and_every_case_is_in_use() -> None:
    assert {claim.label for claim in claims.every()} == set(Label)
    assert {claim.case for claim in claims.every()} == set(MigrationCase)


def test_only_known_drills_are_named() -> None:
    known = {*drill.names(), *matrix.DERIVED_DRILLS, *claims.FAULT_DRILLS}
    used = {name for claim in claims.every() for rule in claim.cells for name in rule.drills}
    assert used <= known


def test_a_long_quote_is_refused() -> None:
    with pytest.raises(ValueError, match="26 words; allowed: 25"):
        claims._short("word " * 26)


def test_an_unknown_stack_gets_help() -> None:
    with pytest.raises(UserError, match="did you mean 'deepspeed-native'"):
        claims.stack("deepspeed_nativ")


# --------------------------------------------------------------------------------------------------
# Which claims a cell tests


def test_a_change_is_every_way_in_which_two_layouts_differ() -> None:
    assert claims.changes_between(TWO, TWO) == {Change.NONE}
    assert claims.changes_between(ONE, TWO) == {Change.WORLD_SIZE, Change.DP}
    assert claims.changes_between(TWO, TWO_TP) == {Change.DP, Change.TP}
    hybrid = Topology("hybrid", dp_replicate=2, dp_shard=2)
    assert claims.changes_between(Topology("flat", dp_shard=4), hybrid) == {Change.SHARDING}
    staged = Topology("two", dp_shard=2, zero_stage=1)
    other = Topology("two", dp_shard=2, zero_stage=2)
    assert claims.changes_between(staged, other) == {Change.ZERO_STAGE}


def test_another_data_parallel_degree_tests_what_speaks_of_it() -> None:
    found = ids("dcp-fsdp2", TWO, ONE, "dp-shrink")
    assert {"dcp-resharding", "dcp-other-world-size", "dcp-optimizer-names"} <= found
    assert not found & {"dcp-other-parallelism", "dcp-any-sharding", "dcp-corruption"}


def test_the_same_layout_tests_no_claim_about_a_change() -> None:
    found = ids("dcp-fsdp2", TWO, TWO, "baseline")
    assert found == {"dcp-non-tensor", "dcp-random-state", "dcp-data-cursor"}


def test_a_fault_tests_what_speaks_of_the_fault_alone() -> None:
    assert ids("dcp-fsdp2", TWO, TWO, "corrupt-shard") == {"dcp-corruption"}
    assert ids("dcp-fsdp2", TWO, ONE, "version-skew") == {"dcp-versions", "dcp-reproducibility"}


def test_a_stage_narrows_a_claim() -> None:
    def stage(number: int | None, tp: int) -> Topology:
        return Topology("t", dp_shard=2, tp=tp, zero_stage=number)

    def found(number: int | None) -> set[str]:
        all_ids = ids("deepspeed-universal", stage(number, 1), stage(number, 2), "tp-change")
        return all_ids & {"universal-tensor-parallel", "universal-stage-3-tensor-parallel"}

    assert found(1) == {"universal-tensor-parallel"}
    assert found(3) == {"universal-stage-3-tensor-parallel"}
    assert len(found(None)) == 2


def test_native_zero_is_ruled_out_at_another_degree_and_universal_is_not() -> None:
    two, one = Topology("two", dp_shard=2, zero_stage=1), Topology("one", zero_stage=1)
    ruled_out = claims.exclusions("deepspeed-native", two, one, "dp-shrink")
    assert [claim.id for claim in ruled_out] == ["zero-native-world-size"]
    assert claims.exclusions("deepspeed-universal", two, one, "dp-shrink") == ()


@pytest.mark.parametrize("stack", [None, "no-such-stack", "posix"])
def test_without_a_stack_of_its_own_a_cell_has_no_claims(stack: str | None) -> None:
    assert claims.for_cell(stack, TWO, ONE, "dp-shrink") == ()


# --------------------------------------------------------------------------------------------------
# Claim and verdict


@pytest.mark.parametrize(
    ("claim_id", "found", "expected"),
    [
        ("dcp-other-world-size", verdict(), Agreement.CONFIRMED),
        ("dcp-other-world-size", verdict(*DIVERGED, Item.MOMENTS), Agreement.CONTRADICTED),
        ("dcp-other-world-size", REFUSED, Agreement.CONTRADICTED),
        ("zero-native-world-size", verdict(), Agreement.BEYOND),
        ("zero-native-world-size", REFUSED, Agreement.AS_LIMITED),
        ("dcp-versions", verdict(*DIVERGED, Item.WEIGHTS), Agreement.AS_LIMITED),
        ("dcp-corruption", verdict(*DIVERGED, Item.WEIGHTS), Agreement.UNDOCUMENTED),
        ("dcp-corruption", verdict(), Agreement.UNDOCUMENTED),
    ],
)
def test_a_claim_against_a_verdict(claim_id: str, found: Verdict, expected: Agreement) -> None:
    assert claims.agreement(named(claim_id), found) is expected


@pytest.mark.parametrize(
    "found",
    [
        verdict(VerdictWord.UNPROVEN, Reason.NOT_EXERCISED),
        verdict(*DIVERGED, Item.DATA),  # another item than the claim speaks of
        verdict(VerdictWord.UNSUPPORTED, Reason.BATCH_PLAN),
        verdict(VerdictWord.UNSUPPORTED, Reason.DOCUMENTED_LIMIT),
        verdict(keys=Held.OUT_OF_SCOPE, weights=Held.OUT_OF_SCOPE, moments=Held.OUT_OF_SCOPE),
    ],
    ids=["unproven", "other item", "batch plan", "no drill", "out of scope"],
)
def test_a_verdict_about_something_else_leaves_a_claim_open(found: Verdict) -> None:
    assert claims.agreement(named("dcp-other-world-size"), found) is Agreement.OPEN


def test_its_own_items_decide_a_claim_whatever_else_broke() -> None:
    claim = named("dcp-other-world-size")
    lost_order = verdict(*DIVERGED, Item.DATA, weights=Held.HELD, moments=Held.HELD)
    assert claims.agreement(claim, lost_order) is Agreement.CONFIRMED
    lost_both = verdict(*DIVERGED, Item.DATA, weights=Held.HELD, moments=Held.BROKEN)
    assert claims.agreement(claim, lost_both) is Agreement.CONTRADICTED
    half_seen = verdict(*DIVERGED, Item.DATA, weights=Held.HELD, moments=Held.NOT_OBSERVED)
    assert claims.agreement(claim, half_seen) is Agreement.OPEN
    other_batches = verdict(VerdictWord.UNSUPPORTED, Reason.BATCH_PLAN, weights=Held.HELD)
    assert claims.agreement(claim, other_batches) is Agreement.CONFIRMED


def test_what_held_in_part_is_decided() -> None:
    found = verdict(weights=Held.HELD, buffers=Held.NOT_EXERCISED)
    assert claims.agreement(named("dcp-other-world-size"), found) is Agreement.CONFIRMED


def test_disagreements_come_first() -> None:
    assert [each.disagrees for each in Agreement] == [True, True, False, False, False, False]
