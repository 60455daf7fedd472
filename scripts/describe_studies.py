"""Write the page of case studies."""

from pathlib import Path

from trioflow.job_log import log_job
from trioflow.reproductions.studies.page import build_study_page

with log_job(snakemake.log[0]):
    build_study_page(Path(snakemake.input.tables[0]).parent, snakemake.output.page)
