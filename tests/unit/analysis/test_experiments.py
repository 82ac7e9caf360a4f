"""Suites, intervals, gaps and detection, against closed forms."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from gnmr_megatron.analysis.experiments.correlation import Correlation, correlations, spearman
from gnmr_megatron.analysis.experiments.detection import (
    Answer,
    InjectedFault,
    detection,
    injected_faults,
)
from gnmr_megatron.analysis.experiments.matrix import plan
from gnmr_megatron.analysis.experiments.origin import origins_of
from gnmr_megatron.analysis.experiments.preparation import dataset_commands, plan_preparation
from gnmr_megatron.analysis.experiments.results import Gap, Interval, RunFigures, by_arm
from gnmr_megatron.analysis.experiments.suite import Suite, find_suite
from gnmr_megatron.analysis.experiments.tables import as_json, as_markdown, faults_as_markdown
from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.control.units import Unit, UnitTable
from gnmr_megatron.errors import ConfigError, DataError
from gnmr_megatron.observability.event_log import EventLog
from gnmr_megatron.observability.events import FaultEvent, RecoveryGapEvent, StartEvent, StepEvent
from gnmr_megatron.observability.risk_matrix import RiskMatrixWriter
from tests.conftest import ROOT

SUITE = {
    "question": "Does it?",
    "low": "low",
    "high": "high",
    "settings": {"a.b": 1},
    "arms": {
        "low": {"settings": {}},
        "high": {"settings": {"a.b": 2}},
        "copy": {"settings": {}, "budget_of": "low"},
    },
    "sizes": {"small": {"base": "base.yaml", "seeds": [1, 2], "settings": {"a.b": 3, "a.c": 4}}},
}


def suite(tmp_path: Path, **changes):
    path = tmp_path / "trial.yaml"
    path.write_text(yaml.safe_dump({**SUITE, **changes}))
    return Suite.read(path)


def test_an_arm_wins_over_a_size_and_a_size_over_the_suite(tmp_path):
    trial = suite(tmp_path)
    runs = plan(trial, trial.size("small"), tmp_path / "out", {"x.y": 9})
    settings = {(run.arm.name, run.seed): dict(run.settings) for run in runs}
    assert settings["low", 1] == {"a.b": 3, "a.c": 4, "seed": 1, "x.y": 9}
    assert settings["high", 2] == {"a.b": 2, "a.c": 4, "seed": 2, "x.y": 9}
    assert [run.arm.name for run in runs][-2:] == [
        "copy",
        "copy",
    ]  # after those whose budget they take


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"low": "lwo"}, r"trial.yaml: low: no arm `lwo`; did you mean `low`\?"),
        ({"armz": {}}, r"unknown key `armz`; did you mean `arms`\?"),
        ({"arms": {"low": {"setings": {}}}}, r"arms.low: unknown key `setings`; did you mean `settings`"),
        ({"arms": {"low": {}, "high": {"settings": {}}}}, r"arms.low: `settings` is missing"),
        ({"sizes": {"small": {"seeds": [1]}}}, r"sizes.small: `base` is missing"),
        ({"sizes": {"s": {"base": "b", "seeds": [1], "preparation": {"x": {}}}}}, r"s.preparation: no preparation `x`"),
        ({"datasets": {"text": {"inputs": "docs", "tokenizer_from": "t"}}}, r"datasets.text.inputs: must be a list"),
        ({"datasets": {"text": {"inputs": ["docs"]}}}, r"datasets.text: `tokenizer_from` is missing"),
        ({"datasets": {"a": {"inputs": ["b"], "tokenizer_from": "t"}}, "preparation": {"a": {}}}, r"a dataset and"),
        ({"sizes": {"s": {"base": "b", "seeds": [1], "arms": ["hgih"]}}}, r"sizes.s.arms\[0\]: no arm `hgih`"),
        ({"sizes": {"s": {"base": "b", "seeds": 3}}}, r"sizes.s.seeds: must be a list of different whole numbers"),
        ({"sizes": {"s": {"base": "b", "seeds": []}}}, r"sizes.s.seeds: must be"),
        ({"sizes": {"s": {"base": "b", "seeds": [1, 1]}}}, r"sizes.s.seeds: must be"),
        ({"sizes": {"s": {"base": "b", "seeds": ["a"]}}}, r"sizes.s.seeds: must be"),
        ({"sizes": {"s": {"base": "b", "seeds": [1], "arms": "low"}}}, r"sizes.s.arms: must be a list of arms"),
        ({"settings": None}, r"trial.yaml: settings: must hold `key: value` pairs"),
        ({"arms": {"low": {"settings": None}}}, r"arms.low.settings: must hold `key: value` pairs"),
        ({"arms": {"low": {"settings": {}, "target_exceedance": "1e-3"}}}, r"target_exceedance: must be a number"),
        ({"low": ["low"]}, r"trial.yaml: low: must be text"),
        ({"sizes": {"s": {"base": "b", "seeds": [1], "prepares": "no"}}}, r"sizes.s.prepares: must be true or false"),
    ],
)  # fmt: skip
def test_a_wrong_suite_is_refused_with_its_place(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        suite(tmp_path, **changes)


def test_a_suite_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "trial.yaml"
    path.write_bytes("question: é".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"trial.yaml: cannot be read: .*utf-8"):
        Suite.read(path)


def test_arms_whose_names_hold_a_dot_have_files_of_their_own(tmp_path):
    arms = {name: {"settings": {}} for name in ("low", "high", "alpha_1.5", "alpha_1.7")}
    trial = suite(tmp_path, arms=arms)
    runs = plan(trial, trial.size("small"), tmp_path / "out", {})
    assert len({run.sidecar for run in runs}) == len(runs) == 8


def test_a_budget_that_changes_cannot_be_calibrated_for(tmp_path):
    learning = {"calibrated_on": "low", "settings": {"gnmr.max_recovered": {0: 1, 9: 2}}}
    trial = suite(tmp_path, arms={"low": {"settings": {}}, "high": learning})
    with pytest.raises(ConfigError, match=r"arm high: gnmr.max_recovered must be a number"):
        plan(trial, trial.size("small"), tmp_path / "out", {})


def test_what_is_prepared_has_settings_of_its_own_and_all_arms_wait_for_it(tmp_path):
    trial = suite(
        tmp_path,
        preparation={"start": {"c.d": 5, "c.e": 6}},
        settings={"a.b": 1, "x.from": "{output}/start", "x.all": ["{output}/text", 7]},
        sizes={
            "small": {
                "base": "b.yaml", "seeds": [2, 1], "settings": {"a.c": 4}, "preparation": {"start": {"c.e": 8}},
            }
        },
    )  # fmt: skip
    out = tmp_path / "out"
    (start,) = plan_preparation(trial, trial.size("small"), out)
    assert (start.folder, start.needs) == (out / "start", [])
    assert start.settings == {"c.d": 5, "c.e": 8, "seed": 2}
    for run in plan(trial, trial.size("small"), out, {}):
        assert run.needs[0] == out / "start"
        assert run.settings["x.from"] == "{output}/start"  # so that a folder may move
        assert run.placed_settings["x.from"] == str(out / "start")
        assert run.placed_settings["x.all"] == [str(out / "text"), 7]


def test_a_size_that_prepares_nothing_waits_for_nothing(tmp_path):
    trial = suite(
        tmp_path,
        datasets={"text": {"inputs": ["a"], "tokenizer_from": "b"}},
        preparation={"start": {"c.d": 5}},
        sizes={
            "small": {"base": "b.yaml", "seeds": [1]},
            "huge": {"base": "b.yaml", "seeds": [1], "prepares": False},
        },
    )
    for name, is_prepared in (("small", True), ("huge", False)):
        size, out = trial.size(name), tmp_path / "out"
        assert len(dataset_commands(trial, size, out)) == is_prepared
        assert len(plan_preparation(trial, size, out)) == is_prepared
        run = plan(trial, size, out, {})[0]
        assert (len(run.needs), len(run.datasets)) == (is_prepared, is_prepared)


def test_unknown_names_list_what_there_is(tmp_path):
    suite(tmp_path)
    with pytest.raises(ConfigError, match=r"no experiment `trail` .*did you mean `trial`"):
        find_suite("trail", tmp_path)
    with pytest.raises(ConfigError, match=r"size: trial has no `huge`; possible: small"):
        find_suite("trial", tmp_path).size("huge")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs/experiments").glob("*.yaml")), ids=lambda p: p.stem
)
def test_every_suite_of_the_clone_has_its_sizes_and_bases(path):
    found = Suite.read(path)
    assert {"small", "smoke"} <= found.sizes.keys()
    for size in found.sizes.values():
        assert size.base.resolve().exists()
        assert plan(found, size, Path("out"), {})


def test_an_interval_is_students():
    # mean 2, deviation 1; t(0.975; 2) = 4.3027 (tables)
    interval = Interval.of([1.0, 2.0, 3.0, math.nan])
    assert interval.mean == 2.0
    assert interval.half_width == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert interval.text(1) == "2.0 ± 2.5"
    assert Interval.of([5.0]).text(2) == "5.00"
    assert Interval.of([]).text(2) == "-"
    # t(0.975; 15) = 2.1314, t(0.975; 30) = 2.0423 (tables); 16 values of +-1 deviate by sqrt(16 / 15)
    sixteen = Interval.of([1.0, -1.0] * 8)
    assert sixteen.half_width == pytest.approx(2.1314 * math.sqrt(16 / 15) / 4, rel=1e-4)
    thirty_one = Interval.of([0.0] + [1.0, -1.0] * 15)
    assert thirty_one.half_width == pytest.approx(2.0423 / math.sqrt(31), rel=1e-4)


def row(arm, seed, loss, **changes):
    numbers = {f.name: 0 for f in dataclasses.fields(RunFigures)}
    values = {"step_seconds": 1.0, "finished": "completed", "hit_rate": math.nan, **changes}
    return RunFigures(**{**numbers, **values, "arm": arm, "seed": seed, "held_out_loss": loss})


def test_the_gap_is_paired_by_seed_and_what_an_arm_closes_of_it(tmp_path):
    rows = [row("low", 1, 5.0), row("low", 2, 6.0), row("high", 1, 4.0), row("high", 2, 5.1),
            row("copy", 1, 4.5), row("copy", 2, 5.55, step_seconds=1.5)]  # fmt: skip
    gap, arms = by_arm(suite(tmp_path, oracle="high"), rows)
    assert gap.exists
    assert gap.difference.mean == pytest.approx(0.95)
    copy = next(arm for arm in arms if arm.arm == "copy")
    assert copy.gap_closed.mean == pytest.approx(0.5)
    assert copy.regret.mean == pytest.approx((0.5 + 0.45) / 2)
    assert copy.above_budget.mean == pytest.approx((-0.5 - 0.45) / 2)  # its budget is `low`'s
    # t(0.975; 1) = 12.706; the two differences are 0.05 apart
    assert copy.above_budget.half_width == pytest.approx(12.706 * 0.025, rel=1e-4)
    assert copy.step_time_ratio.mean == pytest.approx(1.25)


def test_the_answer_of_the_suites_subject_to_faults_is_on_top(tmp_path):
    rows = [
        row("low", 1, 5.0, hit_rate=0.0),
        row("high", 1, 4.0),
        row("copy", 1, 4.5, hit_rate=0.75, false_rate=0.01, detection_delay=2.0),
    ]
    trial = suite(tmp_path, subject="copy")
    told = as_json(trial, *by_arm(trial, rows))
    assert (told["hit_rate"], told["false_rate"], told["detection_delay"]) == (0.75, 0.01, 2.0)
    assert told["arms"]["low"]["hit_rate"] == 0.0
    assert "hit_rate" not in as_json(suite(tmp_path), *by_arm(trial, rows))


def test_no_share_of_a_gap_is_told_where_there_is_none(tmp_path):
    rows = [row("low", 1, 4.0), row("low", 2, 4.2), row("high", 1, 4.1), row("high", 2, 4.1)]
    trial = suite(tmp_path)
    gap, arms = by_arm(trial, rows)
    assert not gap.exists
    table = as_markdown(trial, gap, arms)
    assert "low is not worse than high at this size" in table
    assert "| no gap |" in table
    # one that cannot be told from noise is none either: 0.1 with a half width far above it
    assert Gap.of({1: 4.3, 2: 4.0}, {1: 4.1, 2: 4.0}).verdict == "no gap"


def test_a_low_path_that_diverges_is_worse_and_one_seed_tells_nothing(tmp_path):
    trial = suite(tmp_path)
    high = [row("high", seed, 4.1) for seed in (1, 2, 3)]
    lost = {"finished": "diverged"}
    for low in (
        [row("low", seed, math.nan, **lost) for seed in (1, 2, 3)],
        [row("low", 1, math.nan, **lost), row("low", 2, 4.0), row("low", 3, 4.0)],
    ):
        gap, arms = by_arm(trial, low + high)
        assert (gap.exists, gap.verdict) == (False, "low diverged")
        table = as_markdown(trial, gap, arms)
        assert "low diverged where high did not: it is worse" in table
        assert "| low diverged |" in table
    gap, arms = by_arm(trial, [row("low", 1, 4.2), high[0]])
    assert (gap.exists, gap.verdict) == (False, "unknown")
    assert "is not known (0.100 nats a token with one seed)" in as_markdown(trial, gap, arms)


def test_a_seed_without_a_gap_of_its_own_counts_with_the_mean_gap(tmp_path):
    gaps = (0.0, 0.1, 0.1, 0.1, 0.1, 0.1)
    rows = [row("high", seed, 4.0) for seed in range(6)]
    rows += [row("low", seed, 4.0 + gap) for seed, gap in enumerate(gaps)]
    rows += [row("copy", seed, 4.0) for seed in range(6)]
    gap, arms = by_arm(suite(tmp_path), rows)
    assert gap.exists
    copy = next(arm for arm in arms if arm.arm == "copy")
    assert copy.gap_closed.mean == pytest.approx(1.0)
    # shares are 0 and 1.2 (five times), which deviate by 0.4899; t(0.975; 5) = 2.5706
    assert copy.gap_closed.half_width == pytest.approx(2.5706 * 0.48990 / math.sqrt(6), rel=1e-3)


def test_an_origin_holds_the_content_of_datasets_and_what_follows_from_it(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "base.yaml").write_text("data: data.yaml\n")
    (tmp_path / "data.yaml").write_text(f"datasets: [{tmp_path / 'text'}]\n")
    trial = suite(tmp_path)
    runs = plan(trial, trial.size("small"), tmp_path / "out", {})
    with pytest.raises(DataError, match=r"text: is no prepared dataset"):
        origins_of(runs)
    found = []
    for content in ("one", "one", "another"):
        (tmp_path / "text/manifest.json").write_text(content)
        found.append({path.name: origin for path, origin in origins_of(runs).items()})
    assert found[0] == found[1]
    for name, extra in (("low-s1", set()), ("copy-s2", {"run low-s2"})):
        before, after = found[1][name], found[2][name]
        differing = {key for key in before | after if before.get(key) != after.get(key)}
        assert differing == {"content of data.datasets", *extra}


IDS = [f"decoder.layers.{layer}.mlp.linear_fc1" for layer in range(3)]


def step_event(step, loss):
    return StepEvent(
        step=step, loss=loss, grad_norm=1.0, learning_rate=1e-3, tokens=step, tokens_per_second=1.0,
        step_seconds=1.0, control_seconds=0.0, recovered=[], updated=True, over_threshold=0,
        riskiest_unit=None, riskiest_score=0.0,
    )  # fmt: skip


def record(folder: Path, selected, faults, losses=None):
    """A run whose decisions and injected faults are given."""
    units = UnitTable(Unit(layer, 0, name, (4, 4)) for layer, name in enumerate(IDS))
    log, matrix = EventLog(folder), RiskMatrixWriter(folder, units)
    log.append(
        StartEvent(
            step=1, run="r", resumed_from=None, world_size=1, layout={}, num_units=3, max_recovered=1,
            total_steps=20, policy="gnmr", mode="active", environment={},
        )
    )  # fmt: skip
    none = np.zeros(0, dtype=np.int64)
    for step in range(1, 21):
        if losses is not None:
            log.append(step_event(step, losses[step]))
        for kind, units_of in (item for at, item in faults if at == step):
            log.append(
                FaultEvent(
                    step=step,
                    kind="injected",
                    rank=None,
                    units=units_of,
                    message=f"{kind} factor 2",
                )
            )
        ones = np.ones(3)
        matrix.append(step=step, updated=True, global_norm=1.0, norms=ones, gnmr=ones, delta_gnmr=ones,
                      recovered=none, selected=np.array(selected.get(step, []), dtype=np.int64))  # fmt: skip
    log.close()
    matrix.close()
    return RecordedRun(folder)


def test_a_fault_is_answered_by_a_decision_on_one_of_its_units(tmp_path):
    run = record(
        tmp_path,
        # step 3: nobody's; 7: unit 1 two steps after its fault; 8 goes on; 16: another unit than that of the fault
        {3: [0], 7: [1], 8: [1], 16: [2]},
        [(5, ("scale_gradient", [IDS[1]])), (15, ("stale_scale", [IDS[0]])), (16, ("stale_scale", [IDS[0]])),
         (18, ("slow_rank", []))],
    )  # fmt: skip
    told = [(fault.kind, fault.first, fault.last) for fault in injected_faults(run)]
    assert sorted(told) == [("scale_gradient", 5, 5), ("stale_scale", 15, 16)]
    found = detection(run)
    assert [answer.delay for answer in found.answers] == [2, None]
    assert found.hit_rate == 0.5
    assert found.false_rate == 2 / 60  # steps 3 and 16


def test_faults_are_told_by_kind_and_strength(tmp_path):
    strong, weak = "stale_scale factor 16", "stale_scale factor 0.05"
    answers = [
        Answer(InjectedFault(strong, 3, 9, (IDS[0],)), 0, 4.0, 0.5),
        Answer(InjectedFault(strong, 13, 19, (IDS[0],)), 2, 6.0, 0.7),
        Answer(InjectedFault(weak, 3, 9, (IDS[1],)), None, 0.5, math.nan),
        Answer(InjectedFault("bad_batch", 3, 3, ()), 1, math.nan, 1.25),
    ]
    table = faults_as_markdown({"gnmr": answers}).splitlines()
    assert table[-3:] == [
        "| bad_batch | gnmr | 1 | 100 | 1.0 | - | 1.250 |",
        # t(0.975; 1) = 12.706
        f"| {strong} | gnmr | 2 | 100 | 1.0 | 5.0 | 0.600 ± {12.706 * 0.1:.3f} |",
        f"| {weak} | gnmr | 1 | 0 | - | 0.5 | - |",
    ]


def test_a_fault_of_the_whole_batch_is_answered_by_any_unit(tmp_path):
    found = detection(record(tmp_path, {10: [2]}, [(10, ("bad_batch", []))]))
    assert (found.hit_rate, found.delay, found.false_rate) == (1.0, 0.0, 0.0)


def test_a_burst_is_a_fault_that_raises_a_norm_threefold_and_is_to_be_answered_at_once(tmp_path):
    run = record(
        tmp_path,
        {5: [0], 12: [1], 18: [2]},
        [(5, ("scale_gradient", [IDS[0]])), (11, ("scale_gradient", [IDS[1]])),
         (17, ("scale_gradient", [IDS[2]]))],
    )  # fmt: skip
    run.matrix.norms[4, 0] = 3.5  # answered in the same step
    run.matrix.norms[10, 1] = 3.0  # a step late
    run.matrix.norms[16, 2] = 2.9  # late, too, but no burst
    found = detection(run)
    assert [answer.raised for answer in found.answers] == pytest.approx([3.5, 3.0, 2.9])
    assert found.burst_hit_rate == 0.5
    assert found.hit_rate == 1.0


def test_a_gradient_that_is_not_finite_is_a_burst_and_no_usual_norm(tmp_path):
    run = record(
        tmp_path, {5: [0]}, [(5, ("scale_gradient", [IDS[0]])), (8, ("scale_gradient", [IDS[0]]))]
    )
    run.matrix.norms[4, 0] = math.nan  # answered at once
    run.matrix.norms[7, 0] = 6.0  # over the mean of the four finite norms of 1 before it
    found = detection(run)
    assert [answer.raised for answer in found.answers] == [math.inf, 6.0]
    assert found.burst_hit_rate == 0.5


def test_a_unit_whose_norm_a_fault_raised_too_is_no_false_recovery(tmp_path):
    # the fault of step 5 is unit 0's; unit 1 follows it threefold, unit 2 not quite; 13 is after its window
    run = record(tmp_path, {6: [0, 1, 2], 13: [1]}, [(5, ("scale_gradient", [IDS[0]]))])
    run.matrix.norms[4:6, 0] = 9.0
    run.matrix.norms[5, 1] = 3.0
    run.matrix.norms[5, 2] = 2.9
    assert detection(run).false_rate == 2 / 60


def test_the_loss_after_a_fault_is_that_above_the_run_without_any(tmp_path):
    losses = {step: 5.0 - step / 10 for step in range(1, 21)}
    (tmp_path / "calm").mkdir()
    (tmp_path / "run").mkdir()
    calm = record(tmp_path / "calm", {}, [], losses=losses)
    harmed = {step: loss + (0.5 if step in (10, 11) else 0.0) for step, loss in losses.items()}
    run = record(tmp_path / "run", {}, [(10, ("bad_batch", []))], losses=harmed)
    # steps 10 to 20 are left of the 20 after the fault
    assert detection(run, calm).excess_loss == pytest.approx(2 * 0.5 / 11)
    assert math.isnan(detection(run).excess_loss)


def test_thresholds_come_from_another_seed_and_its_run_first(tmp_path):
    trial = suite(
        tmp_path, arms={**SUITE["arms"], "tuned": {"settings": {}, "calibrated_on": "low"}}
    )
    runs = {run.folder.name: run for run in plan(trial, trial.size("small"), tmp_path / "out", {})}
    assert [item.name for item in runs["tuned-s1"].needs] == ["low-s2"]
    assert [item.name for item in runs["tuned-s2"].needs] == ["low-s1"]
    assert [item.name for item in runs["copy-s2"].needs] == ["low-s2"]
    with pytest.raises(ConfigError, match=r"arms.tuned.calibrated_on: tuned is calibrated itself"):
        suite(tmp_path, arms={**SUITE["arms"], "tuned": {"settings": {}, "calibrated_on": "tuned"}})


def test_spearman_is_pearson_of_ranks_with_mean_ranks_for_ties():
    # without ties: 1 - 6 sum(d^2) / (n (n^2 - 1)) = 1 - 6 * 14 / (4 * 15)
    assert spearman(np.array([1.0, 2, 3, 4]), np.array([10.0, 30, 20, 5])) == pytest.approx(-0.4)
    # ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: 4.5 / sqrt(4.5 * 5)
    assert spearman(np.array([0.0, 7, 7, 9]), np.array([1.0, 2, 3, 4])) == pytest.approx(
        4.5 / math.sqrt(22.5)
    )
    assert spearman(np.array([1.0, 2.0]), np.array([2.0, math.inf])) == pytest.approx(1.0)
    assert math.isnan(spearman(np.ones(3), np.arange(3.0)))


def test_the_interval_of_a_correlation_covers_its_mean_nineteen_times_in_twenty():
    draws = [np.random.default_rng(seed).normal(0.3, 0.2, size=400) for seed in range(200)]
    found = [Correlation.of(values) for values in draws]
    assert 0.9 <= np.mean([one.low < 0.3 < one.high for one in found]) <= 0.99
    # 1.96 deviations of the mean on either side where measurements are independent
    widths = [one.high - one.low for one in found]
    assert np.mean(widths) == pytest.approx(2 * 1.96 * 0.2 / math.sqrt(400), rel=0.05)


def test_scores_are_compared_with_the_gap_of_their_step_and_of_the_one_after(tmp_path):
    run = record(tmp_path, {}, [])
    log = EventLog(tmp_path)
    for step in (5, 10):
        log.append(
            RecoveryGapEvent(step=step, gaps=[1.0, 2.0, 3.0], error=6.0, reference=9.0, seconds=0.1)
        )
    log.close()
    found = correlations(run)
    assert found["norm"][0].count == 0  # all norms are equal: nothing to rank
    matrix = run.matrix
    matrix.norms[3] = matrix.norms[8] = [3.0, 2.0, 1.0]  # in the steps before
    matrix.norms[4] = matrix.norms[9] = [1.0, 2.0, 3.0]  # in the same
    same, after = correlations(run)["norm"]
    assert (same.mean, after.mean) == pytest.approx((1.0, -1.0))
