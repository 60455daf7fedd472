"""Put traces side by side on a page."""

from trioflow.base.job_log import log_job
from trioflow.report.trace_page import build_trace_page

with log_job(snakemake.log[0]):
    build_trace_page(snakemake.params.traces, snakemake.output.page, snakemake.output.table)
