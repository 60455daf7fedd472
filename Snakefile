# trioflow: from an operator trace of one rank, predict the training step of many.
# snakemake            the report and case studies (docs/studies.md); traces: that stage (localrules below) and what it needs
# snakemake validation, published, published_traces, clusters, data   public data: network or mirror (docs/data.md)

from snakemake.utils import min_version
from trioflow.provenance import read_json
from trioflow.settings import check_settings

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
include: "rules/retrieve.smk"
include: "rules/capture.smk"
include: "rules/merge.smk"
include: "rules/imports.smk"
include: "rules/fit.smk"
include: "rules/measure.smk"
include: "rules/extrapolate.smk"
include: "rules/simulate.smk"
include: "rules/report.smk"
include: "rules/reproductions/studies.smk"
include: "rules/reproductions/distsim.smk"
include: "rules/sweep.smk"
include: "rules/reproductions/validate.smk"
include: "rules/reproductions/published.smk"
include: "rules/reproductions/figures.smk"


localrules:
    all,
    traces,
    operator_tables,
    cost_models,
    partitions,
    measurements,
    task_graphs,
    timelines,


rule all:
    default_target: True
    input:
        expand("<results>/report/{page}.html", page=["index", "traces", "studies"]),
