"""One verdict per cell: what comes before a restore, damage claims, declarations, and the rest."""

import dataclasses
import json
from typing import Any

import pytest
from msgspec import structs

from ckptdrill.judge import table
from ckptdrill.model import (
    Claim,
    DamageKind,
    Held,
    Item,
    PointerLie,
    Policy,
    Reason,
    Verdict,
    VerdictWord,
    from_json,
    to_json,
)
from tests.judge.history import History, damage_record, damaged, healthy, run
from tests.judge.training import Training

ONE_EPOCH = Policy(out_of_scope={"epoch boundary": "the older step lies in the first epoch"})

LAYOUTS = [
    ("fsdp2", "fsdp2"),
    ("fsdp2", "ddp1"),
    ("fsdp2", "fsdp4"),
    ("ddp2", "fsdp4tp2"),
    ("fsdp2tp2", "ddp2fsdp2"),
    ("ddp1", "tp2"),
    ("fsdp2cp2", "fsdp2"),
]


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_a_healthy_history_passes(layouts: tuple[str, str]) -> None:
    verdict = healthy(*layouts).verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.PASS, Reason.HELD), verdict.explanation
    assert {c.status for c in verdict.checks} <= {Held.HELD, Held.OUT_OF_SCOPE}
    assert "over 5 steps" in verdict.explanation


def test_every_item_of_the_inventory_has_one_row_in_the_order_of_proof() -> None:
    here = [check.item for check in healthy().verdict().checks]
    there = [check.item for check in healthy("fsdp2", "fsdp4").verdict().checks]
    every = [item for item in Item if item is not Item.GENERATION]
    at_another_topology = [item for item in every if item is not Item.DAMAGE]
    assert there == at_another_topology
    assert here == [item for item in at_another_topology if item is not Item.GRADIENTS]
    assert [c.item for c in damaged().verdict().checks] == [*here, Item.DAMAGE]


def test_every_row_that_held_cites_facts_that_exist() -> None:
    history = healthy("fsdp2", "fsdp4")
    known = {ref for run in history.evidence.records.values() for ref in run.refs(run.facts)}
    for check in history.verdict().checks:
        assert set(check.facts) <= known
        assert check.facts


# ---------------------------------------------------------------- before there is a restore


def early(history: History) -> tuple[VerdictWord, Reason, str]:
    verdict = history.verdict()
    return verdict.word, verdict.reason, verdict.explanation


@pytest.mark.parametrize("launch", ["source", "restore"])
def test_what_has_not_run_is_told_with_the_reason(launch: str) -> None:
    history = healthy("fsdp2", "fsdp4").ended(launch, never=True)
    skipped = {history.id(launch): "no room for 4 ranks"}
    expected = (VerdictWord.UNPROVEN, Reason.NOT_RUN, "no room for 4 ranks")
    assert early(history.given(skipped=skipped)) == expected
    assert early(history)[:2] == expected[:2]
    assert "has not run" in early(history)[2]
    assert history.verdict().next_move == "continue the run with --resume"


def test_a_source_that_crashed_is_the_sources_failure() -> None:
    history = healthy().cut("source", after=3).ended("source", returncode=1)
    verdict = history.verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.SOURCE_FAILED)
    assert "launches/source.fsdp2/rank0.err" in verdict.next_move


def test_a_source_that_never_trains_is_the_sources_failure() -> None:
    word, reason, text = early(healthy().without("stepped", launch="source"))
    assert (word, reason) == (VerdictWord.UNPROVEN, Reason.SOURCE_FAILED)
    assert "without one training step" in text


def test_a_source_whose_weights_are_updated_by_hand_is_told_so() -> None:
    history = healthy().without("stepped", launch="source").ended("source", timed_out=True)
    history = history.adding(history.fact("unstepped", backwards=64), launch="source")
    word, reason, text = early(history)
    assert (word, reason) == (VerdictWord.UNPROVEN, Reason.SOURCE_FAILED)
    assert "went backward 64 times, and no torch.optim.Optimizer stepped" in text


def test_a_source_that_saves_nothing_is_the_sources_failure() -> None:
    history = healthy("fsdp2", "fsdp4").ended(never=True)
    why = "no checkpoint appeared at step-8"
    word, reason, text = early(history.given(skipped={history.id("restore"): why}))
    assert (word, reason) == (VerdictWord.UNPROVEN, Reason.SOURCE_FAILED)
    assert why in text


