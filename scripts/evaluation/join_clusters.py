"""Join what was predicted of the parts of nanotron's runs."""

from trioflow.base.job_log import log_job
from trioflow_evaluation.clusters.scores import join_parts

with log_job(snakemake.log[0]):
    given, made = snakemake.input, snakemake.output
    join_parts(given.memory, "cluster_memory", made.memory)
    join_parts(given.steps, "cluster_steps", made.steps)
