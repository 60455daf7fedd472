# Purpose: predict vTrain's iteration times on A100s, calibrated on others of them and uncalibrated.
# Inputs:  public data (results/data/)
# Outputs: results/published/vtrain-a100{,-plans,-uncalibrated}.parquet, results/published/vtrain/;
#          results/report/published_vtrain.html and figures in published_vtrain/

VTRAIN_SETS = ["vtrain-a100", "vtrain-a100-plans", "vtrain-a100-uncalibrated"]


rule judge_vtrain:
    input:
        public_files("vtrain/iteration-times-a100", "vtrain/all-reduce-a100"),
    output:
        cases=expand("<results>/published/{name}.parquet", name=VTRAIN_SETS),
        parameters="<results>/published/vtrain/parameters.parquet",
        checks="<results>/published/vtrain/checks.parquet",
    log:
        "<logs>/judge_vtrain.log",
    benchmark:
        "<benchmarks>/judge_vtrain.tsv"
    conda:
        "../../envs/analysis.yaml"
    resources:
        mem_mb=2000,
        runtime=15,
    params:
        library=library_digest("evaluation/judge_vtrain"),
        data=f"{config['results']}/data",
        sets=VTRAIN_SETS,
    message:
        "predict vTrain's iteration times"
    script:
        "../../scripts/evaluation/judge_vtrain.py"


rule describe_vtrain:
    input:
        cases=expand("<results>/published/{name}.parquet", name=VTRAIN_SETS),
        parameters="<results>/published/vtrain/parameters.parquet",
        checks="<results>/published/vtrain/checks.parquet",
    output:
        page="<results>/report/published_vtrain.html",
        figures=expand(
            "<results>/report/published_vtrain/predictions.{suffix}",
            suffix=["svg", "png"],
        ),
    log:
        "<logs>/describe_vtrain.log",
    benchmark:
        "<benchmarks>/describe_vtrain.tsv"
    conda:
        "../../envs/analysis.yaml"
    params:
        library=library_digest("evaluation/describe_vtrain"),
    message:
        "show vTrain's iteration times beside predictions of them"
    script:
        "../../scripts/evaluation/describe_vtrain.py"
