"""Put traces side by side on a page."""

from pathlib import Path

from trioflow.job_log import log_job
from trioflow.report.trace_page import build_trace_page

with log_job(snakemake.log[0]):
    folders = [Path(file).parent for file in snakemake.input]
    build_trace_page(folders, snakemake.output.page, snakemake.output.table)
