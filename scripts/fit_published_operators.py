"""Fit the operator models of the GPUs that ship from public measurements."""

from pathlib import Path

from trioflow.base.job_log import log_job
from trioflow_evaluation.fits.operators import build_operator_models

with log_job(snakemake.log[0]):
    build_operator_models(Path(snakemake.params.data), snakemake.params.folder)
