"""Predict the scenarios of a figure."""

from trioflow.base.job_log import log_job
from trioflow_evaluation.figures.build import predict_scenarios

with log_job(snakemake.log[0]):
    predict_scenarios(snakemake.input.description, snakemake.output[0])
