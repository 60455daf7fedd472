"""Predict one chunk of a sweep's scenarios."""

from pathlib import Path

from trioflow.base.job_log import log_job
from trioflow.sweeps.scenarios import simulate_sweep

with log_job(snakemake.log[0]):
    simulate_sweep(
        snakemake.params.description, snakemake.wildcards.chunk, Path(snakemake.output[0]), size=snakemake.params.size
    )