def test_a_restore_that_recorded_nothing_is_the_harness() -> None:
    history = healthy("fsdp2", "fsdp4").without().ended(returncode=1, error="torchrun not found")
    verdict = history.verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.HARNESS_ERROR)
    assert "torchrun not found" in verdict.explanation
    assert "launcher.err" in verdict.next_move


def test_nothing_is_said_beside_a_control_that_failed() -> None:
    history = healthy("fsdp2", "fsdp4").differs("weights", "mix.weight")
    word, reason, text = early(history.given(control_failed="weights differ"))
    assert (word, reason) == (VerdictWord.UNPROVEN, Reason.CONTROL_FAILED)
    assert "weights differ" in text


def test_the_baseline_is_its_own_control() -> None:
    assert healthy().given(control_failed="anything").verdict().word is VerdictWord.PASS


def test_what_the_observer_could_not_record_is_no_pass() -> None:
    history = healthy()
    error = [{"type": "builtins.OSError", "message": "disk full"}]
    fact = history.fact("observer_failed", where="Watch.sample", error=error)
    verdict = history.adding(fact).verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.HARNESS_ERROR)
    assert "Watch.sample: disk full" in verdict.explanation
    assert history.adding(fact).differs("weights", "mix.weight").verdict().reason is Reason.DIVERGED


def test_too_few_steps_after_the_restore_are_no_evidence() -> None:
    history = healthy().without("inventory", "roots", "save_begin", "save_end")
    for launch, after in (("source", 9), ("restore", 1)):
        ends = [history.fact("exited", rank, step=after, code=0) for rank in (0, 1)]
        history = history.cut(launch, after=after).adding(*ends, launch=launch)
    verdict = history.verdict()
    assert verdict.reason is Reason.EVIDENCE_MISSING
    assert "after the restore only 1 step could be compared" in verdict.explanation


# ---------------------------------------------------------------- surroundings


def test_another_program_is_another_training() -> None:
    history = healthy().edited("started", lambda s: s.update(program_sha256="0000"))
    assert history.verdict().blame_item is Item.CONFIGURATION
    approved = Policy(approved={"program": "a comment was changed"})
    check = history.given(policy=approved).check(Item.CONFIGURATION)
    assert (check.status, "approved" in check.details[0]) == (Held.HELD, True)


def test_another_version_counts_only_within_one_environment() -> None:
    history = healthy().edited("started", lambda s: s.update(torch="2.4.0"))
    assert history.verdict().blame_item is Item.CONFIGURATION
    plan = history.evidence.plan
    restore = dataclasses.replace(plan.restore, environment="old")
    history = history.given(plan=dataclasses.replace(plan, restore=restore))
    assert history.check(Item.CONFIGURATION).status is Held.HELD


def test_versions_may_be_approved_by_pattern() -> None:
    history = healthy().edited("started", lambda s: s.update(torch="2.4.0"))
    policy = Policy(approved={"software.*": "upgrade"})
    assert history.given(policy=policy).verdict().word is VerdictWord.PASS


def test_a_world_size_that_was_not_planned_is_blamed() -> None:
    history = healthy().edited("started", lambda s: s.update(world_size=1))
    check = history.check(Item.TOPOLOGY)
    assert (check.status, check.subjects) == (Held.BROKEN, ("world size",))


def test_a_load_that_the_observer_does_not_know_is_told() -> None:
    check = healthy().without("load_begin", "load_end").check(Item.TOPOLOGY)
    assert "no load call that the observer knows" in check.summary


# ---------------------------------------------------------------- declarations


def test_an_item_out_of_scope_is_shown_with_the_owners_words_and_what_was_found() -> None:
    policy = Policy(out_of_scope={Item.MOMENTS.value: "SGD later anyway"})
    history = healthy(policy=policy).loses("optimizer")
    assert history.verdict().word is VerdictWord.PASS
    assert (
        "from the weights alone, with a fresh optimizer as declared"
        in history.verdict().explanation
    )
    assert "continues the same training" in healthy(policy=policy).verdict().explanation
    check = history.check(Item.MOMENTS)
    assert check.status is Held.OUT_OF_SCOPE
    assert "SGD later anyway" in check.summary
    assert "fresh optimizer" in check.summary


