"""Fit the collectives of the platforms that ship from public measurements."""

from pathlib import Path

from trioflow.base.job_log import log_job
from trioflow_evaluation.fits.collectives import fit_published

with log_job(snakemake.log[0]):
    model = fit_published(snakemake.wildcards.platform, Path(snakemake.params.data))
    model.save(snakemake.output[0])
