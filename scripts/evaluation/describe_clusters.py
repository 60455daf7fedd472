"""Write the page of nanotron's runs and Megatron-LM's peaks."""

from trioflow.base.job_log import log_job
from trioflow_evaluation.clusters.page import build_clusters_page

with log_job(snakemake.log[0]):
    given = snakemake.input
    build_clusters_page(given.memory, given.steps, given.peaks, snakemake.output.page)
