"""A good matrix becomes exactly the cells it says; a bad one is explained by line and column."""

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptdrill import matrix, resources, yaml_lines
from ckptdrill.errors import UserError
from ckptdrill.model import Expectation, Item, Reason, Repro, RngPolicy, Topology, VerdictWord

DRILLS = (*matrix.DERIVED_DRILLS, "corrupt-shard", "older-step")
DRILL = '''"""A drill."""
from ckptdrill.model import Claim
CLAIM = Claim.CONTINUES
PARAMETERS = {parameters}
def plan(cell, shared):
    return None
'''
PARAMETERS = {
    "corrupt-shard": '{"kind": ("bit-flip", "truncate", "delete"), "byte": int, "t": str}'
}

# Line numbers matter below: lines are replaced, never added, except at the end.
GOOD = """\
version: 1
name: quick
job:
  program: "{jobs}/train.py"
  args: [--out, "{out}", --save-at, "4,8"]
  resume_args: [--resume, "{resume}"]
  checkpoint: "{out}/step-{step}"
  saves: [4, 8]
  restore_step: 4
  window: 5
  cwd: .
  env: {OMP_NUM_THREADS: 1}
  timeout_s: 120
environments:
  old: {python: /opt/old/bin/python}
topologies:
  one: {}
  two: {dp_shard: 2}
  four: {dp_shard: 4}
repeats: 1
tolerance: {loss: 1.0e-3, safety: 3}
policy:
  rng: {same_world_size: continued, other_world_size: not_guaranteed}
  out_of_scope: {precision: "no scaler in this job"}
  approved: {args.max_steps: "longer run"}
matrix:
  - sources: [two]
    targets: [two, one, four]
  - source: two
    drills: [corrupt-shard: {kind: [bit-flip, truncate, delete]}]
    expect: {verdict: Unsupported, reason: diverged, why: "known"}
planned_path: ["two->one*"]
"""


