"""Write the page of Megatron-Bridge's rates."""

from trioflow.base.job_log import log_job
from trioflow_evaluation.clusters.page import build_bridge_page

with log_job(snakemake.log[0]):
    build_bridge_page(snakemake.input.rates, snakemake.output.page)
