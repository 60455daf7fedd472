"""Judge the operator models on one set of public measurements."""

from pathlib import Path

from trioflow.base.job_log import log_job
from trioflow.base.provenance import stamp
from trioflow.tables import write_table
from trioflow_evaluation.validation.operators import SETS

with log_job(snakemake.log[0]):
    cases = SETS[snakemake.wildcards.operator_set](Path(snakemake.params.data))
    write_table(cases, "validation", snakemake.output[0], stamp(snakemake.input))