def test_an_item_that_held_is_shown_as_held_even_if_out_of_scope() -> None:
    policy = Policy(out_of_scope={Item.MOMENTS.value: "whatever"})
    assert healthy(policy=policy).check(Item.MOMENTS).status is Held.HELD


def test_one_declaration_excuses_one_item_only() -> None:
    policy = Policy(out_of_scope={Item.MOMENTS.value: "SGD later anyway"})
    history = healthy(policy=policy).loses("optimizer").differs("weights", "mix.weight")
    assert history.verdict().blame_item is Item.WEIGHTS


# ---------------------------------------------------------------- damage


def test_damage_that_changed_no_byte_did_not_fire() -> None:
    history = damaged()
    assert history.evidence.plan.damage is not None
    unfired = damage_record(history.evidence.plan.damage, fired=False)
    verdict = history.given(damage=unfired).verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.FAULT_NOT_FIRED)
    assert "the bytes are as before" in verdict.explanation


def test_a_guard_that_has_nothing_whole_to_go_back_to_refuses() -> None:
    named = {"problems": [{"kind": "checksum-differs", "path": "__0_0.distcp"}]}
    history = damaged().ended(never=True)
    plan = history.evidence.plan
    assert plan.damage is not None
    record = damage_record(plan.damage, guard_refused=True, manifest=named)
    verdict = history.given(damage=record).verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.REFUSED)
    assert (verdict.blame_item, verdict.blame_subject) == (Item.DAMAGE, "__0_0.distcp")
    assert "checksum-differs" in verdict.explanation
    chosen = damage_record(plan.damage, guard_refused=False, manifest=named)
    assert history.given(damage=chosen).verdict().reason is Reason.NOT_RUN


def test_damage_that_left_no_record_did_not_fire() -> None:
    history = damaged().given(damage=None, skipped={"damage.cell": "no tensor matches *.foo"})
    word, reason, text = early(history)
    assert (word, reason) == (VerdictWord.UNPROVEN, Reason.FAULT_NOT_FIRED)
    assert text == "no tensor matches *.foo"


@pytest.mark.parametrize("kind", list(DamageKind))
def test_damage_that_is_refused_without_going_on_is_unsupported(kind: DamageKind) -> None:
    verdict = damaged(kind).refused(1, 0).verdict()
    assert verdict.claim is Claim.DETECTS_DAMAGE
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.REFUSED)
    assert verdict.blame_subject == "__0_0.distcp"
    assert "training did not go on" in verdict.explanation
    assert "fall back" in verdict.next_move


def test_damage_that_is_trained_on_is_the_alarm_and_names_file_and_tensor() -> None:
    verdict = damaged().differs("weights", "embed.weight").verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.DIVERGED)
    assert verdict.blame_subject == "__0_0.distcp: embed.weight"
    assert "the framework loaded it without a word" in verdict.explanation


def test_damage_that_the_job_never_reads_proves_nothing() -> None:
    verdict = damaged().verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.NOT_EXERCISED)
    assert "as if nothing had happened" in verdict.explanation


def test_falling_back_to_a_whole_older_checkpoint_passes_and_counts_the_lost_steps() -> None:
    policy = Policy(out_of_scope={"epoch boundary": "the older step lies in the first epoch"})
    verdict = damaged(back_to=4).given(policy=policy).verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.PASS, Reason.FELL_BACK)
    assert "step 4, 4 steps are replayed" in verdict.explanation


def test_falling_back_without_the_full_state_is_no_pass() -> None:
    verdict = damaged(back_to=4).loses("optimizer").verdict()
    assert verdict.word is not VerdictWord.PASS


def test_falling_back_and_then_training_otherwise_is_no_pass() -> None:
    policy = Policy(out_of_scope={"epoch boundary": "the older step lies in the first epoch"})
    history = damaged(back_to=4).given(policy=policy)
    history = history.edited("stepped", lambda s: s.update(lr=[0.1]))
    verdict = history.verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.DIVERGED)


def recorded(history: History, **changes: Any) -> History:
    """The same history with another record of its damage."""
    assert history.evidence.plan.damage is not None
    return history.given(damage=damage_record(history.evidence.plan.damage, **changes))


