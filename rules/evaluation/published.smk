# Purpose: predict public measured steps of many GPUs, and show them beside the measurements.
# Inputs:  config/published.tsv, config/imports.tsv and public data (results/data/)
# Outputs: results/published/<set>.parquet, <set>-causes.parquet and anchors.parquet;
#          results/report/published.html, published.parquet and figures in published/;
#          results/drift/{halves,causes}.parquet and results/report/drift.html


include: "clusters.smk"
include: "bridge.smk"
include: "vtrain.smk"


PUBLISHED_PAGE_SETS = [*PUBLISHED_SETS, *VTRAIN_SETS]


rule judge_anchors:
    input:
        public_files("triosim", "neusight"),
    output:
        anchors="<results>/published/anchors.parquet",
        band="<results>/cost_models/published/step-anchor/band.json",
    log:
        "<logs>/judge_anchors.log",
    benchmark:
        "<benchmarks>/judge_anchors.tsv"
    conda:
        "../../envs/analysis.yaml"
    resources:
        mem_mb=4000,
        runtime=20,
    params:
        library=library_digest("evaluation/judge_anchors"),
        data=f"{config['results']}/data",
    message:
        "judge ways from operators timed alone to whole steps, on one GPU"
    script:
        "../../scripts/evaluation/judge_anchors.py"


rule judge_published:
    input:
        files=public_files("triosim", "neusight"),
        anchors="<results>/published/anchors.parquet",
        table=config["tables"]["published"],
    output:
        cases="<results>/published/{published_set}.parquet",
        causes="<results>/published/{published_set}-causes.parquet",
    log:
        "<logs>/judge_published/{published_set}.log",
    benchmark:
        "<benchmarks>/judge_published/{published_set}.tsv"
    conda:
        "../../envs/analysis.yaml"
    resources:
        mem_mb=4000,
        runtime=20,
    params:
        library=library_digest("evaluation/judge_published"),
        data=f"{config['results']}/data",
        tables=config["tables"],
    message:
        "predict public measured steps: {wildcards.published_set}"
    script:
        "../../scripts/evaluation/judge_published.py"


rule describe_published:
    input:
        cases=expand("<results>/published/{name}.parquet", name=PUBLISHED_PAGE_SETS),
        causes=expand("<results>/published/{name}-causes.parquet", name=PUBLISHED_SETS),
        anchors="<results>/published/anchors.parquet",
    output:
        page="<results>/report/published.html",
        table="<results>/report/published.parquet",
        figures=expand(
            "<results>/report/published/{name}.{suffix}",
            name=[
                *PUBLISHED_PAGE_SETS,
                *(f"{one}-sensitivity" for one in PUBLISHED_SETS),
            ],
            suffix=["svg", "png"],
        ),
    log:
        "<logs>/describe_published.log",
    benchmark:
        "<benchmarks>/describe_published.tsv"
    conda:
        "../../envs/analysis.yaml"
    resources:
        mem_mb=4000,
        runtime=15,
    params:
        library=library_digest("evaluation/describe_published"),
    message:
        "put public measured steps beside predictions of them"
    script:
        "../../scripts/evaluation/describe_published.py"


rule judge_drift:
    input:
        public_files("stragglers/jobs"),
    output:
        halves="<results>/drift/halves.parquet",
        causes="<results>/drift/causes.parquet",
        page="<results>/report/drift.html",
    log:
        "<logs>/judge_drift.log",
    benchmark:
        "<benchmarks>/judge_drift.tsv"
    conda:
        "../../envs/analysis.yaml"
    params:
        library=library_digest("evaluation/judge_drift"),
    message:
        "predict recorded steps, jitter included, from others of the same jobs"
    script:
        "../../scripts/evaluation/judge_drift.py"


rule published:
    """Predict public measured steps of many GPUs."""
    input:
        "<results>/report/drift.html",
        "<results>/report/published.html",
        "<results>/report/published_vtrain.html",
    localrule: True
