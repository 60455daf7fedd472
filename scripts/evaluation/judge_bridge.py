"""Predict Megatron-Bridge's rates on H100."""

from trioflow.base.job_log import log_job
from trioflow.base.provenance import stamp
from trioflow.tables import write_table
from trioflow_evaluation.clusters.bridge import judge_rates, read_rates
from trioflow_evaluation.tables import CLUSTER_RATES

with log_job(snakemake.log[0]):
    cases = judge_rates(read_rates(snakemake.input))
    facts = stamp(snakemake.input)
    write_table(cases, "cluster_rates", snakemake.output.table, facts, CLUSTER_RATES)
