"""Run a workload's experiments for real, on all ranks."""

from trioflow.base.job_log import log_job
from trioflow.measure.session import measure_workload

with log_job(snakemake.log[0]):
    measure_workload(
        snakemake.params.row,
        snakemake.params.experiments,
        snakemake.params.plans,
        snakemake.input.partition,
        snakemake.params.folder,
        device=snakemake.params.device,
        seed=snakemake.params.seed,
        **snakemake.params.settings,
    )
