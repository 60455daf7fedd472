"""Judge every way to predict a collective on messages and ranks that it did not see."""

from pathlib import Path

from trioflow.base.job_log import log_job
from trioflow.base.provenance import stamp
from trioflow.tables import write_table
from trioflow_evaluation.validation.operators import validate_collectives

with log_job(snakemake.log[0]):
    cases = validate_collectives(Path(snakemake.params.data))
    write_table(cases, "validation", snakemake.output[0], stamp(snakemake.input))
