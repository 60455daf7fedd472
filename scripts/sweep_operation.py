"""Time an operation at the sizes of one level."""

from trioflow.base.job_log import log_job
from trioflow.campaign.sweeps import run_sweep

with log_job(snakemake.log[0]):
    run_sweep(**snakemake.wildcards, path=snakemake.output[0], device=snakemake.params.device)
