# Purpose: turn one rank's trace into the task graph of all ranks of a plan and batch.
# Inputs:  the workload's traces, the operator cost model, the stages, the
#          platform (its host costs), a row of plans.tsv
# Outputs: results/task_graphs/<experiment>/: tasks.parquet, dependencies.parquet


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


rule task_graphs:
    input:
        expand(
            "<results>/task_graphs/{experiment}/tasks.parquet", experiment=EXPERIMENTS
        ),
