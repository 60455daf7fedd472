"""Predict vTrain's iteration times by models that did not see them."""

from trioflow.base.job_log import log_job
from trioflow.base.provenance import stamp
from trioflow.tables import write_table
from trioflow_evaluation.tables import CHECKS, PARAMETERS
from trioflow_evaluation.vtrain.judge import judge_vtrain

with log_job(snakemake.log[0]):
    found = judge_vtrain(snakemake.params.data)
    facts = stamp(snakemake.input)
    for name, path in zip(snakemake.params.sets, snakemake.output.cases, strict=True):
        rows = found["cases"][found["cases"]["set"] == name].reset_index(drop=True)
        write_table(rows, "published_cases", path, facts)
    write_table(found["parameters"], "parameters", snakemake.output.parameters, facts, PARAMETERS)
    write_table(found["checks"], "checks", snakemake.output.checks, facts, CHECKS)
