"""Merge the raw profile of a trace into operator and tensor tables."""

from trioflow.base.job_log import log_job
from trioflow.trace.profile.merge import merge_trace_folder

with log_job(snakemake.log[0]):
    merge_trace_folder(snakemake.params.profile, snakemake.params.folder)