def manifest(*problems: tuple[str, str]) -> dict[str, Any]:
    return {"problems": [{"path": path, "kind": kind} for path, kind in problems]}


DIFFERS = manifest(("__0_0.distcp", "checksum-differs"))
BOTH = manifest(("__0_0.distcp", "checksum-differs"), ("__1_0.distcp", "checksum-differs"))
FILE = "__0_0.distcp"
NAMED = f"a manifest names {FILE} (checksum-differs)"
REFUSED = "the framework noticed and refused it"
UNSEEN = "the job trained as if nothing had happened"
FLIPPED = "bit-flip of __0_0.distcp (tensor embed.weight)"
LOADED = "the framework loaded it without a word"


@pytest.mark.parametrize(
    ("history", "found", "row"),
    [
        (
            damaged().differs("weights", "embed.weight"),
            {"manifest": DIFFERS},
            f"{FLIPPED}; {LOADED}; {NAMED}",
        ),
        (
            damaged(DamageKind.SWAP).differs("weights", "embed.weight"),
            {"manifest": BOTH, "other": "__1_0.distcp"},
            f"swapped __0_0.distcp and __1_0.distcp; {LOADED}; {NAMED.replace(FILE, 'both')}",
        ),
        (
            damaged(DamageKind.FOREIGN_SHARD).refused(0),
            {"manifest": DIFFERS, "foreign_step": 4},
            f"{FILE} (tensor embed.weight) was that of step 4; {REFUSED}; {NAMED}",
        ),
        (
            damaged(back_to=4),
            {"manifest": DIFFERS},
            f"{FLIPPED}; the job went back to step 4; {NAMED}",
        ),
        (
            damaged().differs("weights", "embed.weight"),
            {"manifest": manifest()},
            f"{FLIPPED}; {LOADED}; a manifest finds nothing",
        ),
        (
            damaged(),
            {"manifest": {"problems": None, "refused": "a save in progress"}},
            f"{FLIPPED}; {UNSEEN}; no manifest could be made: a save in progress",
        ),
    ],
    ids=["loaded", "swapped", "refused", "fell back", "nobody", "no manifest"],
)
def test_the_row_of_the_damage_says_who_noticed(
    history: History, found: dict[str, Any], row: str
) -> None:
    verdict = recorded(history, **found).given(policy=ONE_EPOCH).verdict()
    (check,) = (check for check in verdict.checks if check.item is Item.DAMAGE)
    assert (check.status, check.summary) == (Held.HELD, row)
    problems = found["manifest"]["problems"] or ()
    assert check.numbers["manifest"] == [f"{p['path']}: {p['kind']}" for p in problems]


def test_a_guard_that_noticed_is_a_pass_from_the_older_step() -> None:
    history = recorded(damaged(back_to=4), manifest=DIFFERS, selected_step=4)
    verdict = history.given(policy=ONE_EPOCH).verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.PASS, Reason.FELL_BACK)
    assert "the guard verified before the load" in verdict.explanation
    assert verdict.numbers["replayed_steps"] == 4


def test_a_guard_does_not_excuse_what_follows() -> None:
    history = recorded(damaged(back_to=4), manifest=DIFFERS, selected_step=4)
    history = history.given(policy=ONE_EPOCH).edited("stepped", lambda s: s.update(lr=[0.1]))
    assert history.verdict().reason is Reason.DIVERGED


def from_scratch(history: History) -> History:
    facts = run(history.evidence.plan.restore, Training(), at=0).facts
    return history.with_facts("restore", facts)


def test_a_job_that_begins_again_in_silence_is_the_alarm() -> None:
    verdict = from_scratch(damaged()).verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.DIVERGED)
    assert "began again at step 0 without a word, 8 steps are lost" in verdict.explanation
    assert verdict.blame_subject == "__0_0.distcp"


def test_an_unseeded_job_that_begins_again_is_known_by_its_counter() -> None:
    history = from_scratch(damaged()).differs("weights", "mix.weight")
    verdict = history.verdict()
    assert (verdict.reason, verdict.blame_item) == (Reason.DIVERGED, Item.STEP)
    assert "began again at step 0" in verdict.explanation


