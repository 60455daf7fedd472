# Purpose: predict memory and steps of nanotron's runs on 8 to 512 H100, and the peaks of Megatron-LM's tests; hours,
#          so no part of another target.
# Inputs:  public data (results/data/); torch, for the models' traces
# Outputs: results/clusters/memory.parquet, steps.parquet, peaks.parquet; results/report/clusters.html


rule clusters:
    input:
        "<results>/report/clusters.html",
    localrule: True


rule judge_clusters:
    input:
        cluster_files,
    output:
        table="<results>/clusters/memory.parquet",
    log:
        "<logs>/judge_clusters.log",
    benchmark:
        "<benchmarks>/judge_clusters.tsv"
    conda:
        "../../envs/capture.yaml"
    resources:
        mem_mb=6000,
        runtime=180,
    params:
        library=library_digest("judge_clusters"),
        data=f"{config['results']}/data",
    message:
        "predict the memory of nanotron's runs"
    script:
        "../../scripts/judge_clusters.py"


rule judge_cluster_steps:
    input:
        cluster_files,
    output:
        table="<results>/clusters/steps.parquet",
    log:
        "<logs>/judge_cluster_steps.log",
    benchmark:
        "<benchmarks>/judge_cluster_steps.tsv"
    conda:
        "../../envs/capture.yaml"
    resources:
        mem_mb=6000,
        runtime=300,
    params:
        library=library_digest("judge_cluster_steps"),
        data=f"{config['results']}/data",
    message:
        "predict the steps of nanotron's runs"
    script:
        "../../scripts/judge_cluster_steps.py"


rule judge_cluster_peaks:
    input:
        megatron_files,
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
        library=library_digest("judge_cluster_peaks"),
    message:
        "predict the peaks of Megatron-LM's tests"
    script:
        "../../scripts/judge_cluster_peaks.py"


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
        library=library_digest("describe_clusters"),
    message:
        "show nanotron's steps and memory beside predictions of them"
    script:
        "../../scripts/describe_clusters.py"
