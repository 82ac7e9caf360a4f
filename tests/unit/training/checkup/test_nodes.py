"""Clocks and comparisons as functions; tests/end_to_end/test_doctor.py runs them between processes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnmr_megatron.training.checkup.findings import RESOURCES
from gnmr_megatron.training.checkup.nodes import (
    PingPong,
    RankReport,
    clock_finding,
    clock_offset,
    compare,
    merged_findings,
)

seconds = st.floats(0, 0.5)


@given(
    true_offset=st.floats(-100, 100),
    ways=st.lists(st.tuples(seconds, seconds), min_size=1, max_size=10),
)
def test_the_offset_is_right_within_its_uncertainty_however_long_messages_take(true_offset, ways):
    now, questions = 1000.0, []
    for there, back in ways:
        questions.append(PingPong(now, now + there + true_offset, now + there + back))
        now += 1
    offset, uncertainty = clock_offset(questions)
    assert uncertainty == pytest.approx(min(map(sum, ways)) / 2, abs=1e-9)
    assert abs(offset - true_offset) <= uncertainty + 1e-9


def test_equal_ways_there_and_back_give_the_offset_itself():
    assert clock_offset([PingPong(10.0, 13.25, 10.5)]) == (3.0, 0.25)


@pytest.mark.parametrize(
    ("offset", "uncertainty", "status"),
    [
        (0.4, 0.1, "ok"),
        (-2.0, 0.1, "warning"),
        (2.0, 1.5, "ok"),  # it may be less than a second
        (-12.0, 0.1, "problem"),
    ],
)
def test_a_skew_counts_as_far_as_it_is_certain(offset, uncertainty, status):
    assert clock_finding("b", offset, uncertainty).status == status


def report(rank, host, facts, gpu="H200", findings=()):
    return RankReport(host=host, rank=rank, facts=facts, hardware={"GPUs": gpu}, findings=findings)


def test_equal_nodes_are_fine():
    found = list(compare([report(rank, "ab"[rank // 2], {"torch": "2.11"}) for rank in range(4)]))
    assert [finding.status for finding in found] == ["ok", "ok"]
    assert found[0].detail.startswith("4 processes on 2 nodes: 1 ")


def test_what_differs_is_a_problem_naming_nodes_and_other_gpus_are_a_warning():
    reports = [
        report(0, "a", {"torch": "2.11"}),
        report(1, "a", {"torch": "2.11"}),
        report(2, "b", {"torch": "2.12"}, gpu="A100"),
        report(3, "b", {"torch": "2.11"}, gpu="A100"),
    ]
    same, hardware = compare(reports)
    assert same.status == "problem"
    assert same.detail == "torch: 2.11 on a, b (rank 3); 2.12 on b (rank 2)"
    assert hardware.status == "warning"
    assert hardware.detail == "GPUs: H200 on a; A100 on b"


def test_a_node_whose_settings_are_refused_is_compared_by_what_it_tells():
    same, _ = compare([report(0, "a", {"torch": "2", "seed": "1"}), report(1, "b", {"torch": "2"})])
    assert same.status == "ok"


def test_many_differences_are_cut_short():
    facts = [{f"key {number}": str(rank) for number in range(50)} for rank in range(2)]
    *shown, last, _ = compare([report(0, "a", facts[0]), report(1, "b", facts[1])])
    assert (len(shown), last.detail) == (20, "and 30 more")


def test_of_other_nodes_only_what_is_not_fine_is_told():
    fine, tight = RESOURCES.ok("disk", "free"), RESOURCES.warning("disk", "tight", "free it")
    reports = [report(0, "a", {}, findings=[fine]), report(1, "b", {}, findings=[fine, tight])]
    found = [(finding.node, finding.status) for finding in merged_findings(reports)]
    assert found == [("a", "ok"), ("b", "warning")]
