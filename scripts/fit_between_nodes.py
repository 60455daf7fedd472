"""Read the collectives over many nodes that ship from a public figure."""

from trioflow.costmodel.collectives.published import build_between_nodes
from trioflow.job_log import log_job

with log_job(snakemake.log[0]):
    build_between_nodes(snakemake.params.data, snakemake.output[0])
