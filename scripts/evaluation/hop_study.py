"""Run decentralised training under Hop's rules on slowed links and GPUs."""

from trioflow.base.job_log import log_job
from trioflow_evaluation.studies.triosim import study_hop

with log_job(snakemake.log[0]):
    study_hop(snakemake.output.table, snakemake.params.speedup, snakemake.params.bandwidth)
