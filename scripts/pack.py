"""Pack a trace into one file."""

from trioflow.base.job_log import log_job
from trioflow.trace.store import pack_trace

with log_job(snakemake.log[0]):
    pack_trace(snakemake.params.folder, snakemake.output[0])
