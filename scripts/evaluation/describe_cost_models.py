"""Write the page of the cost models' validation."""

from trioflow.base.job_log import log_job
from trioflow_evaluation.validation.page import build_validation_page

with log_job(snakemake.log[0]):
    build_validation_page(
        list(snakemake.input.cases),
        (snakemake.input.operators, snakemake.input.classes),
        snakemake.output.page,
        snakemake.output.table,
    )