def test_an_exception_before_the_first_step_has_noticed_the_damage() -> None:
    error = [{"type": "builtins.UnicodeDecodeError", "message": "invalid start byte"}]
    history = (
        damaged()
        .without()
        .adding(*(damaged().fact("crashed", rank, 10.0, error=error) for rank in (0, 1)))
    )
    verdict = history.ended(returncode=1).verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.REFUSED)
    assert "the job stopped on it; training did not go on" in verdict.explanation


# ---------------------------------------------------------------- pointers


def lied_to(lie: str = "missing", *, back_to: int | None = None, after: str = "step-12") -> History:
    pointer = [{"path": "latest", "before": "step-8", "after": after}]
    about = {"file": "latest", "tensor": None, "lie": lie, "pointers": pointer}
    history = damaged(DamageKind.POINTER, back_to=back_to)
    return recorded(history, **about).given(policy=ONE_EPOCH)


def test_a_job_that_is_not_misled_continues() -> None:
    verdict = lied_to().verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.PASS, Reason.HELD)
    assert "latest named step-12, which was not there; the job was not misled" in (
        verdict.explanation
    )


def test_a_job_that_follows_a_stale_pointer_loses_steps_and_nothing_else() -> None:
    verdict = lied_to("stale", back_to=4, after="step-4").verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.PASS, Reason.FELL_BACK)
    assert "latest named the older step-4" in verdict.explanation
    assert verdict.numbers["replayed_steps"] == 4


def test_a_job_that_finds_no_pointer_and_begins_again_is_the_alarm() -> None:
    verdict = from_scratch(lied_to("removed")).verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.DIVERGED)
    assert verdict.explanation.startswith("latest was gone: the job began again at step 0")
    assert verdict.blame_subject == "latest"


@pytest.mark.parametrize("lie", list(PointerLie))
def test_a_job_that_stops_on_a_lie_is_unsupported(lie: PointerLie) -> None:
    verdict = lied_to(lie).refused(0, 1).verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.REFUSED)
    assert verdict.blame_subject == "latest"


def test_a_pointer_that_was_not_changed_is_no_lie() -> None:
    history = damaged(DamageKind.POINTER)
    verdict = recorded(history, file="latest", lie="stale", fired=False).verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.FAULT_NOT_FIRED)


def test_a_mixture_after_a_lie_is_the_alarm() -> None:
    verdict = lied_to().differs("weights", "mix.weight").verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.DIVERGED)


def test_an_older_step_is_no_pass_where_no_damage_was_claimed() -> None:
    """A job that silently resumes from an older checkpoint has lost work."""
    facts = damaged(back_to=4).record("restore").facts
    verdict = healthy().with_facts("restore", facts).verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.DIVERGED)
    assert verdict.numbers["older_step"] == 4


# ---------------------------------------------------------------- purity


def test_judging_twice_gives_the_same_verdict() -> None:
    history = healthy("ddp2", "ddp3")
    before = repr(history.evidence)
    assert history.verdict() == history.verdict()
    assert repr(history.evidence) == before


def test_the_order_of_ranks_on_disk_does_not_matter() -> None:
    history = healthy("fsdp2", "fsdp4").differs("weights", "mix.weight", rank=1)
    backwards = history
    for launch in ("source", "restore", "control", "repeat"):
        ranks = sorted(history.record(launch).facts, key=lambda f: (-f.rank, f.line))
        backwards = backwards.with_facts(launch, ranks)
    one, two = history.verdict(), backwards.verdict()
    assert (one.word, one.reason, one.explanation) == (two.word, two.reason, two.explanation)


@pytest.mark.parametrize(
    "history", [healthy("fsdp2", "ddp1"), healthy("ddp2", "ddp3"), damaged().refused(0)]
)
def test_a_verdict_survives_json(history: History) -> None:
    verdict = history.verdict()
    stored = json.loads(json.dumps(to_json(verdict), allow_nan=False))
    assert to_json(from_json(Verdict, stored)) == stored
    assert from_json(Verdict, stored).checks == tuple(
        dataclasses.replace(c, numbers=stored["checks"][n]["numbers"])
        for n, c in enumerate(verdict.checks)
    )


def test_a_judge_that_fails_passes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(table.states, "weights", fail)
    verdict = healthy().verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.HARNESS_ERROR)
    assert "RuntimeError: a defect" in verdict.explanation


