"""Predict the peaks of Megatron-LM's tests."""

from trioflow.base.job_log import log_job
from trioflow.base.provenance import stamp
from trioflow.tables import write_table
from trioflow_evaluation.clusters.bridge import judge_peaks, read_cases
from trioflow_evaluation.tables import CLUSTER_PEAKS

with log_job(snakemake.log[0]):
    cases = judge_peaks(read_cases(snakemake.input))
    facts = stamp(snakemake.input)
    write_table(cases, "cluster_peaks", snakemake.output.table, facts, CLUSTER_PEAKS)
