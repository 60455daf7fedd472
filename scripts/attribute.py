"""Divide the error of every experiment among the models behind it."""

from trioflow.base.job_log import log_job
from trioflow.report.attribution import build_attribution

with log_job(snakemake.log[0]):
    build_attribution(
        snakemake.params.experiments, list(snakemake.input), snakemake.output.attribution, snakemake.output.causes
    )