@pytest.fixture(scope="module", autouse=True)
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder of drills and jobs that no other work on the repository changes."""
    folder = tmp_path_factory.mktemp("shipped") / "drills"
    (folder / "jobs").mkdir(parents=True)
    (folder / "jobs" / "train.py").write_text("print('a job')\n")
    for name in DRILLS:
        text = DRILL.replace("{parameters}", PARAMETERS.get(name, "{}"))
        (folder / f"{name.replace('-', '_')}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resources, "drills_dir", lambda: folder)
        yield folder


def parse(text: str, **options: Any) -> matrix.Matrix:
    return matrix.parse(text.encode(), Path("m.yaml"), **options)


def edited(*changes: tuple[str, str]) -> str:
    text = GOOD
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} must stand once in the good matrix"
        text = text.replace(old, new)
    return text


def entries(text: str) -> str:
    """The good matrix with other entries, which begin in line 27."""
    head = GOOD.split("matrix:\n", maxsplit=1)[0]
    return f"{head}matrix:\n{textwrap.indent(textwrap.dedent(text), '  ')}"


def refusal(text: str | bytes, **options: Any) -> str:
    data = text.encode() if isinstance(text, str) else text
    with pytest.raises(UserError) as caught:
        matrix.parse(data, Path("m.yaml"), **options)
    return caught.value.what


# --------------------------------------------------------------------------------------------------
# Good matrices


def test_the_good_matrix_becomes_its_cells() -> None:
    found = parse(GOOD)
    assert [cell.id for cell in found.cells] == [
        "two_to_two.baseline",
        "two_to_one.dp-shrink",
        "two_to_four.dp-grow",
        "two_to_two.corrupt-shard.bit-flip",
        "two_to_two.corrupt-shard.truncate",
        "two_to_two.corrupt-shard.delete",
    ]
    assert [cell.planned for cell in found.cells] == [False, True, False, False, False, False]
    expected = Expectation(VerdictWord.UNSUPPORTED, Reason.DIVERGED, "known")
    assert [cell.expect for cell in found.cells] == [None] * 3 + [expected] * 3
    assert found.cells[3].parameters == {"kind": "bit-flip"}
    assert (found.name, found.repeats, found.text) == ("quick", 1, GOOD.encode())


def test_sections_become_nouns(shipped: Path) -> None:
    found = parse(GOOD, python="/venv/bin/python")
    here = Path.cwd()
    assert found.job.program == str(shipped / "jobs" / "train.py")
    assert found.job.args == ("--out", "{out}", "--save-at", "4,8")
    assert (found.job.cwd, found.job.timeout_s, found.job.window) == (str(here), 120.0, 5)
    assert found.job.env == {"OMP_NUM_THREADS": "1"}
    assert found.environments["default"].python == "/venv/bin/python"
    assert found.environments["old"].python == "/opt/old/bin/python"
    assert found.topologies["four"] == Topology("four", dp_shard=4)
    assert (found.tolerance.loss, found.tolerance.safety) == (1e-3, 3.0)
    assert found.policy.rng_other_world_size is RngPolicy.NOT_GUARANTEED
    assert found.policy.out_of_scope == {Item.PRECISION.value: "no scaler in this job"}
    assert found.policy.approved == {"args.max_steps": "longer run"}


@pytest.mark.parametrize(
    ("template", "saves", "restore_step", "good"),
    [
        ("{out}", "[6, 9]", "", False),
        ("{out}", "[6, 9]", "restore_step: 6", True),  # a root of generations, on purpose
        ("{out}", "[6]", "", True),
        ("{out}/{step}", "[6, 9]", "", True),
    ],
)
def test_one_place_for_several_saves_needs_a_word_on_what_is_restored(
    template: str, saves: str, restore_step: str, good: bool
) -> None:
    text = edited(
        ('checkpoint: "{out}/step-{step}"', f'checkpoint: "{template}"'),
        ("saves: [4, 8]\n  restore_step: 4", f"saves: {saves}\n  {restore_step}"),
    )
    if good:
        assert parse(text).job.restore_step == 6
        return
    with pytest.raises(
        UserError, match=r"job\.checkpoint: found '\{out\}', one place for the saves"
    ):
        parse(text)


def test_the_smallest_matrix_has_defaults() -> None:
    text = """\
    job:
      module: pkg.train
      args: ["--out={out}"]
      checkpoint: "{out}/{step}"
      saves: [6, 9]
    topologies: {1: {}}
    matrix: [{source: 1}]
    """
    found = parse(textwrap.dedent(text))
    assert [cell.id for cell in found.cells] == ["1_to_1.baseline"]
    assert (found.name, found.job.restore_step, found.job.window, found.repeats) == ("m", 6, 5, 1)
    assert found.cells[0].planned
    assert found.policy.rng_other_world_size is None
    assert found.tolerance.loss is None


@pytest.mark.parametrize(
    ("source", "target", "name"),
    [
        ({}, {}, "baseline"),
        ({"dp_shard": 4}, {"dp_shard": 2}, "dp-shrink"),
        ({"dp_shard": 2}, {"dp_shard": 3}, "dp-grow"),
        ({"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2}, "dp-shrink"),
        ({"dp_replicate": 4}, {"dp_shard": 4}, "sharding-change"),
        ({"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 4}, "sharding-change"),
        ({"tp": 2}, {"tp": 1}, "tp-change"),
        ({"pp": 2}, {"pp": 4}, "pp-change"),
        ({"cp": 2}, {"cp": 1}, "topology-change"),
        ({"dp_shard": 4}, {"dp_shard": 2, "tp": 2}, "topology-change"),
        (
            {"dp_replicate": 2, "zero_stage": 1},
            {"dp_replicate": 2, "zero_stage": 3},
            "zero-stage-change",
        ),
        (
            {"dp_replicate": 2, "zero_stage": 1},
            {"dp_replicate": 4, "zero_stage": 3},
            "topology-change",
        ),
        ({"dp_shard": 4, "nodes": 2}, {"dp_shard": 4}, "replacement-nodes"),
        ({"dp_shard": 4, "nodes": 2}, {"dp_shard": 2}, "dp-shrink"),
    ],
)
def test_the_difference_names_the_drill(
    source: dict[str, int], target: dict[str, int], name: str
) -> None:
    pair = Topology("a", **source), Topology("b", **target)
    assert matrix.derive(pair[0], "default", pair[1], "default") == name
    assert matrix.derive(pair[0], "old", pair[1], "default") == "version-skew"


def test_environments_are_part_of_the_address() -> None:
    cells = parse(entries("- {source: two@old, target: one}")).cells
    assert [cell.id for cell in cells] == [
        "two-old_to_two-old.baseline",
        "two-old_to_one.version-skew",
    ]
    assert (cells[1].source_environment, cells[1].target_environment) == ("old", "default")


def test_an_environment_may_lie_over_the_interpreter_of_default() -> None:
    own = 'over: {python: "{python}", requirements: [deepspeed==0.17.6], no_deps: true}'
    text = edited(("environments:\n", f"environments:\n  {own}\n"))
    given = parse(text, python="/given/python").environments
    assert given["over"].python == given["default"].python == "/given/python"
    assert given["over"].inherits
    assert parse(text).environments["over"].python == sys.executable


def test_a_written_baseline_is_not_added_again() -> None:
    text = entries("""\
        - {source: two, target: one}
        - {source: two, drill: baseline, expect: {verdict: Unproven}}
    """)
    ids = [cell.id for cell in parse(text).cells]
    assert ids == ["two_to_one.dp-shrink", "two_to_two.baseline"]


def test_a_baseline_of_an_equal_layout_is_not_the_control() -> None:
    text = entries("- {source: two, target: zwei}").replace("  one: {}", "  zwei: {dp_shard: 2}")
    ids = [cell.id for cell in parse(text).cells]
    assert ids == ["two_to_two.baseline", "two_to_zwei.baseline"]


def test_lists_of_parameters_multiply_in_the_order_of_their_names() -> None:
    text = entries(
        "- {source: two, drill: {corrupt-shard: {kind: [delete, truncate], byte: [7, 8]}}}"
    )
    assert [cell.id for cell in parse(text).cells][1:] == [
        "two_to_two.corrupt-shard.7.delete",
        "two_to_two.corrupt-shard.8.delete",
        "two_to_two.corrupt-shard.7.truncate",
        "two_to_two.corrupt-shard.8.truncate",
    ]


def test_ids_are_safe_for_folders() -> None:
    text = entries("- {source: two, drill: {corrupt-shard: {t: '../layers.*/weight'}}}")
    assert parse(text).cells[1].id == "two_to_two.corrupt-shard.layers.-weight"


def test_the_first_rule_that_applies_is_what_is_expected() -> None:
    text = entries("""\
        - source: two
          targets: [two, one, four]
          drills: [corrupt-shard: {kind: [delete, truncate]}]
          expect:
            - {verdict: Unproven, when: {kind: truncate, target: [one, four]}}
            - {verdict: Unsupported, reason: refused, when: {drill: corrupt-shard, target: one}}
    """)
    words = {cell.id: cell.expect and cell.expect.verdict.value for cell in parse(text).cells}
    assert words == {
        "two_to_two.baseline": None,
        "two_to_two.corrupt-shard.delete": None,
        "two_to_two.corrupt-shard.truncate": None,
        "two_to_one.corrupt-shard.delete": "Unsupported",
        "two_to_one.corrupt-shard.truncate": "Unproven",
        "two_to_four.corrupt-shard.delete": None,
        "two_to_four.corrupt-shard.truncate": "Unproven",
    }


def test_without_a_planned_path_every_change_that_can_be_derived_is_on_it() -> None:
    found = parse(edited(('planned_path: ["two->one*"]\n', "")))
    assert [cell.planned for cell in found.cells] == [True] * 3 + [False] * 3


def test_a_planned_path_can_name_the_folder_too() -> None:
    found = parse(edited(("two->one*", "*.corrupt-shard.*e")))
    assert [cell.id for cell in found.cells if cell.planned] == [
        "two_to_two.corrupt-shard.truncate",
        "two_to_two.corrupt-shard.delete",
    ]


@pytest.mark.parametrize(
    ("written", "value"),
    [("1e-3", 1e-3), ("'1e-3'", 1e-3), ("0.5", 0.5), ("1", 1.0), ("1.5E+2", 150.0)],
)
def test_numbers_are_numbers_however_yaml_1_1_saw_them(written: str, value: float) -> None:
    assert parse(edited(("1.0e-3", written))).tolerance.loss == value


def test_environment_variables_stay_as_they_are_written() -> None:
    text = edited(("{OMP_NUM_THREADS: 1}", "{A: 1.10, B: true, C: 010, on: off, D: '', E: 1:30}"))
    assert dict(parse(text).job.env) == {
        "A": "1.10", "B": "true", "C": "010", "on": "off", "D": "", "E": "1:30",
    }  # fmt: skip


def test_anchors_and_merge_keys_work() -> None:
    text = edited(
        ("two: {dp_shard: 2}", "two: &base {dp_shard: 2, tp: 2}"),
        ("four: {dp_shard: 4}", "four: {<<: *base, dp_shard: 4}"),
    )
    assert parse(text).topologies["four"] == Topology("four", dp_shard=4, tp=2)


def test_dp_is_the_number_of_replicas() -> None:
    text = edited(("two: {dp_shard: 2}", "two: {dp: 2, zero_stage: 3, world_size: 2}"))
    assert parse(text).topologies["two"] == Topology("two", dp_replicate=2, zero_stage=3)


def test_one_word_for_rng_speaks_of_the_same_world_size() -> None:
    line = "{same_world_size: continued, other_world_size: not_guaranteed}"
    policy = parse(edited((line, "reseeded"))).policy
    assert policy.rng_same_world_size is RngPolicy.RESEEDED
    assert policy.rng_other_world_size is None


def test_the_full_text_of_an_item_is_a_name_too() -> None:
    text = edited(("precision:", '"the job\'s own saved state":'))
    assert Item.INVENTORY.value in parse(text).policy.out_of_scope


def test_only_topologies_in_use_must_fit_the_node() -> None:
    text = entries("- {source: two, target: one}")
    assert parse(text, devices=2).topologies["four"].world_size == 4


def test_a_job_may_name_its_stack() -> None:
    assert parse(GOOD).job.stack is None
    assert parse(edited(("  cwd: .", "  stack: deepspeed-native"))).job.stack == "deepspeed-native"


def test_an_entry_that_is_not_run_starts_nothing_and_needs_no_drill_or_room() -> None:
    text = entries(
        """
        - {source: two, target: one}
        - {sources: [four], target: wide, run: false}
        """
    ).replace("  one: {}", "  one: {}\n  wide: {tp: 512}")
    found = parse(text, devices=2)
    assert [(cell.id, cell.drilled) for cell in found.cells] == [
        ("two_to_two.baseline", True),
        ("two_to_one.dp-shrink", True),
        ("four_to_wide.topology-change", False),
    ]


# --------------------------------------------------------------------------------------------------
# Bad matrices: (what is changed, line:column, fragments of the message)

BAD: dict[str, tuple[str | bytes, str, tuple[str, ...]]] = {
    # the file
    "empty": ("", "1:1", ("the file is empty",)),
    "comment only": ("# nothing\n", "1:1", ("the file is empty",)),
    "list": ("- a\n", "1:1", ("found a list of 1", "allowed: a mapping")),
    "text": ("hello", "1:1", ("found 'hello', text", "allowed: a mapping")),
    "too large": (b"#" * (yaml_lines.SIZE_LIMIT_BYTES + 1), "1:1", ("allowed: up to 1 MiB",)),
    "latin-1": ("a: 1\nname: Zo\xeb\n".encode("latin-1"), "2:9", ("not UTF-8", "0xeb")),
    "control character": (b"a: 1\nb: \x07\n", "2:4", ("not YAML", "not allowed")),
    "tab": ("job:\n\tprogram: a.py\n", "2:1", ("found a tab", "spaces only")),
    "unclosed": ("job: [1, 2\n", "2:1", ("not YAML", "expected ',' or ']'")),
    "two documents": ("a: 1\n---\nb: 1\n", "2:1", ("second document",)),
    "escape beyond unicode": ('a: "\\UFFFFFFFF"', "1:1", ("not YAML",)),
    "NUL": (edited(("name: quick", 'name: "a\\0b"')), "2:7", ("name: found a NUL",)),
    "surrogate": (edited(("name: quick", 'name: "\\ud800"')), "2:7", ("half a surrogate",)),
    "deep": ("a: " + "[" * 40 + "]" * 40, "1:23", ("nested too deeply", "20 levels")),
    "unknown anchor": ("a: &x 1\nb: *y\n", "2:4", ("b: found the unknown anchor *y", "*x")),
    "anchor inside itself": ("a: &x [*x]\n", "1:8", ("unknown anchor *x", "none is defined")),
    "alias bomb": (
        "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
        + "".join(
            f"{b}: &{b} [{','.join(['*' + a] * 10)}]\n"
            for a, b in zip("abcde", "bcdef", strict=True)
        ),
        "5:8",
        ("e: too many values", "20000"),
    ),
    "python tag": (
        edited(("repeats: 1", "repeats: !!python/object/apply:os.system [id]")),
        "20:10",
        ("repeats: found the tag 'tag:yaml.org,2002:python/object/apply:os.system'",),
    ),
    "duplicate key": (
        edited(("repeats: 1", "version: 1")),
        "20:1",
        ("version: duplicate key", "line 1"),
    ),
    "duplicate topology": (
        edited(("one: {}", "two: {}")),
        "18:3",
        ("topologies.two: duplicate", "line 17"),
    ),
    "list as key": ("? [a]\n: 1\n", "1:3", ("a list or a mapping as a key",)),
    "bare placeholder": (
        edited(('checkpoint: "{out}/step-{step}"', "checkpoint: {out}/step-{step}")),
        "7:20",
        ("needs quotes",),
    ),
    "merge of text": ("a: {<<: b}", "1:9", ("a.<<: found a value that is no mapping",)),
    # keys
    "unknown key": (
        edited(("  saves: [4, 8]", "  sav3s: [4, 8]")),
        "8:3",
        ("job.sav3s: unknown key (did you mean 'saves'?)", "allowed: program, module"),
    ),
    "unknown top key": (
        edited(("repeats: 1", "repeat: 1")),
        "20:1",
        ("repeat: unknown key", "'repeats'"),
    ),
    "unknown degree": (
        edited(("two: {dp_shard: 2}", "two: {dp_shrd: 2}")),
        "18:9",
        ("topologies.two.dp_shrd: unknown key (did you mean 'dp_shard'?)",),
    ),
    "unknown entry key": (
        edited(("    targets: [two", "    tragets: [two")),
        "28:5",
        ("matrix[0].tragets: unknown key (did you mean 'targets'?)",),
    ),
    "unknown expect key": (
        edited(("reason: diverged", "raeson: diverged")),
        "31:36",
        ("expect[0].raeson", "did you mean 'reason'"),
    ),
    "unknown rng key": (
        edited(("{same_world_size: c", "{some_world_size: c")),
        "23:9",
        ("policy.rng.some_world_size", "'same_world_size'"),
    ),
    "missing job": (
        "topologies: {a: {}}\nmatrix: [{source: a}]\n",
        "1:1",
        ("job: required, but missing",),
    ),
    "missing checkpoint": (
        edited(('  checkpoint: "{out}/step-{step}"', "")),
        "3:1",
        ("job.checkpoint: required, but missing",),
    ),
    # values
    "version": (edited(("version: 1", "version: 2")), "1:10", ("version: found 2", "allowed: 1")),
    "name is a path": (
        edited(("name: quick", "name: ../up")),
        "2:7",
        ("name: found", "folder name"),
    ),
    "saves as text": (
        edited(("saves: [4, 8]", "saves: 4")),
        "8:10",
        ("found 4, a number", "a list, as [4]"),
    ),
    "saves of text": (
        edited(("saves: [4, 8]", "saves: [4, x]")),
        "8:14",
        ("job.saves[1]: found 'x', text", "an integer"),
    ),
    "saves empty": (edited(("saves: [4, 8]", "saves: []")), "8:10", ("at least 1",)),
    "saves zero": (edited(("saves: [4, 8]", "saves: [0, 8]")), "8:11", ("found 0", "at least 1")),
    "saves unsorted": (edited(("saves: [4, 8]", "saves: [8, 4, 4]")), "8:10", ("as [4, 8]",)),
    "saves true": (
        edited(("saves: [4, 8]", "saves: [true]")),
        "8:11",
        ("found true, a truth value",),
    ),
    "restore step": (
        edited(("restore_step: 4", "restore_step: 5")),
        "9:17",
        ("job.restore_step: found 5", "one of saves, [4, 8]"),
    ),
    "window": (edited(("window: 5", "window: 1")), "10:11", ("found 1", "at least 2")),
    "window fraction": (edited(("window: 5", "window: 2.5")), "10:11", ("found 2.5", "an integer")),
    "timeout": (edited(("timeout_s: 120", "timeout_s: 0")), "13:14", ("found 0", "more than 0")),
    "timeout text": (
        edited(("timeout_s: 120", "timeout_s: 2m")),
        "13:14",
        ("found '2m', text", "a number"),
    ),
    "timeout overflow": (
        edited(("timeout_s: 120", "timeout_s: 1e999")),
        "13:14",
        ("a finite number",),
    ),
    "program and module": (
        edited(("cwd: .", "module: a.b")),
        "11:11",
        ("job.module: program and module are both",),
    ),
    "no program": (
        edited(('  program: "{jobs}/train.py"', "")),
        "3:1",
        ("neither program nor module",),
    ),
    "program placeholder": (
        edited(("{jobs}/train.py", "{job}/train.py")),
        "4:12",
        ("unknown placeholder {job} (did you mean 'jobs'?)", "allowed: {jobs}"),
    ),
    "placeholder": (
        edited(('--out, "{out}"', '--out, "{oout}"')),
        "5:17",
        ("job.args[1]: unknown placeholder {oout} (did you mean 'out'?)",),
    ),
    "lone brace": (edited(("4,8", "{4,8")), "5:37", ("a lone '{'", "'{{'")),
    "placeholder without quotes": (
        edited(('--out, "{out}"', "--out, {out}")),
        "5:17",
        ("found a mapping with out", 'needs quotes, as "{out}"'),
    ),
    "env placeholder": (
        edited(("{OMP_NUM_THREADS: 1}", '{A: "{wrold_size}"}')),
        "12:12",
        ("job.env.A", "did you mean 'world_size'"),
    ),
    "env nothing": (edited(("{OMP_NUM_THREADS: 1}", "{A: }")), "12:11", ("found nothing", "text")),
    "checkpoint elsewhere": (
        edited(('"{out}/step-{step}"', "/data/ckpt")),
        "7:15",
        ("without {out}",),
    ),
    "checkpoint resume": (
        edited(("{out}/step-{step}", "{out}/{resume}")),
        "7:15",
        ("{resume} is what",),
    ),
    "out unused": (
        edited(('--out, "{out}"', "--out, here")),
        "3:1",
        ("neither args nor env holds {out}",),
    ),
    "start without step": (
        edited(("cwd: .", "start_from: /ckpt")),
        "11:15",
        ("job.start_from: start_from and start_step go together",),
    ),
    "start after saves": (
        edited(("cwd: .", "start_from: /ckpt"), ("window: 5", "start_step: 4")),
        "8:10",
        ("job.saves: begins at 4", "steps after start_step, 4"),
    ),
    "environment empty": (
        edited(("{python: /opt/old/bin/python}", "{}")),
        "15:3",
        ("says nothing",),
    ),
    "topology name": (edited(("  one: {}", "  o.ne: {}")), "17:3", ("found 'o.ne'", "letters")),
    "topology nothing": (edited(("  one: {}", "  one:")), "17:7", ("found nothing", "a mapping")),
    "degree zero": (edited(("two: {dp_shard: 2}", "two: {dp_shard: 0}")), "18:19", ("at least 1",)),
    "zero stage": (
        edited(("two: {dp_shard: 2}", "two: {dp: 2, zero_stage: 4}")),
        "18:28",
        ("at most 3",),
    ),
    "does not multiply out": (
        edited(("two: {dp_shard: 2}", "two: {dp_shard: 2, tp: 2, world_size: 8}")),
        "18:41",
        ("topologies.two.world_size: found 8", "dp 2 × tp 2 × pp 1 × cp 1 = 4"),
    ),
    "two dps": (
        edited(("two: {dp_shard: 2}", "two: {dp: 2, dp_shard: 2}")),
        "18:13",
        ("topologies.two.dp: ambiguous",),
    ),
    "ep": (
        edited(("two: {dp_shard: 2}", "two: {dp_shard: 2, ep: 4}")),
        "18:26",
        ("two.ep: found 4", "a divisor of dp 2"),
    ),
    "nodes": (
        edited(("two: {dp_shard: 2}", "two: {dp_shard: 2, nodes: 3}")),
        "18:29",
        ("two.nodes: found 3", "the 2 ranks"),
    ),
    "no topologies": (
        edited(("  one: {}\n  two: {dp_shard: 2}\n  four: {dp_shard: 4}\n", "  {}\n")),
        "17:3",
        ("topologies: found an empty mapping", "at least 1"),
    ),
    "tolerance": (edited(("1.0e-3", "tight")), "21:19", ("found 'tight', text", "a number")),
    "tolerance sign": (edited(("1.0e-3", "-1")), "21:19", ("more than 0",)),
    "tolerance nan": (edited(("1.0e-3", ".nan")), "21:19", ("found '.nan', text",)),
    "rng word": (
        edited(("other_world_size: not_guaranteed", "other_world_size: not-guarantied")),
        "23:55",
        ("did you mean 'not_guaranteed'", "allowed: continued, reseeded, not_guaranteed"),
    ),
    "rng one word": (
        edited(("{same_world_size: continued, other_world_size: not_guaranteed}", "same")),
        "23:8",
        ("found 'same', text", "allowed: continued"),
    ),
    "item": (edited(("precision:", "precission:")), "24:18", ("did you mean 'precision'",)),
    "comma in an item": (
        edited(("precision:", "scaler, precision:")),
        "24:18",
        ("policy.out_of_scope.scaler", "unknown state item"),
    ),
    "verdict": (
        edited(("verdict: Unsupported", "verdict: unsuported")),
        "31:23",
        ("did you mean 'Unsupported'", "allowed: Pass, Unsupported, Unproven"),
    ),
    "reason": (
        edited(("reason: diverged", "reason: diverge")),
        "31:44",
        ("did you mean 'diverged'",),
    ),
    # entries
    "source and sources": (
        edited(("    targets: [two", "    source: one\n    targets: [two")),
        "28:13",
        ("matrix[0].source: source and sources are both given",),
    ),
    "no source": (
        edited(("  - sources: [two]\n    targets", "  - targets")),
        "27:5",
        ("no source",),
    ),
    "unknown source": (
        edited(("sources: [two]", "sources: [tow]")),
        "27:15",
        ("matrix[0].sources[0]: unknown topology 'tow'", "'two'", "one, two, four"),
    ),
    "unknown target": (edited(("one, four]", "one, fuor]")), "28:25", ("targets[2]", "'four'")),
    "unknown environment": (
        edited(("sources: [two]", "sources: [two@odl]")),
        "27:15",
        ("unknown environment 'odl' (did you mean 'old'?)", "default, old"),
    ),
    "empty targets": (
        edited(("targets: [two, one, four]", "targets: []")),
        "28:14",
        ("at least 1",),
    ),
    "unknown drill": (
        edited(("corrupt-shard", "corupt-shard")),
        "30:14",
        ("no drill 'corupt-shard' (did you mean 'corrupt-shard'?)",),
    ),
    "unknown drill as text": (
        entries("- {source: two, drill: dp-shrnk}"),
        "27:26",
        ("matrix[0].drill: no drill", "'dp-shrink'"),
    ),
    "drill of another version": (
        entries("- {source: two, drill: storage-stall}"),
        "27:26",
        ("the drill 'storage-stall' is known, but not in this version", "allowed: ", "dp-shrink"),
    ),
    "drill path": (
        entries("- {source: two, drill: ../jobs/train}"),
        "27:26",
        ("no drill '../jobs/train'",),
    ),
    "two keys in a drill": (
        entries("- {source: two, drill: {a: {}, b: {}}}"),
        "27:19",
        ("found a mapping with a, b", "a drill's name"),
    ),
    "unknown parameter": (
        edited(("{kind: [", "{knid: [")),
        "30:30",
        ("unknown parameter (did you mean 'kind'?)", "allowed: kind, byte, t"),
    ),
    "parameter value": (
        edited(("[bit-flip, truncate", "[bit-flip, trunkate")),
        "30:47",
        ("kind[1]: found 'trunkate', text", "did you mean 'truncate'"),
    ),
    "parameter type": (
        entries("- {source: two, drill: {corrupt-shard: {byte: x}}}"),
        "27:49",
        ("an integer",),
    ),
    "parameter nothing": (
        entries("- {source: two, drill: {corrupt-shard: {kind: []}}}"),
        "27:49",
        ("an empty list",),
    ),
    "misnamed drill": (
        entries("- {source: two, target: four, drill: dp-shrink}"),
        "27:40",
        ("two->four is 'dp-grow', not 'dp-shrink'",),
    ),
    "twice in an entry": (
        edited(("targets: [two, one, four]", "targets: [one, one]")),
        "27:5",
        ("two_to_one.dp-shrink comes out of this entry twice",),
    ),
    "twice in two entries": (
        entries("- {source: two, target: one}\n- {source: two, target: one}"),
        "28:5",
        ("two_to_one.dp-shrink comes from matrix[0] in line 27",),
    ),
    "id too long": (
        entries(f"- {{source: two, drill: {{corrupt-shard: {{t: {'x' * 200}}}}}}}"),
        "27:26",
        ("cannot be a folder name",),
    ),
    "too many cells": (
        entries(
            "- {source: two, drill: {corrupt-shard: "
            f"{{byte: {list(range(80))}, t: {list('abcdefgh' * 10)}}}}}}}"
        ),
        "27:5",
        ("too many cells", "5000"),
    ),
    "rule decides nothing": (
        edited(("reason: diverged", "when: {kind: torn}")),
        "31:5",
        ("this rule decides no cell",),
    ),
    "rule condition": (
        edited(("reason: diverged", "when: {knid: delete}")),
        "31:43",
        ("unknown condition (did you mean 'kind'?)", "drill, kind, source, target"),
    ),
    "planned path": (
        edited(("two->one*", "tow->one*")),
        "32:16",
        ("matches no cell", "two->one:dp-shrink"),
    ),
    "planned path empty": (edited(('["two->one*"]', "[]")), "32:15", ("at least 1",)),
    "stage of nothing": (edited(("4,8", "{zero_stage}")), "18:3", ("has no zero_stage",)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_matrix_is_explained(name: str) -> None:
    text, place, fragments = BAD[name]
    message = refusal(text)
    lines = [line for line in message.splitlines() if line.startswith(f"m.yaml:{place}")]
    assert any(all(part in line for part in fragments) for line in lines), message


def test_a_misspelt_stack_is_explained() -> None:
    message = refusal(edited(("  cwd: .", "  stack: dcp_fsdp_2")))
    assert (
        "m.yaml:11:10: job.stack: unknown stack 'dcp_fsdp_2' (did you mean 'dcp-fsdp2'?" in message
    )


def test_the_schema_lists_the_stacks() -> None:
    stack = matrix.json_schema()["$defs"]["JobSection"]["properties"]["stack"]
    names = stack["anyOf"][0]["enum"]
    assert "deepspeed-universal" in names
    assert "gcs" not in names


def test_storage_is_no_stack_of_a_job() -> None:
    assert "allowed: dcp-ddp" in refusal(edited(("  cwd: .", "  stack: s3")))


def test_a_baseline_is_always_drilled() -> None:
    message = refusal(entries("- {source: two, target: two, run: false}"))
    assert "a baseline is the control of every verdict: it cannot have run: false" in message


def test_what_does_not_fit_the_node_is_refused() -> None:
    message = refusal(GOOD, devices=2)
    assert (
        message == "m.yaml:19:3: topologies.four: 4 ranks do not fit this node; allowed: at most 2"
    )


def test_all_problems_are_told_at_once_in_file_order() -> None:
    text = edited(("saves: [4, 8]", "saves: 4"), ("repeats: 1", "version: 2"), ("1.0e-3", "tight"))
    places = [line.split(": ")[0] for line in refusal(text).splitlines()]
    assert places == ["m.yaml:8:10", "m.yaml:20:1", "m.yaml:20:10", "m.yaml:21:19"]


def test_at_most_ten_problems_are_told() -> None:
    text = GOOD + "".join(f"k{number}: 1\n" for number in range(15))
    lines = refusal(text).splitlines()
    assert len(lines) == 11
    assert lines[-1] == "… and 5 more"


def test_a_name_that_the_file_cannot_give_is_asked_for() -> None:
    text = edited(("name: quick\n", "")).encode()
    with pytest.raises(UserError, match="add a name"):
        matrix.parse(text, Path("my matrix.yaml"))


def test_a_change_without_its_drill_lists_what_there_is(
    shipped: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "baseline.py").write_text((shipped / "baseline.py").read_text())
    monkeypatch.setattr(resources, "drills_dir", lambda: tmp_path)
    message = refusal(entries("- {source: two, target: one}"))
    expected = (
        "two->one is the drill 'dp-shrink', which is known, but not in this version; "
        "available: baseline"
    )
    assert f"m.yaml:27:5: matrix[0]: {expected}" in message


def test_a_broken_drill_file_is_named(
    shipped: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "baseline.py").write_text("")
    monkeypatch.setattr(resources, "drills_dir", lambda: tmp_path)
    message = refusal(entries("- {source: two, drill: baseline}"))
    assert "the drill 'baseline' has no docstring" in message
    assert str(tmp_path / "baseline.py") in message


# --------------------------------------------------------------------------------------------------
# What the file names on disk


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """A matrix of one program beside it, everything it names in place."""
    (tmp_path / "train.py").write_text("import this\n")
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\n")
    interpreter.chmod(0o755)
    path = tmp_path / "m.yaml"
    changes = ("{jobs}/train.py", "train.py"), ("/opt/old/bin/python", "./python")
    path.write_text(edited(*changes))
    return path


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def load_refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        matrix.load(path)
    return str(caught.value)


def test_paths_start_from_the_folder_of_the_matrix(on_disk: Path) -> None:
    found = matrix.load(on_disk)
    assert found.job.program == str(on_disk.parent / "train.py")
    assert found.job.cwd == str(on_disk.parent)
    assert found.environments["old"].python == str(on_disk.parent / "python")


def test_a_missing_matrix_is_told_with_its_neighbours(on_disk: Path) -> None:
    message = load_refusal(on_disk.with_name("n.yaml"))
    assert "cannot read the matrix: No such file" in message
    assert "m.yaml" in message


@pytest.mark.parametrize(
    ("old", "new", "fragments"),
    [
        ("train.py", "trian.py", ("no Python file", "m.yaml:4:12: job.program", "'train.py'")),
        ("train.py", "train.sh", ("is no .py file", "m.yaml:4:12")),
        ("cwd: .", "cwd: nowhere", ("no folder", "m.yaml:11:8: job.cwd")),
        ("targets: [two,", "targets: [two@old,", ()),
        ("./python", "./pyhton", ()),
    ],
)
def test_what_is_not_there_is_named(
    on_disk: Path, old: str, new: str, fragments: tuple[str, ...]
) -> None:
    change(on_disk, old, new)
    if not fragments:
        matrix.load(on_disk)
        return
    message = load_refusal(on_disk)
    assert all(fragment in message for fragment in fragments), message


def test_an_interpreter_in_use_must_exist(on_disk: Path) -> None:
    change(on_disk, "targets: [two,", "targets: [two@old,")
    (on_disk.parent / "python").chmod(0o644)
    message = load_refusal(on_disk)
    assert "environment 'old': no interpreter" in message
    assert "m.yaml:15:17: environments.old.python" in message


def test_an_interpreter_of_the_command_line_must_exist(on_disk: Path) -> None:
    with pytest.raises(
        UserError, match="environment 'default': no interpreter /no/python"
    ) as caught:
        matrix.load(on_disk, python="/no/python")
    assert caught.value.where == "--python"


def test_a_bad_window_hides_no_step_that_is_not_saved() -> None:
    found = refusal(edited(("window: 5", "window: 1"), ("restore_step: 4", "restore_step: 5")))
    assert "job.window: found 1" in found
    assert "job.restore_step: found 5; allowed: one of saves, [4, 8]" in found


def with_repro(path: Path, program: str) -> None:
    change(path, 'why: "known"', f'why: "known", repro: {{program: "{program}", ranks: 2}}')


def test_a_program_that_shows_what_is_expected_lies_below_the_matrix(on_disk: Path) -> None:
    (on_disk.parent / "shows").mkdir()
    (on_disk.parent / "shows" / "flip.py").write_text("print('see')\n")
    with_repro(on_disk, "shows/flip.py")
    expected = Repro(str(on_disk.parent / "shows" / "flip.py"), 2)
    told = [cell.expect and cell.expect.repro for cell in matrix.load(on_disk).cells]
    assert told == [None] * 3 + [expected] * 3


def test_a_shipped_program_is_named_by_its_placeholder(on_disk: Path, shipped: Path) -> None:
    (shipped / "repros").mkdir(exist_ok=True)
    (shipped / "repros" / "flip.py").write_text("print('see')\n")
    with_repro(on_disk, "{repros}/flip.py")
    last = matrix.load(on_disk).cells[-1].expect
    assert last is not None
    assert last.repro == Repro(str(shipped / "repros" / "flip.py"), 2)


@pytest.mark.parametrize(
    ("program", "fragments"),
    [
        ("gone.py", ("no Python file", "m.yaml:31:", "matrix[1].expect[0].repro.program")),
        ("../train.py", ("m.yaml:31:", "repro.program", "below the folder of the matrix")),
        ("/tmp/train.py", ("m.yaml:31:", "below the folder of the matrix")),
        ("{repros}/../train.py", ("m.yaml:31:", "'{repros}/NAME.py'")),
        ("{jobs}/train.py", ("unknown placeholder {jobs}", "allowed: {repros}")),
        ("link.py", ("is a link to another folder", "m.yaml:31:", "copy it into the folder")),
        ("torn.py", ("not Python", "m.yaml:31:")),
    ],
)
def test_a_program_elsewhere_or_none_is_refused(
    on_disk: Path,
    tmp_path_factory: pytest.TempPathFactory,
    program: str,
    fragments: tuple[str, ...],
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "secret.py"
    elsewhere.write_text("print('not yours')\n")
    (on_disk.parent / "link.py").symlink_to(elsewhere)
    (on_disk.parent / "torn.py").write_text("def\n")
    with_repro(on_disk, program)
    message = load_refusal(on_disk)
    assert all(fragment in message for fragment in fragments), message


def test_no_text_of_the_file_reaches_the_terminal_raw() -> None:
    message = refusal(GOOD + '"\\e[2J\\n": 1\n')
    assert "\\x1b[2J\\n: unknown key" in message
    assert message.isascii()


def test_an_endless_word_is_cut() -> None:
    (line,) = [line for line in refusal(GOOD + "k" * 900 + ": 1\n").splitlines() if ":33:" in line]
    assert len(line) < 400


def test_a_checkpoint_to_start_from_must_exist(on_disk: Path) -> None:
    change(on_disk, "cwd: .", "start_from: step-3")
    change(on_disk, "window: 5", "start_step: 3")
    assert "m.yaml:11:15: job.start_from" in load_refusal(on_disk)
    (on_disk.parent / "step-3").mkdir()
    job = matrix.load(on_disk).job
    assert (job.start_from, job.start_step) == (str(on_disk.parent / "step-3"), 3)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (b"x = 1\nif x\n", ":2: not Python"),
        (b"x = '\\d'\n", ""),
        (b"\0", "not Python"),
        (b"# coding: no-such\n", "not Python"),
        (b"(" * 5000, "not Python"),
    ],
)
def test_a_program_must_compile(on_disk: Path, program: bytes, words: str) -> None:
    (on_disk.parent / "train.py").write_bytes(program)
    if words:
        assert words in load_refusal(on_disk)
    else:
        matrix.load(on_disk)


# --------------------------------------------------------------------------------------------------
# Placeholders


def test_placeholders_are_filled_and_braces_escaped() -> None:
    topology = Topology("mesh", dp_replicate=2, dp_shard=3, tp=2, zero_stage=1)
    values = matrix.placeholder_values(topology, out=Path("/o"), resume=None, step=4)
    text = "{out}/{step}:{resume}:{dp}:{tp}:{world_size}:{zero_stage}:{topology}"
    assert matrix.fill(text, values, "args") == "/o/4::6:2:12:1:mesh"
    assert matrix.fill('{{"a": {{{tp}}}}}', values, "args") == '{"a": {2}}'
    assert {*values, "jobs"} == set(matrix.PLACEHOLDERS)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{resum}", "unknown placeholder {resum} (did you mean 'resume'?)"),
        ("{step", "a lone '{'"),
        ("{zero_stage}", "{zero_stage} has no value here"),
        ("{out.__class__}", "unknown placeholder"),
        ("{0}", "unknown placeholder"),
        ("{out!r}", "unknown placeholder"),
        ("{out:>9}", "cannot format"),
    ],
)
def test_a_placeholder_that_cannot_be_filled_is_named(template: str, words: str) -> None:
    values = matrix.placeholder_values(Topology("a"), out="/o", resume="/r", step=4)
    with pytest.raises(UserError) as caught:
        matrix.fill(template, values, "job.args[0]")
    assert words in caught.value.what
    assert caught.value.where == "job.args[0]"


@given(st.text(alphabet="{}ab c", max_size=12))
def test_escaping_any_text_gives_it_back(text: str) -> None:
    escaped = text.replace("{", "{{").replace("}", "}}")
    assert matrix.fill(escaped, {}, "here") == text


def test_the_folder_of_jobs_may_hold_braces(monkeypatch: pytest.MonkeyPatch, shipped: Path) -> None:
    monkeypatch.setattr(resources, "jobs_dir", lambda: Path("/odd{folder}"))
    job = parse(edited(("4,8", "{jobs}/{step}/{{x}}"))).job
    assert matrix.fill(job.args[3], {"step": 4}, "args") == "/odd{folder}/4/{x}"


# --------------------------------------------------------------------------------------------------
# Anything at all


def survives(data: bytes) -> None:
    try:
        matrix.parse(data, Path("m.yaml"))
    except UserError as error:
        str(error).encode()


@given(st.binary(max_size=200))
@settings(max_examples=60)
def test_random_bytes_only_ever_raise_user_errors(data: bytes) -> None:
    survives(data)


@given(st.text(alphabet="ab:-?[]{},&*!|>'\"%@` \n\t#<~0.\\x", max_size=60))
@settings(max_examples=100)
def test_random_yaml_only_ever_raises_user_errors(text: str) -> None:
    survives(text.encode())


_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), st.floats(), st.text(max_size=5),
    st.sampled_from(["two", "one@old", "{out}", "{", "corrupt-shard", "Pass", "*", "kind"]),
)  # fmt: skip
_TREES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["kind", "when", "two", "dp", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
_LINES = GOOD.splitlines(keepends=True)


@given(st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
def test_any_value_anywhere_only_ever_raises_user_errors(data: st.DataObject) -> None:
    """One value of the good matrix is replaced by something arbitrary of the right syntax."""
    number = data.draw(st.integers(0, len(_LINES) - 1))
    key, colon, _ = _LINES[number].partition(":")
    value = json.dumps(data.draw(_TREES))
    survives("".join([*_LINES[:number], f"{key}{colon} {value}\n", *_LINES[number + 1 :]]).encode())


@given(st.lists(st.integers(0, len(_LINES) - 1), max_size=4), st.integers(0, len(GOOD)))
@settings(max_examples=30)
def test_missing_lines_and_a_torn_end_only_ever_raise_user_errors(
    dropped: list[int], end: int
) -> None:
    survives("".join(line for i, line in enumerate(_LINES) if i not in dropped)[:end].encode())


# --------------------------------------------------------------------------------------------------
# The schema for editors


def fits(value: Any, form: dict[str, Any], root: dict[str, Any]) -> bool:
    """The part of JSON Schema that the matrix needs: enough to hold a document against it."""
    if "$ref" in form:
        return fits(value, root["$defs"][form["$ref"].rsplit("/", 1)[1]], root)
    if "anyOf" in form:
        return any(fits(value, option, root) for option in form["anyOf"])
    kinds = {"string": str, "number": (int, float), "integer": int, "boolean": bool,
             "array": list, "object": dict, "null": type(None)}  # fmt: skip
    named = form.get("type", list(kinds))
    allowed = [named] if isinstance(named, str) else named
    if not any(isinstance(value, kinds[kind]) for kind in allowed):
        return False
    if value not in form.get("enum", [value]) or form.get("const", value) != value:
        return False
    if isinstance(value, list):
        return all(fits(item, form.get("items", {}), root) for item in value)
    return not isinstance(value, dict) or fits_object(value, form, root)


def fits_object(value: dict[str, Any], form: dict[str, Any], root: dict[str, Any]) -> bool:
    properties = form.get("properties", {})
    rest = form.get("additionalProperties", {})
    if not set(form.get("required", ())) <= set(value) or (
        rest is False and set(value) - set(properties)
    ):
        return False
    return all(fits(each, properties.get(key, rest), root) for key, each in value.items())


def test_the_schema_accepts_the_good_matrix_and_refuses_a_misspelt_key() -> None:
    schema = matrix.json_schema()
    good = yaml_lines.read(GOOD.encode(), Path("m.yaml")).data
    assert fits(good, schema, schema)
    bad = yaml_lines.read(GOOD.replace("  saves:", "  sav3s:").encode(), Path("m.yaml")).data
    assert not fits(bad, schema, schema)
    short = GOOD.replace(
        "{same_world_size: continued, other_world_size: not_guaranteed}", "reseeded"
    )
    assert fits(yaml_lines.read(short.encode(), Path("m.yaml")).data, schema, schema)
    assert json.loads(json.dumps(schema)) == schema


def test_every_section_of_the_schema_is_closed() -> None:
    definitions = matrix.json_schema()["$defs"]
    sections = {name for name, form in definitions.items() if form.get("type") == "object"}
    assert {"JobSection", "TopologySection", "EntrySection", "ExpectSection"} <= sections
    assert all(definitions[name]["additionalProperties"] is False for name in sections)
