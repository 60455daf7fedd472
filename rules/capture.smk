# Purpose: run one training step of a workload on one rank under the profiler; the only rule
#          besides measure that imports torch.
# Inputs:  a row of workloads.tsv (of a campaign, of the catalogue), the settings under capture
# Outputs: results/traces/<workload>-b<batch>/: the raw profile of one step with shapes and
#          tensors, several steps profiled lightly, un-profiled step times and the machine


rule capture:
    input:
        smaller_captures,
    output:
        kineto="<results>/traces/{workload}-b{batch}/kineto.json.gz",
        kineto_steps="<results>/traces/{workload}-b{batch}/kineto_steps.json.gz",
        execution_trace="<results>/traces/{workload}-b{batch}/execution_trace.json.gz",
        environment="<results>/traces/{workload}-b{batch}/environment.json",
    log:
        "<logs>/capture/{workload}-b{batch}.log",
    benchmark:
        "<benchmarks>/capture/{workload}-b{batch}.tsv"
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
        library=library_digest("capture"),
        folder=subpath(output.environment, parent=True),
        row=workload_row,
        device=config["device"],
        seed=config["seed"],
        settings=config["capture"],
    message:
        "capture {wildcards.workload} at batch {wildcards.batch} on one rank"
    script:
        "../scripts/capture.py"


rule traces:
    """Capture every workload on this machine."""
    input:
        expand("<results>/traces/{trace}/environment.json", trace=TRACES),
