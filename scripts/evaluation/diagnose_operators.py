"""Set every class's held-out predictions beside the public measurements of every GPU."""

from pathlib import Path

from trioflow import tables
from trioflow.base.job_log import log_job
from trioflow.base.provenance import stamp
from trioflow_evaluation.tables import SCHEMAS
from trioflow_evaluation.validation.operators import diagnose_published

with log_job(snakemake.log[0]):
    operators, classes = diagnose_published(Path(snakemake.params.data))
    found = {"diagnosed operators": operators, "diagnosed classes": classes}
    for (name, frame), path in zip(found.items(), snakemake.output, strict=True):
        tables.write_table(frame, name, path, stamp(snakemake.input), SCHEMAS[name])
