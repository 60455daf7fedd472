"""A real SLURM of one node, started as root from Debian's packages and stopped again.

No systemd, cgroups or database: ``slurmctld``, ``slurmd`` and ``munged`` run as processes of
the test. The configuration must lie in ``/etc/slurm``: what runs inside a job looks for it there.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

CONFIGURATION = Path("/etc/slurm/slurm.conf")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "sinfo")
PATIENCE_S = 60.0
MEMORY_MB = 8000


def find_obstacle() -> str:
    """Return why no SLURM can be started here, or nothing."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"SLURM is not installed ({', '.join(missing)} missing)"
    if os.geteuid():
        return "only root starts a SLURM of its own"
    if CONFIGURATION.exists():
        return f"this machine has a SLURM already ({CONFIGURATION})"
    return ""


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(holds: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until something holds; fail with its name otherwise."""
    end = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < end, f"{what} did not happen within {patience_s:.0f} s"
        time.sleep(0.1)


@dataclass
class SingleNode:
    """The cluster: its folder and the processes that it consists of."""

    folder: Path
    cores: int = 2
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        """Write the configuration and start all three; return when the node takes jobs."""
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        self.folder.chmod(0o755)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        CONFIGURATION.write_text(self._configuration())
        self.begin(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={self._socket}",
            f"--pid-file={self.folder}/munged.pid",
            f"--log-file={self.folder}/munged.log",
            f"--seed-file={self.folder}/munged.seed",
        )
        wait_until(self._socket.exists, "munged's socket")
        self.start_controller()
        self.begin("slurmd", "-D", "-c")
        wait_until(lambda: "idle" in self.ask("sinfo", "-h", "-o", "%T"), "a node that takes jobs")

    def start_controller(self) -> None:
        """Start the controller, with the state that an earlier one left."""
        self.begin("slurmctld", "-D")
        wait_until(lambda: self._answers("scontrol", "ping"), "the controller's answer")

    def kill_controller(self) -> None:
        """Kill the controller as a crash would, once it has written down what it knows.

        It writes its state some seconds after a change. What it has not
        written is lost to any SLURM, jobs included.
        """
        state, now_s = self.folder / "state" / "job_state", time.time()
        wait_until(lambda: state.exists() and state.stat().st_mtime > now_s, "the controller's state")
        self.processes["slurmctld"].kill()
        self.processes.pop("slurmctld").wait()

    def begin(self, program: str, *arguments: str) -> None:
        """Start one of the processes."""
        with (self.folder / f"{program}.out").open("ab") as log:
            self.processes[program] = subprocess.Popen(
                [shutil.which(program) or program, *arguments], stdout=log, stderr=log
            )

    def stop(self) -> None:
        """End the jobs and what ``start`` started, and take the configuration away."""
        if "slurmctld" in self.processes:
            subprocess.run(["scancel", "--state=RUNNING"], check=False, timeout=PATIENCE_S)
            subprocess.run(["scancel", "--state=PENDING"], check=False, timeout=PATIENCE_S)
        for name in ("slurmd", "slurmctld", "munged"):
            process = self.processes.pop(name, None)
            if process:
                process.terminate()
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        CONFIGURATION.unlink(missing_ok=True)

    def ask(self, *command: str) -> str:
        """Return what one of SLURM's commands prints."""
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout

    def running_jobs(self) -> list[str]:
        """Return the ids of the jobs that run."""
        return self.ask("squeue", "-h", "-t", "RUNNING", "-o", "%i").split()

    def _answers(self, *command: str) -> bool:
        run = subprocess.run(command, capture_output=True, check=False, timeout=PATIENCE_S)
        return run.returncode == 0 and b"is UP" in run.stdout

    @property
    def _socket(self) -> Path:
        return self.folder / "munge.socket"

    def _configuration(self) -> str:
        host = socket.gethostname()
        return "\n".join(
            [
                "ClusterName=trioflow-test",
                f"SlurmctldHost={host}(127.0.0.1)",
                f"SlurmctldPort={free_port()}",
                f"SlurmdPort={free_port()}",
                "SlurmUser=root",
                "SlurmdUser=root",
                "AuthType=auth/munge",
                f"AuthInfo=socket={self._socket}",
                f"StateSaveLocation={self.folder}/state",
                f"SlurmdSpoolDir={self.folder}/spool",
                f"SlurmctldPidFile={self.folder}/slurmctld.pid",
                f"SlurmdPidFile={self.folder}/slurmd.pid",
                f"SlurmctldLogFile={self.folder}/slurmctld.log",
                f"SlurmdLogFile={self.folder}/slurmd.log",
                "ProctrackType=proctrack/linuxproc",
                "TaskPlugin=task/none",
                "SelectType=select/cons_tres",
                "SelectTypeParameters=CR_Core_Memory",
                "ReturnToService=2",
                "JobAcctGatherType=jobacct_gather/none",
                "AccountingStorageType=accounting_storage/none",
                "MpiDefault=none",
                "MinJobAge=300",
                "KillWait=2",
                "JobRequeue=0",
                f"NodeName={host} NodeAddr=127.0.0.1 CPUs={self.cores} RealMemory={MEMORY_MB} State=UNKNOWN",
                f"PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP",
                "",
            ]
        )
