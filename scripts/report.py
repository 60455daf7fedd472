"""Write the report of the run."""

from trioflow.base.job_log import log_job
from trioflow.report.build import build_report

with log_job(snakemake.log[0]):
    build_report(list(snakemake.input), snakemake.params.folder, snakemake.params.experiments, snakemake.params.plans)
