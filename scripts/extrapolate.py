"""Build the task graph of all ranks from the trace of one."""

from trioflow.base.job_log import log_job
from trioflow.parallel.extrapolate import extrapolate_experiment

with log_job(snakemake.log[0]):
    extrapolate_experiment(
        snakemake.params.traces,
        snakemake.input.operator_model,
        snakemake.input.partition,
        snakemake.input.platform,
        snakemake.params.experiment,
        snakemake.params.plan,
        snakemake.params.folder,
    )
