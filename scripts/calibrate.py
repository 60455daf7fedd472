"""Run a workload's session: what predictions may know, and its experiments for real."""

from trioflow.base.job_log import log_job
from trioflow.measure.session import calibrate_workload

with log_job(snakemake.log[0]):
    calibrate_workload(
        snakemake.params.row,
        snakemake.params.experiments,
        snakemake.params.plans,
        snakemake.input.partition,
        snakemake.params.folder,
        snakemake.params.record,
        device=snakemake.params.device,
        seed=snakemake.params.seed,
        **snakemake.params.settings,
    )
