# Purpose: cut a workload into pipeline stages, and turn one rank's trace into the task graph of
#          all ranks of a plan and batch.
# Inputs:  the workload's traces, the operator cost model, the platform (its host costs), rows of
#          experiments.tsv and plans.tsv
# Outputs: results/partitions/<workload>.json; results/task_graphs/<experiment>/: tasks.parquet,
#          dependencies.parquet


rule partition:
    input:
        facts=trace_files("trace.json"),
        operators=trace_files("operators.parquet"),
        tensors=trace_files("tensors.parquet"),
    output:
        "<results>/partitions/{workload}.json",
    log:
        "<logs>/partition/{workload}.log",
    benchmark:
        "<benchmarks>/partition/{workload}.tsv"
    conda:
        "../envs/analysis.yaml"
    params:
        library=library_digest("partition"),
        traces=trace_folders,
        stages=stages_of_workload,
    message:
        "cut {wildcards.workload} into pipeline stages"
    script:
        "../scripts/partition.py"


rule extrapolate:
    input:
        facts=trace_files("trace.json"),
        operators=trace_files("operators.parquet"),
        tensors=trace_files("tensors.parquet"),
        operator_model="<results>/cost_models/this-machine/operators.json",
        partition=experiment_partition,
        platform="<results>/platforms/this-machine.yaml",
    output:
        tasks="<results>/task_graphs/{experiment}/tasks.parquet",
        dependencies="<results>/task_graphs/{experiment}/dependencies.parquet",
    log:
        "<logs>/extrapolate/{experiment}.log",
    benchmark:
        "<benchmarks>/extrapolate/{experiment}.tsv"
    conda:
        "../envs/analysis.yaml"
    params:
        library=library_digest("extrapolate"),
        traces=trace_folders,
        folder=subpath(output.tasks, parent=True),
        experiment=experiment_row,
        plan=plan_row,
    message:
        "build the task graph of {wildcards.experiment}"
    script:
        "../scripts/extrapolate.py"


rule partitions:
    """Cut every workload into pipeline stages."""
    input:
        expand("<results>/partitions/{workload}.json", workload=MEASURED),


rule task_graphs:
    """Extrapolate every experiment to the tasks of all ranks."""
    input:
        expand(
            "<results>/task_graphs/{experiment}/tasks.parquet", experiment=EXPERIMENTS
        ),
