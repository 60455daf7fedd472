# trioflow: predict the training step of many ranks from an operator trace of one, in seven stages (and their targets):
# capture (traces), merge (operator_tables), calibrate (calibrations), fit (cost_models), extrapolate (partitions,
# task_graphs), simulate (timelines), measure (measurements), report (all). The rest: studies, sweeps, figures, data in docs/.

from snakemake.utils import min_version
from trioflow.base.provenance import read_json
from trioflow.base.settings import check_settings

min_version("9.27")


configfile: "config/config.yaml"


config_schema = read_json(workflow.source_path("workflow/schemas/config.schema.json"))
config.update(check_settings(config, config_schema, "config/config.yaml"))


pathvars:
    results=config["results"],
    logs="<results>/logs",
    benchmarks="<results>/benchmarks",


report: "workflow/report/workflow.rst"


include: "rules/common.smk"
include: "rules/inputs.smk"
include: "rules/capture.smk"
include: "rules/merge.smk"
include: "rules/fit.smk"
include: "rules/calibrate.smk"
include: "rules/measure.smk"
include: "rules/extrapolate.smk"
include: "rules/simulate.smk"
include: "rules/report.smk"
include: "rules/retrieve.smk"
include: "rules/imports.smk"
include: "rules/sweep.smk"
include: "rules/campaign.smk"


module evaluation:
    snakefile:
        "rules/evaluation/Snakefile"
    config:
        config


use rule * from evaluation


localrules:
    all,
    traces,
    operator_tables,
    cost_models,
    partitions,
    calibrations,
    measurements,
    task_graphs,
    timelines,


rule all:
    """The reproduction: predictions beside measurements of this machine, and its traces."""
    default_target: True
    input:
        expand("<results>/report/{page}.html", page=["index", "traces"]),
