"""One small step, simulated to the last bit as it was when it was checked by hand.

Links move 1 MB a ms with no latency. Rank 0 runs stage 0, rank 1 stage 1, two micro-batches.

- The first activation (2 MB) leaves at 1 ms. From 2 ms on rank 0 broadcasts 3 MB over the same
  link, both get half, and the activation arrives at 4 ms instead of 3 ms.
- The second one, queued behind it, leaves at 4 ms and shares with the last 2 MB of the broadcast:
  both end at 8 ms.
- Stage 1 is done at 11 ms; an all-reduce of 4 MB on two ranks puts 4 MB on each link: 15 ms.

After a deliberate change: ``python tests/golden/test_golden_timeline.py`` writes the file anew;
read the difference before committing it.
"""

from pathlib import Path

import pytest
from trioflow.engine.result import Result
from trioflow.engine.simulate import simulate
from trioflow.hardware.machine import Device, Platform
from trioflow.hardware.topologies.grids import build_ring
from trioflow.parallel.task_graph import TaskGraphBuilder

GOLDEN = Path(__file__).with_name("small_step.timeline.csv")
MS, MB = 1e-3, 10**6


def simulate_small_step(engine: str = "reference") -> Result:
    builder = TaskGraphBuilder()
    platform = Platform("pair", Device("chip", "gpu", 10**9, {}), 2, tuple(build_ring(2, MB / MS, 0.0)))
    launch = builder.add(0, "host", "host", "launch", phase="forward", duration_s=0.5 * MS)
    ends = []
    for micro in range(2):
        fields = {"phase": "forward", "micro_batch": micro}
        match = builder.new_match()
        work = builder.add(
            0, "compute", "compute", "aten::mm", duration_s=MS if micro else 0.5 * MS, stage=0, after=[launch], **fields
        )
        builder.add(
            0, "send", "send", "send forward", message_bytes=2 * MB, peer=1, match_id=match, after=[work], **fields
        )
        arrived = builder.add(
            1, "receive", "recv", "recv forward", message_bytes=2 * MB, peer=0, match_id=match, **fields
        )
        ends.append(
            builder.add(1, "compute", "compute", "aten::mm", duration_s=3 * MS, stage=1, after=[arrived], **fields)
        )
    for name, size, after in (("broadcast", 3 * MB, [work]), ("all_reduce", 4 * MB, [])):
        match = builder.new_match()
        for rank in range(2):
            builder.add(
                rank,
                "communication",
                "collective",
                name,
                message_bytes=size,
                group="0,1",
                match_id=match,
                after=[*after, *(ends if name == "all_reduce" and rank else [])],
            )
    builder.add(0, "copy", "memcpy", "copy", phase="backward", duration_s=MS / 7)
    return simulate(builder.build(), platform, engine=engine)


def write(result: Result) -> str:
    # Without a format pandas writes the shortest digits that read back as the same number.
    text: str = result.timeline.to_csv(index=False, lineterminator="\n")
    return text


@pytest.mark.parametrize("engine", ["reference", "compiled"])
def test_timeline_is_the_golden_one(engine: str) -> None:
    assert write(simulate_small_step(engine)) == GOLDEN.read_text()


def test_golden_times_are_those_of_the_story() -> None:
    timeline = simulate_small_step().timeline
    ms = {
        (str(name), int(rank), None if micro is None else int(micro)): (round(start_s / MS, 9), round(end_s / MS, 9))
        for name, rank, micro, start_s, end_s in zip(
            timeline["name"],
            timeline["rank"],
            timeline["micro_batch"].astype(object).where(timeline["micro_batch"].notna(), None),
            timeline["start_s"],
            timeline["end_s"],
            strict=True,
        )
    }
    assert ms["launch", 0, None] == (0, 0.5)
    assert ms["aten::mm", 0, 0] == (0.5, 1)
    assert ms["aten::mm", 0, 1] == (1, 2)
    # Alone until 2 ms, then at half speed beside the broadcast.
    assert ms["send forward", 0, 0] == ms["recv forward", 1, 0] == (1, 4)
    # The broadcast has moved 1 MB by then; it and the second message share until 8 ms.
    assert ms["broadcast", 0, None] == ms["broadcast", 1, None] == (2, 8)
    assert ms["send forward", 0, 1] == (4, 8)
    assert ms["aten::mm", 1, 0] == (4, 7)
    assert ms["aten::mm", 1, 1] == (8, 11)
    assert ms["all_reduce", 0, None] == ms["all_reduce", 1, None] == (11, 15)
    assert ms["copy", 0, None] == (0, 0.142857143)


if __name__ == "__main__":
    GOLDEN.write_text(write(simulate_small_step()))
