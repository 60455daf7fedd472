"""Fit the rule for a new GPU that ships from public measurements."""

from pathlib import Path

from trioflow.base.job_log import log_job
from trioflow_evaluation.fits.new_gpu import PublicPairs, fit_new_gpu_model

with log_job(snakemake.log[0]):
    model = fit_new_gpu_model(PublicPairs(Path(snakemake.params.data)))
    model.save(snakemake.output[0])
