"""Write the page of vTrain's iteration times."""

from trioflow.base.job_log import log_job
from trioflow_evaluation.vtrain.page import build_vtrain_page

with log_job(snakemake.log[0]):
    build_vtrain_page(
        list(snakemake.input.cases), snakemake.input.parameters, snakemake.input.checks, snakemake.output.page
    )
