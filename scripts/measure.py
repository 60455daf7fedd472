"""Collect the measured steps of a workload's experiments."""

from trioflow.base.job_log import log_job
from trioflow.measure.records import measure_plans

with log_job(snakemake.log[0]):
    measure_plans(snakemake.input.steps, snakemake.input.events, snakemake.params.folder)
