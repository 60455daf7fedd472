"""Write the page of public measured steps."""

from trioflow.base.job_log import log_job
from trioflow_evaluation.published.page import build_published_page

with log_job(snakemake.log[0]):
    build_published_page(
        list(snakemake.input.cases),
        list(snakemake.input.causes),
        snakemake.input.anchors,
        snakemake.output.page,
        snakemake.output.table,
    )
