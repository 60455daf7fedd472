"""Simulate an experiment's task graph on this machine."""

from pathlib import Path

from trioflow.export.step_files import simulate_experiment
from trioflow.job_log import log_job

with log_job(snakemake.log[0]):
    simulate_experiment(
        Path(snakemake.input.tasks).parent,
        snakemake.input.platform,
        snakemake.input.collectives,
        snakemake.input.session,
        snakemake.input.rank_timelines,
        [Path(facts).parent for facts in snakemake.input.facts],
        Path(snakemake.output.summary).parent,
    )
