"""Compute is slowed while its device takes part in a collective, and nothing else is."""

from dataclasses import replace

import numpy as np
import pytest
import yaml
from trioflow.base.errors import PlatformError
from trioflow.engine.simulate import measure_overlap, simulate, simulate_interval
from trioflow.hardware.platform import load_platform, save_platform
from trioflow.parallel.task_graph import TaskGraphBuilder

CALM = load_platform("dgx-h100", 2)
SLOWED = replace(CALM, compute_slowdown_during_collective=2.0)


def build(add):
    builder = TaskGraphBuilder()
    add(builder)
    return builder.build()


def collective(builder, rank, match, duration_s, after=()):
    return builder.add(
        rank,
        "communication",
        "collective",
        "all_reduce",
        after=after,
        duration_s=duration_s,
        group="0,1",
        match_id=match,
    )


def beside(builder):
    """Rank 0 computes 4 s, then 1 s, beside a collective of 2 s; a second one follows the first task."""
    matches = [builder.new_match() for _ in range(2)]
    first = builder.add(0, "compute", "compute", "a", duration_s=4.0)
    builder.add(0, "compute", "compute", "b", duration_s=1.0)
    collective(builder, 0, matches[0], 2.0)
    collective(builder, 0, matches[1], 3.0, (first,))
    builder.add(0, "host", "host", "launch", duration_s=4.0)
    collective(builder, 1, matches[0], 2.0)
    collective(builder, 1, matches[1], 3.0)


def times(graph, platform, **options):
    timeline = simulate(graph, platform, **options).timeline
    return dict(zip(timeline["name"], timeline["end_s"] - timeline["start_s"], strict=True))


@pytest.mark.parametrize("engine", ["reference", "compiled"])
def test_work_beside_a_collective_advances_more_slowly(engine):
    # a: 2 s beside, in which 1 s is done, then 3 s alone. b: beside the second all the time.
    found = times(build(beside), SLOWED, engine=engine)
    assert found["a"] == pytest.approx(5.0)
    assert found["b"] == pytest.approx(2.0)
    assert found["launch"] == 4.0 and found["all_reduce"] == 3.0
    assert times(build(beside), CALM, engine=engine)["a"] == 4.0


def test_engines_agree_and_the_whole_step_is_longer():
    graph = build(beside)
    runs = [simulate(graph, SLOWED, engine=engine) for engine in ("reference", "compiled")]
    assert runs[0].timeline.equals(runs[1].timeline)
    calm = simulate(graph, CALM).summary.step_time_s
    assert runs[0].summary.step_time_s == pytest.approx(8.0) and calm == pytest.approx(7.0)
    assert runs[0].summary.warnings == []
    told = simulate_interval(graph, SLOWED).summary
    assert told.low_s <= told.step_time_s <= told.high_s


def test_overlaps_count_once_and_on_the_own_rank():
    def two_at_once(builder):
        matches = [builder.new_match() for _ in range(2)]
        for rank in range(2):
            collective(builder, rank, matches[0], 2.0)
            builder.add(
                rank,
                "all_reduce",
                "collective",
                "all_reduce",
                duration_s=3.0,
                group="0,1",
                match_id=matches[1],
            )
        builder.add(0, "compute", "compute", "a", duration_s=10.0)
        builder.add(1, "compute", "compute", "b", duration_s=1.0)

    timeline = simulate(build(two_at_once), CALM).timeline
    overlap = dict(zip(timeline["name"], measure_overlap(timeline), strict=True))
    assert overlap["a"] == pytest.approx(3.0) and overlap["b"] == pytest.approx(1.0)


def test_nothing_is_slowed_where_nothing_communicates():
    graph = build(lambda builder: builder.add(0, "compute", "compute", "a", duration_s=1.0))
    assert simulate(graph, SLOWED).summary.step_time_s == 1.0


def test_a_stronger_slowdown_never_shortens_a_step():
    graph = build(beside)
    steps = [
        simulate(graph, replace(CALM, compute_slowdown_during_collective=s)).summary.step_time_s
        for s in (1.0, 1.1, 1.5, 4.0)
    ]
    assert list(np.sort(steps)) == steps and steps[0] < steps[-1]


def test_the_number_comes_from_the_platform_with_its_source(tmp_path):
    path = tmp_path / "mine.yaml"
    content = yaml.safe_load(
        "name: mine\ndevice: {sheet: a40}\nranks: 2\n"
        "topology: {builder: switch, bandwidth_bytes_per_s: {value: 1.0e9, source: s}, latency_s: {value: 1.0e-6, source: s}}\n"
        "communication_on_compute_stream: false\n"
        "compute_slowdown_during_collective: {value: 1.2, source: measured here}\n"
    )
    path.write_text(yaml.safe_dump(content))
    platform = load_platform(path)
    assert platform.compute_slowdown_during_collective == 1.2
    assert platform.sources["compute_slowdown_during_collective"] == "measured here"
    save_platform(platform, tmp_path / "again.yaml")
    assert load_platform(tmp_path / "again.yaml").compute_slowdown_during_collective == 1.2
    assert load_platform("dgx-h100", 2).compute_slowdown_during_collective == 1.0
    content["compute_slowdown_during_collective"] = {"value": 0.9, "source": "s"}
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(PlatformError, match=r"0\.9"):
        load_platform(path)
