"""Predict the scenarios of a figure."""

from trioflow.figures.predictions import predict_scenarios
from trioflow.job_log import log_job

with log_job(snakemake.log[0]):
    predict_scenarios(snakemake.input.description, snakemake.output[0])
