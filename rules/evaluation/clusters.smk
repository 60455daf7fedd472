# Purpose: predict memory and steps of nanotron's runs on 8 to 512 H100, and the peaks of Megatron-LM's tests; an hour,
#          so no part of another target.
# Inputs:  public data (results/data/); torch, for the models' traces
# Outputs: results/clusters/memory.parquet, steps.parquet, peaks.parquet; results/report/clusters.html

from trioflow_evaluation.clusters.parts import PARTS


rule clusters:
    """Predict nanotron's runs on 8 to 512 H100 and Megatron-LM's peaks (85 minutes of one core)."""
    input:
        "<results>/report/clusters.html",
    localrule: True


rule judge_clusters:
    input:
        public_files("nanotron/runs-h100"),
    output:
        table="<results>/clusters/memory/{part}.parquet",
    log:
        "<logs>/judge_clusters/{part}.log",
    benchmark:
        "<benchmarks>/judge_clusters/{part}.tsv"
    conda:
        "../../envs/capture.yaml"
    resources:
        mem_mb=6000,
        runtime=60,
    params:
        library=library_digest("evaluation/judge_clusters"),
        data=f"{config['results']}/data",
    message:
        "predict the memory of nanotron's runs: {wildcards.part}"
    script:
        "../../scripts/evaluation/judge_clusters.py"


rule judge_cluster_steps:
    input:
        public_files("nanotron/runs-h100"),
    output:
        table="<results>/clusters/steps/{part}.parquet",
    log:
        "<logs>/judge_cluster_steps/{part}.log",
    benchmark:
        "<benchmarks>/judge_cluster_steps/{part}.tsv"
    conda:
        "../../envs/capture.yaml"
    resources:
        mem_mb=6000,
        runtime=60,
    params:
        library=library_digest("evaluation/judge_cluster_steps"),
        data=f"{config['results']}/data",
    message:
        "predict the steps of nanotron's runs: {wildcards.part}"
    script:
        "../../scripts/evaluation/judge_cluster_steps.py"


rule join_clusters:
    input:
        memory=expand("<results>/clusters/memory/{part}.parquet", part=PARTS),
        steps=expand("<results>/clusters/steps/{part}.parquet", part=PARTS),
    output:
        memory="<results>/clusters/memory.parquet",
        steps="<results>/clusters/steps.parquet",
    log:
        "<logs>/join_clusters.log",
    benchmark:
        "<benchmarks>/join_clusters.tsv"
    conda:
        "../../envs/analysis.yaml"
    params:
        library=library_digest("evaluation/join_clusters"),
    message:
        "join what was predicted of nanotron's runs"
    script:
        "../../scripts/evaluation/join_clusters.py"


rule judge_cluster_peaks:
    input:
        public_files("megatron/peaks"),
    output:
        table="<results>/clusters/peaks.parquet",
    log:
        "<logs>/judge_cluster_peaks.log",
    benchmark:
        "<benchmarks>/judge_cluster_peaks.tsv"
    conda:
        "../../envs/capture.yaml"
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        library=library_digest("evaluation/judge_cluster_peaks"),
    message:
        "predict the peaks of Megatron-LM's tests"
    script:
        "../../scripts/evaluation/judge_cluster_peaks.py"


rule describe_clusters:
    input:
        memory="<results>/clusters/memory.parquet",
        steps="<results>/clusters/steps.parquet",
        peaks="<results>/clusters/peaks.parquet",
    output:
        page="<results>/report/clusters.html",
    log:
        "<logs>/describe_clusters.log",
    benchmark:
        "<benchmarks>/describe_clusters.tsv"
    conda:
        "../../envs/analysis.yaml"
    params:
        library=library_digest("evaluation/describe_clusters"),
    message:
        "show nanotron's steps and memory beside predictions of them"
    script:
        "../../scripts/evaluation/describe_clusters.py"
