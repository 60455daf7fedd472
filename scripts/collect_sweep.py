"""Put the chunks of a sweep together and draw its figures."""

from pathlib import Path

from trioflow.job_log import log_job
from trioflow.sweeps.collect import collect_sweep

with log_job(snakemake.log[0]):
    collect_sweep(
        snakemake.input.description,
        snakemake.input.chunks,
        snakemake.output.table,
        Path(snakemake.output.throughput).parent,
        size=snakemake.params.size,
    )
