"""Simulate an experiment's task graph on this machine."""

from trioflow.export.step_files import simulate_experiment
from trioflow.job_log import log_job

with log_job(snakemake.log[0]):
    simulate_experiment(
        snakemake.params.graph,
        snakemake.input.platform,
        snakemake.input.collectives,
        snakemake.input.session,
        snakemake.input.rank_timelines,
        snakemake.params.traces,
        snakemake.params.folder,
    )
