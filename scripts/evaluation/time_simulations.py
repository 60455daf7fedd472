"""Time the simulator on the scenarios of a figure."""

from trioflow.base.job_log import log_job
from trioflow_evaluation.figures.build import time_simulations

with log_job(snakemake.log[0]):
    time_simulations(snakemake.input[0], snakemake.output[0])
