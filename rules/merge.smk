# Purpose: join the raw profile of a trace into operators and tensors.
# Inputs:  results/traces/<trace>/
# Outputs: results/operator_tables/<trace>/: operators.parquet, tensors.parquet, trace.json


rule merge:
    input:
        kineto="<results>/traces/{trace}/kineto.json.gz",
        kineto_steps="<results>/traces/{trace}/kineto_steps.json.gz",
        execution_trace="<results>/traces/{trace}/execution_trace.json.gz",
        environment="<results>/traces/{trace}/environment.json",
    output:
        operators="<results>/operator_tables/{trace}/operators.parquet",
        tensors="<results>/operator_tables/{trace}/tensors.parquet",
        facts="<results>/operator_tables/{trace}/trace.json",
    log:
        "<logs>/merge/{trace}.log",
    benchmark:
        "<benchmarks>/merge/{trace}.tsv"
    conda:
        "../envs/analysis.yaml"
    params:
        library=library_digest("merge"),
        profile=subpath(input.environment, parent=True),
        folder=subpath(output.facts, parent=True),
    message:
        "merge the profile of {wildcards.trace} into tables"
    script:
        "../scripts/merge.py"


rule operator_tables:
    """Merge every capture into Parquet tables."""
    input:
        expand("<results>/operator_tables/{trace}/trace.json", trace=TRACES),
