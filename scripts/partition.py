"""Cut a workload into pipeline stages, balanced by recorded time."""

from pathlib import Path

from trioflow.job_log import log_job
from trioflow.parallel.pipeline import partition_trace

with log_job(snakemake.log[0]):
    partition_trace(
        [Path(facts).parent for facts in snakemake.input.facts],
        snakemake.params.stages,
        snakemake.output[0],
    )
