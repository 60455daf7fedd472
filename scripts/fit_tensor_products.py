"""Fit the matrix products in half precision that ship from public tables."""

from trioflow.base.job_log import log_job
from trioflow_evaluation.fits.half_precision import build_tensor_products

with log_job(snakemake.log[0]):
    build_tensor_products(snakemake.params.data, snakemake.output[0])
