"""Capture one training step of a workload on one rank."""

from trioflow.base.job_log import log_job
from trioflow.trace.capture.workload import capture_workload

with log_job(snakemake.log[0]):
    capture_workload(
        snakemake.params.row,
        int(snakemake.wildcards.batch),
        snakemake.params.folder,
        device=snakemake.params.device,
        seed=snakemake.params.seed,
        **snakemake.params.settings,
    )
