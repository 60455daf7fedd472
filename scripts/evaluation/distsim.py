"""Compare recorded with simulated timelines, and write the page about it."""

from trioflow.base.job_log import log_job
from trioflow_evaluation.distsim.page import build_distsim_page

with log_job(snakemake.log[0]):
    build_distsim_page(
        {
            "sessions": snakemake.input.sessions,
            "recordings": snakemake.input.recordings,
            "timelines": snakemake.input.timelines,
            "benchmarks": snakemake.input.benchmarks,
            "analytical": [snakemake.input.analytical],
            "throughput": [snakemake.input.throughput],
            "search": [snakemake.input.search],
        },
        snakemake.params.experiments,
        snakemake.params.plans,
        snakemake.output.page,
    )
