"""Simulate an experiment's task graph on this machine."""

from trioflow.base.job_log import log_job
from trioflow.export.step_files import simulate_experiment

with log_job(snakemake.log[0]):
    simulate_experiment(
        snakemake.params.graph,
        snakemake.input.platform,
        snakemake.input.collectives,
        snakemake.input.session,
        snakemake.params.traces,
        snakemake.input.captures,
        snakemake.params.folder,
    )
