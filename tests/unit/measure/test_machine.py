import pandas as pd
import pytest
from trioflow import tables
from trioflow.base.provenance import write_json
from trioflow.costmodel.fits.collectives import fit_collective_model
from trioflow.hardware.platform import load_platform
from trioflow.measure.machine import describe_machine


def write_inputs(folder, overlaps):
    rows = [
        {
            "platform": "this-machine",
            "library": "gloo",
            "collective": name,
            "ranks": 2,
            "message_bytes": size,
            "round": r,
            "time_ns": 100_000 + size,
        }
        for name in ("all_reduce", "send")
        for size in (1_000, 1_000_000, 16_000_000)
        for r in range(3)
    ]
    samples = pd.DataFrame(rows)[tables.COLLECTIVE_SAMPLES.names]
    fit_collective_model(samples).save(folder / "collectives.json")
    sessions = []
    for number, overlap in enumerate(overlaps):
        path = folder / f"session-{number}.json"
        write_json(
            path,
            {
                "ranks": 2,
                "device": "cpu",
                "device_names": ["a core"] * 2,
                "library": "gloo",
                "memory_bytes": 10**9 + number,
                "host_costs": {"pipeline_micro_batch_s": 1e-4 * (number + 1), "overlap": overlap}
                | ({"sharded_forward_s": 5e-4} if number == 1 else {}),
            },
        )
        sessions.append(path)
    return sessions


@pytest.mark.parametrize(("overlaps", "blocked"), [([0.1, 0.2, 0.9], True), ([0.6, 0.7, 0.1], False)])
def test_the_machine_is_what_its_sessions_measured(tmp_path, overlaps, blocked):
    sessions = write_inputs(tmp_path, overlaps)
    describe_machine(sessions, tmp_path / "collectives.json", tmp_path / "this-machine.yaml")
    machine = load_platform(tmp_path / "this-machine.yaml")
    assert machine.communication_on_compute_stream is blocked
    # The median session's, of those that measured it.
    assert machine.host == {"pipeline_micro_batch_s": pytest.approx(2e-4), "sharded_forward_s": pytest.approx(5e-4)}
    assert machine.device.memory_bytes == 10**9
    assert {(link.source, link.target) for link in machine.links} == {("rank0", "rank1"), ("rank1", "rank0")}
    # A byte a nanosecond, once the latency is taken off.
    assert machine.links[0].bandwidth_bytes_per_s == pytest.approx(1e9, rel=1e-2)
    assert all("sweep" in machine.sources[f"links.rank0->rank1.{k}"] for k in ("bandwidth_bytes_per_s", "latency_s"))
