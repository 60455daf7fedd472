"""Predict the memory of nanotron's runs."""

from trioflow.base.job_log import log_job
from trioflow.base.provenance import stamp
from trioflow.tables import write_table
from trioflow_evaluation.clusters.steps import judge_memory, read_runs
from trioflow_evaluation.tables import CLUSTER_MEMORY

with log_job(snakemake.log[0]):
    cases = judge_memory(read_runs(snakemake.params.data, snakemake.wildcards.part))
    facts = stamp(snakemake.input)
    write_table(cases, "cluster_memory", snakemake.output.table, facts, CLUSTER_MEMORY)
