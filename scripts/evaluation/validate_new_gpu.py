"""Judge the rules for a new GPU on every pair of GPUs of the public measurements."""

from pathlib import Path

from trioflow.base.job_log import log_job
from trioflow.base.provenance import stamp
from trioflow.tables import write_table
from trioflow_evaluation.fits.new_gpu import PublicPairs
from trioflow_evaluation.validation.new_gpu import validate_new_gpu

with log_job(snakemake.log[0]):
    cases = validate_new_gpu(PublicPairs(Path(snakemake.params.data)))
    write_table(cases, "validation", snakemake.output[0], stamp(snakemake.input))
