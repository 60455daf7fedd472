"""A copy of the project whose Snakemake knows the executors."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "workflow"))

from project_copy import PATIENCE_S, Project, copy_project  # noqa: E402

__all__ = ["PATIENCE_S", "ROOT", "ClusterProject", "copy_project"]


@dataclass
class ClusterProject(Project):
    """A copy of the project, and the folder that the executors were installed into."""

    executors: Path

    @property
    def environment(self) -> dict[str, str]:
        known = super().environment
        return {**known, "PYTHONPATH": f"{known['PYTHONPATH']}:{self.executors}"}

    def snakemake(self, *arguments: str, status: int = 0) -> str:
        """Run Snakemake in a process of its own: executors are found when it is imported."""
        run = subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
        )
        assert run.returncode == status, run.stdout
        return run.stdout
