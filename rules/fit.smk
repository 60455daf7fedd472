# Purpose: fit what a step is predicted from: operator times, collective times, the machine; and the
#          collectives of GPU platforms from public measurements (those that ship are these).
# Inputs:  all traces (results/operator_tables/), all sessions (results/calibration/); results/data/
# Outputs: results/cost_models/this-machine/: operators.json, operator_fit.parquet,
#          collectives.json; results/platforms/this-machine.yaml;
#          results/cost_models/published/<platform>/collectives.json, <device>/operators.json,
#          tensor-products/model.json and new-gpu/model.json (what ships is this)


rule fit_operators:
    input:
        facts=expand("<results>/operator_tables/{trace}/trace.json", trace=TRACES),
        operators=expand(
            "<results>/operator_tables/{trace}/operators.parquet", trace=TRACES
        ),
        tensors=expand(
            "<results>/operator_tables/{trace}/tensors.parquet", trace=TRACES
        ),
    output:
        model="<results>/cost_models/this-machine/operators.json",
        diagnostics="<results>/cost_models/this-machine/operator_fit.parquet",
    log:
        "<logs>/fit_operators.log",
    benchmark:
        "<benchmarks>/fit_operators.tsv"
    conda:
        "../envs/analysis.yaml"
    params:
        library=library_digest("fit_operators"),
        traces=trace_folders,
        method=config["fit"]["method"],
    message:
        "fit operator times from all traces"
    script:
        "../scripts/fit_operators.py"


rule fit_collectives:
    input:
        expand(
            "<results>/calibration/{workload}/collective_samples.parquet",
            workload=MEASURED,
        ),
    output:
        "<results>/cost_models/this-machine/collectives.json",
    log:
        "<logs>/fit_collectives.log",
    benchmark:
        "<benchmarks>/fit_collectives.tsv"
    conda:
        "../envs/analysis.yaml"
    params:
        library=library_digest("fit_collectives"),
    message:
        "fit collective times from all sessions"
    script:
        "../scripts/fit_collectives.py"


rule describe_machine:
    input:
        sessions=expand(
            "<results>/calibration/{workload}/session.json", workload=MEASURED
        ),
        collectives="<results>/cost_models/this-machine/collectives.json",
    output:
        "<results>/platforms/this-machine.yaml",
    log:
        "<logs>/describe_machine.log",
    benchmark:
        "<benchmarks>/describe_machine.tsv"
    conda:
        "../envs/analysis.yaml"
    params:
        library=library_digest("describe_machine"),
    message:
        "describe this machine as a platform"
    script:
        "../scripts/describe_machine.py"


rule cost_models:
    """Fit operators and collectives, and describe this machine."""
    input:
        "<results>/cost_models/this-machine/operators.json",
        "<results>/cost_models/this-machine/collectives.json",
        "<results>/platforms/this-machine.yaml",


rule fit_published_collectives:
    input:
        published_files,
    output:
        "<results>/cost_models/published/{platform}/collectives.json",
    log:
        "<logs>/fit_published_collectives/{platform}.log",
    benchmark:
        "<benchmarks>/fit_published_collectives/{platform}.tsv"
    conda:
        "../envs/analysis.yaml"
    params:
        library=library_digest("fit_published_collectives"),
        data=f"{config['results']}/data",
    message:
        "fit published collectives of {wildcards.platform}"
    script:
        "../scripts/fit_published_collectives.py"


rule published_collectives:
    """Fit the collectives of every platform that ships, from public tables."""
    input:
        published_collectives,


rule fit_published_operators:
    input:
        public_files("triosim", "neusight"),
    output:
        expand(
            "<results>/cost_models/published/{device}/operators.json",
            device=PUBLISHED_DEVICES,
        ),
    log:
        "<logs>/fit_published_operators.log",
    benchmark:
        "<benchmarks>/fit_published_operators.tsv"
    conda:
        "../envs/analysis.yaml"
    resources:
        mem_mb=4000,
        runtime=20,
    params:
        library=library_digest("fit_published_operators"),
        folder=subpath(output[0], ancestor=2),
        data=f"{config['results']}/data",
    message:
        "fit published operators of all GPUs"
    script:
        "../scripts/fit_published_operators.py"


rule fit_tensor_products:
    input:
        public_files(*HALF_PRODUCTS, *HALF_ATTENTION, *HALF_EXPERTS),
    output:
        "<results>/cost_models/published/tensor-products/model.json",
    log:
        "<logs>/fit_tensor_products.log",
    benchmark:
        "<benchmarks>/fit_tensor_products.tsv"
    conda:
        "../envs/analysis.yaml"
    params:
        library=library_digest("fit_tensor_products"),
        data=f"{config['results']}/data",
    message:
        "fit published matrix products in half precision"
    script:
        "../scripts/fit_tensor_products.py"


rule fit_between_nodes:
    input:
        public_files(*NODE_BANDWIDTHS),
    output:
        "<results>/cost_models/published/{platform}/between_nodes.json",
    log:
        "<logs>/fit_between_nodes/{platform}.log",
    benchmark:
        "<benchmarks>/fit_between_nodes/{platform}.tsv"
    conda:
        "../envs/analysis.yaml"
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        library=library_digest("fit_between_nodes"),
        data=f"{config['results']}/data",
    message:
        "read published collectives over many nodes: {wildcards.platform}"
    script:
        "../scripts/fit_between_nodes.py"


rule fit_new_gpu:
    input:
        public_files("triosim", "neusight", *SINGLE_PRODUCTS),
    output:
        "<results>/cost_models/published/new-gpu/model.json",
    log:
        "<logs>/fit_new_gpu.log",
    benchmark:
        "<benchmarks>/fit_new_gpu.tsv"
    conda:
        "../envs/analysis.yaml"
    resources:
        mem_mb=4000,
        runtime=20,
    params:
        library=library_digest("fit_new_gpu"),
        data=f"{config['results']}/data",
    message:
        "fit the rule for a new GPU"
    script:
        "../scripts/fit_new_gpu.py"
