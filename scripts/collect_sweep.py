"""Put the chunks of a sweep together and draw its figures."""

from trioflow.base.job_log import log_job
from trioflow.sweeps.figures import collect_sweep

with log_job(snakemake.log[0]):
    collect_sweep(
        snakemake.input.description,
        snakemake.input.chunks,
        snakemake.output.table,
        snakemake.params.folder,
        size=snakemake.params.size,
    )
