"""Write the report of the run."""

from pathlib import Path

from trioflow.job_log import log_job
from trioflow.report.build import build_report

with log_job(snakemake.log[0]):
    build_report(
        list(snakemake.input),
        Path(snakemake.output.page).parent,
        snakemake.params.experiments,
        snakemake.params.plans,
    )
