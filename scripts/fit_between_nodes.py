"""Read the collectives over many nodes that ship from public runs."""

from trioflow.base.job_log import log_job
from trioflow_evaluation.fits.collectives import build_between_nodes

with log_job(snakemake.log[0]):
    build_between_nodes(snakemake.params.data, snakemake.output[0], snakemake.wildcards.platform)
