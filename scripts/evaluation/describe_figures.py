"""Put the counterparts of the paper's figures on a page."""

from trioflow.base.job_log import log_job
from trioflow_evaluation.figures.build import build_figures_page

with log_job(snakemake.log[0]):
    build_figures_page(list(snakemake.input), snakemake.output[0])
