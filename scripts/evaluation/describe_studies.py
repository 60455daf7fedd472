"""Write the page of case studies."""

from trioflow.base.job_log import log_job
from trioflow_evaluation.studies.page import build_study_page

with log_job(snakemake.log[0]):
    build_study_page(snakemake.params.folder, snakemake.output.page)
