"""Rules that need a GPU ask the scheduler for it, and no others do."""

import pytest
from project_copy import Project

ASKED = '''"""Stands in for the script of a rule: leaves its files, notes what its job asked for."""
from pathlib import Path
for path in snakemake.output:
    Path(path).write_text("made")
with open("asked", "a") as log:
    words = [str(snakemake.resources.get(name, 0)) for name in ("gpu", "measurement")]
    log.write(" ".join([snakemake.rule, *words]) + "\\n")
'''


@pytest.mark.parametrize(("device", "capture", "calibrate"), [("auto", "0", "0"), ("cuda", "1", "2")])
def test_captures_and_sessions_ask_for_gpus_where_the_settings_say_cuda(
    project: Project, device: str, capture: str, calibrate: str
) -> None:
    """A session asks for one a rank of its workload's largest plan; nothing runs beside either."""
    for script in (project.folder / "scripts").rglob("*.py"):
        script.write_text(ASKED)
    project.snakemake("results/calibration/cnn/session.json", "--config", f"device={device}")
    asked = {tuple(line.split()) for line in (project.folder / "asked").read_text().splitlines()}
    assert asked == {
        ("capture", capture, "1"),
        ("merge", "0", "0"),
        ("partition", "0", "0"),
        ("calibrate", calibrate, "1"),
    }
