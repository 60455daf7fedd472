"""Write the page of nanotron's runs."""

from trioflow.job_log import log_job
from trioflow.reproductions.clusters.page import build_clusters_page

with log_job(snakemake.log[0]):
    build_clusters_page(snakemake.input.memory, snakemake.input.steps, snakemake.output.page)