def test_facts_of_another_form_pass_nothing() -> None:
    history = healthy().edited("stepped", lambda s: s.pop("lr"))
    assert history.verdict().reason is Reason.HARNESS_ERROR


def test_phases_are_measured_from_start_to_the_first_step() -> None:
    phases = healthy("fsdp2", "fsdp4").verdict().numbers["phases"]
    assert phases["read"] == 0.25
    assert phases["merged"]


@pytest.mark.parametrize(
    ("root", "steps", "again"),
    [
        ("last.pt", (8, 10), 10),  # the window reaches the next save
        ("", (), 12),
        ("last.pt", (8,), None),
        ("last.pt", (10,), None),  # whose step is not the one under drill is judged as it came back
        ("elsewhere", (8, 10), None),
        (None, (8, 10), None),
    ],
)
def test_a_checkpoint_that_was_saved_over_is_not_blamed_on_the_job(
    root: str | None, steps: tuple[int, ...], again: int | None
) -> None:
    history = healthy("fsdp2", "fsdp2")
    source = history.record("source")
    (saved, *_) = source.of("save_begin")
    named = [structs.replace(saved, step=s, data={"path": "/run/out/last.pt"}) for s in steps]
    history = history.with_facts("source", (*source.facts, *named)).given(checkpoint_root=root)
    assert history.verdict().reason is Reason.HELD  # a later save may have come to nothing
    verdict = history.differs("weights", "embed.weight").verdict()
    assert verdict.reason is (Reason.DIVERGED if again is None else Reason.SOURCE_FAILED)
    if again is not None:
        assert f"saved again at step {again}," in verdict.explanation
        assert f"job.window {again - 8 - 1} " in verdict.next_move


@pytest.mark.parametrize(("end", "said"), [(10, True), (11, False)])
def test_a_script_that_ended_by_itself_is_told_to_train_on(end: int, said: bool) -> None:
    history = healthy("fsdp2", "fsdp2").without("stepped", launch="source", from_step=end + 1)
    history = history.differs("weights", "embed.weight")
    source = history.record("source")
    (saved, *_) = source.of("save_begin")
    again = [structs.replace(saved, step=s, data={"path": "/run/out/last.pt"}) for s in (8, 10)]
    verdict = history.with_facts("source", (*source.facts, *again))
    verdict = verdict.given(checkpoint_root="last.pt").verdict()
    assert ("the script itself ended there" in verdict.explanation) is said
    assert ("let the script train on" in verdict.next_move) is said
    assert ("make job.window" in verdict.next_move) is not said


def test_what_is_loaded_from_memory_is_no_way_to_restore() -> None:
    history = healthy("fsdp2", "fsdp2")
    restore = history.record("restore")
    (load, *_) = restore.of("load_end")
    for path, listed in (("", False), ("/run/extra.pt", True)):
        data = {"t": 9.0, "call": "torch.load", "path": path, "took_s": 0.1}
        extra = structs.replace(load, data=data, line=9000)
        check = history.with_facts("restore", (*restore.facts, extra)).check(Item.TOPOLOGY)
        assert ("torch.load" in check.summary) is listed


def moved(*seen: str) -> History:
    """A restore that was to see `new` as its host; each rank saw one of these."""
    history = healthy("fsdp2", "fsdp2")
    plan = history.evidence.plan
    restore = dataclasses.replace(plan.restore, host="new", id="restore.moved")
    record = dataclasses.replace(history.record("restore"), launch_id=restore.id)
    records = {**history.evidence.records, restore.id: record}
    history = history.given(plan=dataclasses.replace(plan, restore=restore), records=records)
    for rank, host in enumerate(seen):
        history = history.edited("started", lambda d, h=host: d.update(host=h), rank=rank)
    return history


def test_a_restore_on_a_replaced_node_passes_when_it_saw_the_other_name() -> None:
    assert moved("new", "new").verdict().word is VerdictWord.PASS


@pytest.mark.parametrize("seen", [(), ("old", "old"), ("new", "old")])
def test_without_the_other_name_no_node_was_replaced(seen: tuple[str, ...]) -> None:
    verdict = moved(*seen).verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.FAULT_NOT_FIRED)
    assert verdict.explanation.startswith("the restore was to see new as its host")
