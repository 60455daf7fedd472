"""A copy of the project to run Snakemake in, with small tables and stand-ins for long jobs."""

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from warm_start import SNAKEMAKE, warm_server

ROOT = Path(__file__).parents[2]
PATIENCE_S = 600
"""A run that takes longer hangs; how long one takes is up to the machine."""
PARTS = ("Snakefile", "config", "envs", "profiles", "rules", "scripts", "workflow")

WORKLOADS = """\
workload family model batches image_size sequence hidden layers heads vocabulary causal optimizer precision
cnn torchvision resnet18 8,2 32 - - - - - - sgd fp32
gpt transformer gpt2 4,2 - 16 32 2 2 64 true adamw fp32
"""
EXPERIMENTS = """\
experiment set workload plan batch
cnn-batch4 live cnn single 4
cnn-ddp2 live cnn ddp2 16
gpt-tp2 live gpt tp2 4
"""
STAND_IN = '''"""Stands in for the script of a rule: leaves its files, notes when it ran."""
import time
from pathlib import Path
begin = time.time()
pause = Path("pause")
while pause.exists() and snakemake.rule == pause.read_text():
    Path(snakemake.output[0]).write_text("half written")
    Path("waiting").touch()
    time.sleep(0.02)
time.sleep(0.15 if snakemake.resources.get("measurement") else 0)
for path in snakemake.output:
    Path(path).write_text(f"{snakemake.rule} {dict(snakemake.wildcards)}\\n")
with open("ran", "a") as log:
    log.write(f"{snakemake.rule} {begin} {time.time()}\\n")
'''


@dataclass
class Project:
    """A copy of the project in a folder of its own."""

    folder: Path

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "snakemake", *arguments]

    @property
    def environment(self) -> dict[str, str]:
        """The copy's library comes before the installed one."""
        return {**os.environ, "PYTHONPATH": str(self.folder / "workflow")}

    def snakemake(self, *arguments: str, status: int = 0) -> str:
        """Run Snakemake and return all that it says."""
        run = warm_server(SNAKEMAKE).start(
            self.command(*arguments)[1:], self.folder / "said", self.folder, self.environment
        )
        found, text = run.finish(PATIENCE_S)
        assert found == status, text
        return text

    def planned(self, *arguments: str) -> dict[str, int]:
        """Jobs that a run would start, by rule; an empty dictionary for nothing to do."""
        text = self.snakemake("--dry-run", *arguments)
        if "Nothing to be done" in text:
            return {}
        table = text.rpartition("Job stats:")[2].partition("\n\n")[0]
        counts = {name: int(n) for name, n in re.findall(r"^(\w+) +(\d+)$", table, re.MULTILINE)}
        total = counts.pop("total")
        assert sum(counts.values()) == total
        counts.pop("all", None)
        return counts

    def edit(self, path: str, old: str, new: str) -> None:
        file = self.folder / path
        text = file.read_text()
        assert old in text, f"{old!r} is not in {path}"
        file.write_text(text.replace(old, new, 1))

    def append(self, path: str, text: str) -> None:
        with (self.folder / path).open("a") as stream:
            stream.write(text)

    def ran(self) -> list[tuple[str, float, float]]:
        """Rule, start and end [s] of each job that stand-ins noted."""
        lines = (line.split() for line in (self.folder / "ran").read_text().splitlines())
        return [(rule, float(begin), float(end)) for rule, begin, end in lines]

    def results(self) -> dict[str, str]:
        """Every result's text by its path, without logs and benchmarks."""
        root = self.folder / "results"
        files = (path for path in sorted(root.rglob("*")) if path.is_file())
        return {
            str(path.relative_to(root)): path.read_text()
            for path in files
            if path.relative_to(root).parts[0] not in ("logs", "benchmarks")
        }


def copy_project(folder: Path) -> Project:
    """Copy the tracked parts of the project with the small tables, compiled modules included."""
    folder.mkdir(parents=True)
    ignore = shutil.ignore_patterns("*.egg-info")
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / part, ignore=ignore)
        else:
            shutil.copy2(source, folder / part)
    (folder / "config/workloads.tsv").write_text(WORKLOADS.replace(" ", "\t"))
    (folder / "config/experiments.tsv").write_text(EXPERIMENTS.replace(" ", "\t"))
    return Project(folder)
