"""Compare a photonic circuit network with an electrical mesh on 84 GPUs."""

from trioflow.base.job_log import log_job
from trioflow_evaluation.studies.triosim import study_wafer

with log_job(snakemake.log[0]):
    study_wafer(snakemake.output.table, snakemake.params.figure)
