"""Predict the experiments by the best rates of operators."""

from trioflow.base.job_log import log_job
from trioflow_evaluation.distsim.recorded import write_analytical

with log_job(snakemake.log[0]):
    write_analytical(
        snakemake.params.traces,
        snakemake.params.workloads,
        snakemake.input.partitions,
        snakemake.input.platform,
        snakemake.params.experiments,
        snakemake.params.plans,
        snakemake.output.table,
    )
