# Purpose: measure what is worth most on a GPU that is there for some minutes: captures (rule capture) and sweeps of single
#          operations, in the order of config/campaign.tsv. `make campaign MINUTES=15` stops in time, and goes on when
#          called again; docs/capture_campaign.md.
# Inputs:  config/campaign.tsv; what is finished so far
# Outputs: results/traces/<item>/ and results/campaign/sweeps/<item>.parquet, an item each; of all that is finished
#          results/campaign/items.parquet, operation_times.parquet, traces/<trace>.pack


rule sweep_operation:
    output:
        "<results>/campaign/sweeps/{operation}-{precision}-{level}.parquet",
    log:
        "<logs>/sweep_operation/{operation}-{precision}-{level}.log",
    benchmark:
        "<benchmarks>/sweep_operation/{operation}-{precision}-{level}.tsv"
    priority: item_priority
    conda:
        "../envs/capture.yaml"
    threads: 2
    resources:
        measurement=1,
        gpu=capture_gpus,
        mem_mb=4000,
        runtime=15,
    params:
        library=library_digest("sweep_operation"),
        device=config["device"],
    message:
        "time {wildcards.operation} in {wildcards.precision}, {wildcards.level}"
    script:
        "../scripts/sweep_operation.py"


rule pack:
    input:
        operators="<results>/operator_tables/{trace}/operators.parquet",
        tensors="<results>/operator_tables/{trace}/tensors.parquet",
        facts="<results>/operator_tables/{trace}/trace.json",
    output:
        "<results>/campaign/traces/{trace}.pack",
    log:
        "<logs>/pack/{trace}.log",
    benchmark:
        "<benchmarks>/pack/{trace}.tsv"
    conda:
        "../envs/analysis.yaml"
    params:
        library=library_digest("pack"),
        folder=subpath(input.facts, parent=True),
    message:
        "pack the trace {wildcards.trace}"
    script:
        "../scripts/pack.py"


rule collect_campaign:
    input:
        finished_items,
    output:
        table="<results>/campaign/items.parquet",
        times="<results>/campaign/operation_times.parquet",
    log:
        "<logs>/collect_campaign.log",
    benchmark:
        "<benchmarks>/collect_campaign.tsv"
    conda:
        "../envs/analysis.yaml"
    params:
        library=library_digest("collect_campaign"),
        campaign=config["tables"]["campaign"],
        results=subpath(output.table, ancestor=2),
    message:
        "collect what the campaign has measured so far"
    script:
        "../scripts/collect_campaign.py"


rule campaign:
    """Measure every item of config/campaign.tsv, the most valuable first."""
    input:
        campaign_items,
    localrule: True
