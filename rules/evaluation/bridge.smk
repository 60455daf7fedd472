# Purpose: predict Megatron-Bridge's rates on 8 to 1,024 H100; minutes, no part of another target.
# Inputs:  public data (results/data/); torch, for the models' traces
# Outputs: results/clusters/rates.parquet; results/report/bridge.html


rule bridge:
    """Predict Megatron-Bridge's measured rates (minutes)."""
    input:
        "<results>/report/bridge.html",
    localrule: True


rule judge_bridge:
    input:
        public_files("megatron/rates"),
    output:
        table="<results>/clusters/rates.parquet",
    log:
        "<logs>/judge_bridge.log",
    benchmark:
        "<benchmarks>/judge_bridge.tsv"
    conda:
        "../../envs/capture.yaml"
    resources:
        mem_mb=6000,
        runtime=60,
    params:
        library=library_digest("evaluation/judge_bridge"),
    message:
        "predict Megatron-Bridge's rates"
    script:
        "../../scripts/evaluation/judge_bridge.py"


rule describe_bridge:
    input:
        rates="<results>/clusters/rates.parquet",
    output:
        page="<results>/report/bridge.html",
    log:
        "<logs>/describe_bridge.log",
    benchmark:
        "<benchmarks>/describe_bridge.tsv"
    conda:
        "../../envs/analysis.yaml"
    params:
        library=library_digest("evaluation/describe_bridge"),
    message:
        "show Megatron-Bridge's rates beside predictions of them"
    script:
        "../../scripts/evaluation/describe_bridge.py"
