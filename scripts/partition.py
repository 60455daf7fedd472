"""Cut a workload into pipeline stages, balanced by recorded time."""

from trioflow.base.job_log import log_job
from trioflow.parallel.splits.pipeline import partition_trace

with log_job(snakemake.log[0]):
    partition_trace(snakemake.params.traces, snakemake.params.stages, snakemake.output[0])
