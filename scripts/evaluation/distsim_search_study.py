"""Rank DistSim's 15 plans of a 48-layer BERT on 16 A10."""

from trioflow.base.job_log import log_job
from trioflow_evaluation.studies.distsim import study_distsim_search

with log_job(snakemake.log[0]):
    study_distsim_search(snakemake.output.table, snakemake.params.figure)
