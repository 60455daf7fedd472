"""Make a trace from public files."""

from trioflow.base.job_log import log_job
from trioflow.trace.importers.detect import import_row
from trioflow.trace.store import save_trace

with log_job(snakemake.log[0]):
    trace = import_row(list(snakemake.input), snakemake.params.row)
    save_trace(trace, snakemake.params.folder)
