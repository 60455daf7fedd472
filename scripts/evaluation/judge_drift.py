"""Predict recorded steps whose ranks drift apart, and write the page about them."""

from trioflow.base.job_log import log_job
from trioflow_evaluation.drift.judge import judge_drift

with log_job(snakemake.log[0]):
    judge_drift(list(snakemake.input), snakemake.output.halves, snakemake.output.causes, snakemake.output.page)
