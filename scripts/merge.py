"""Merge the raw profile of a trace into operator and tensor tables."""

from pathlib import Path

from trioflow.job_log import log_job
from trioflow.trace.profile.merge import merge_trace_folder

with log_job(snakemake.log[0]):
    merge_trace_folder(
        Path(snakemake.input.environment).parent, Path(snakemake.output.facts).parent
    )
