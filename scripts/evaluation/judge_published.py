"""Predict one set of public measured steps, and find what its errors are made of."""

from pandas import concat
from trioflow.base.job_log import log_job
from trioflow.base.provenance import stamp
from trioflow.report.attribution import CAUSES, explain_cases
from trioflow.tables import read_table, write_table
from trioflow_evaluation.published.judge import ANCHORS, explain_growth, judge_cases, prepare_set

with log_job(snakemake.log[0]):
    files = snakemake.params.tables
    anchors = read_table(snakemake.input.anchors, "anchors", ANCHORS)
    source, prepared = prepare_set(
        snakemake.wildcards.published_set, snakemake.params.data, files["imports"], snakemake.input.table, anchors
    )
    cases = judge_cases(source, prepared)
    told = explain_cases(
        (case.row.set, case.row.case, case, oracle_s)
        for case, oracle_s in zip(prepared, cases["oracle_s"].tolist(), strict=True)
    )
    causes = concat([told, explain_growth(prepared)], ignore_index=True)
    facts = stamp([snakemake.input.table, *snakemake.input.files])
    write_table(cases, "published_cases", snakemake.output.cases, facts)
    write_table(causes, "causes", snakemake.output.causes, facts, CAUSES)
