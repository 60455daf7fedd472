# Purpose: judge every cost model on public measurements that it never saw, and show the result.
# Inputs:  public data (results/data/)
# Outputs: results/validation/<set>.parquet and diagnostics/;
#          results/report/cost_models.html, validation.parquet and figures in cost_models/


rule validate_operators:
    input:
        public_files("triosim", "neusight"),
    output:
        "<results>/validation/{operator_set}.parquet",
    log:
        "<logs>/validate_operators/{operator_set}.log",
    benchmark:
        "<benchmarks>/validate_operators/{operator_set}.tsv"
    conda:
        "../../envs/analysis.yaml"
    resources:
        mem_mb=4000,
        runtime=30,
    params:
        library=library_digest("evaluation/validate_operators"),
        data=f"{config['results']}/data",
    message:
        "judge operator models: {wildcards.operator_set}"
    script:
        "../../scripts/evaluation/validate_operators.py"


rule validate_new_gpu:
    input:
        public_files("triosim", "neusight", *SINGLE_PRODUCTS),
    output:
        "<results>/validation/new-gpu.parquet",
    log:
        "<logs>/validate_new_gpu.log",
    benchmark:
        "<benchmarks>/validate_new_gpu.tsv"
    conda:
        "../../envs/analysis.yaml"
    resources:
        mem_mb=4000,
        runtime=20,
    params:
        library=library_digest("evaluation/validate_new_gpu"),
        data=f"{config['results']}/data",
    message:
        "judge the rules for a new GPU on every pair of GPUs"
    script:
        "../../scripts/evaluation/validate_new_gpu.py"


rule validate_collectives:
    input:
        published_collective_files,
    output:
        "<results>/validation/collectives.parquet",
    log:
        "<logs>/validate_collectives.log",
    benchmark:
        "<benchmarks>/validate_collectives.tsv"
    conda:
        "../../envs/analysis.yaml"
    resources:
        mem_mb=4000,
        runtime=20,
    params:
        library=library_digest("evaluation/validate_collectives"),
        data=f"{config['results']}/data",
    message:
        "judge collectives on messages and ranks left out"
    script:
        "../../scripts/evaluation/validate_collectives.py"


rule diagnose_operators:
    input:
        public_files("triosim", "neusight"),
    output:
        operators="<results>/validation/diagnostics/operators.parquet",
        classes="<results>/validation/diagnostics/classes.parquet",
    log:
        "<logs>/diagnose_operators.log",
    benchmark:
        "<benchmarks>/diagnose_operators.tsv"
    conda:
        "../../envs/analysis.yaml"
    resources:
        mem_mb=4000,
        runtime=20,
    params:
        library=library_digest("evaluation/diagnose_operators"),
        data=f"{config['results']}/data",
    message:
        "look at each class of operators of every GPU"
    script:
        "../../scripts/evaluation/diagnose_operators.py"


rule describe_cost_models:
    input:
        cases=expand("<results>/validation/{name}.parquet", name=VALIDATIONS),
        operators="<results>/validation/diagnostics/operators.parquet",
        classes="<results>/validation/diagnostics/classes.parquet",
    output:
        page="<results>/report/cost_models.html",
        table="<results>/report/validation.parquet",
        figures=expand(
            "<results>/report/cost_models/{name}.{suffix}",
            name=[*VALIDATIONS, *PUBLISHED_DEVICES],
            suffix=["svg", "png"],
        ),
    log:
        "<logs>/describe_cost_models.log",
    benchmark:
        "<benchmarks>/describe_cost_models.tsv"
    conda:
        "../../envs/analysis.yaml"
    resources:
        mem_mb=4000,
        runtime=15,
    params:
        library=library_digest("evaluation/describe_cost_models"),
    message:
        "put every cost model beside the measurements"
    script:
        "../../scripts/evaluation/describe_cost_models.py"


rule validation:
    """Judge every cost model on public measurements that it never saw."""
    input:
        "<results>/report/cost_models.html",
        "<results>/cost_models/published/new-gpu/model.json",
    localrule: True
