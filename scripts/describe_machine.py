"""Describe this machine as a platform, from what its sessions measured."""

from trioflow.base.job_log import log_job
from trioflow.measure.machine import describe_machine

with log_job(snakemake.log[0]):
    describe_machine(snakemake.input.sessions, snakemake.input.collectives, snakemake.output[0])
