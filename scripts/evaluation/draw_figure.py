"""Draw a counterpart of one of the paper's figures."""

from trioflow.base.job_log import log_job
from trioflow_evaluation.figures.build import make_figure

with log_job(snakemake.log[0]):
    make_figure(
        snakemake.wildcards.paper_figure,
        {kind: list(files) for kind, files in snakemake.input.items()},
        snakemake.params.plans,
        snakemake.params.figure,
    )
