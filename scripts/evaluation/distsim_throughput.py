"""Simulate GPT 145B on 128 GPUs at several batches."""

from trioflow.base.job_log import log_job
from trioflow_evaluation.studies.distsim import write_throughput

with log_job(snakemake.log[0]):
    write_throughput(snakemake.output.table)
