# Purpose: sweeps: every scenario of config/sweeps/<name>.yaml, many in a job; docs/sweeps.md.
# Inputs:  the description, the traces, platforms and operator times that it names
# Outputs: results/sweeps/<name>/: chunks/, results.parquet, throughput and memory as figures, answer.html to point at


rule simulate_sweep:
    input:
        sweep_files,
    output:
        "<results>/sweeps/{sweep}/chunks/{chunk}.parquet",
    log:
        "<logs>/simulate_sweep/{sweep}/{chunk}.log",
    benchmark:
        "<benchmarks>/simulate_sweep/{sweep}/{chunk}.tsv"
    conda:
        "../envs/analysis.yaml"
    resources:
        mem_mb=4000,
        runtime=chunk_minutes,
    params:
        library=library_digest("simulate_sweep"),
        # Not an input: an edit elsewhere in it leaves finished chunks alone.
        description=sweep_description,
        size=config["sweeps"]["chunk"],
    message:
        "predict chunk {wildcards.chunk} of the sweep {wildcards.sweep}"
    script:
        "../scripts/simulate_sweep.py"


rule collect_sweep:
    input:
        description=sweep_description,
        chunks=sweep_chunks,
    output:
        table="<results>/sweeps/{sweep}/results.parquet",
        throughput=report(
            "<results>/sweeps/{sweep}/throughput.svg",
            caption="../workflow/report/sweep_throughput.rst",
            category="Sweeps",
            labels={"figure": "{sweep}: throughput by ranks"},
        ),
        memory=report(
            "<results>/sweeps/{sweep}/memory.svg",
            caption="../workflow/report/sweep_memory.rst",
            category="Sweeps",
            labels={"figure": "{sweep}: throughput and memory"},
        ),
        page=report(
            "<results>/sweeps/{sweep}/answer.html",
            caption="../workflow/report/sweep_page.rst",
            category="Sweeps",
            labels={"figure": "{sweep}: every scenario, to point at"},
        ),
        pictures=expand(
            "<results>/sweeps/{{sweep}}/{figure}.png", figure=["throughput", "memory"]
        ),
    log:
        "<logs>/collect_sweep/{sweep}.log",
    benchmark:
        "<benchmarks>/collect_sweep/{sweep}.tsv"
    conda:
        "../envs/analysis.yaml"
    resources:
        mem_mb=4000,
        runtime=15,
    params:
        library=library_digest("collect_sweep"),
        folder=subpath(output.throughput, parent=True),
        size=config["sweeps"]["chunk"],
    message:
        "collect the sweep {wildcards.sweep}"
    script:
        "../scripts/collect_sweep.py"


rule sweeps:
    """Predict every sweep of config/sweeps."""
    input:
        expand("<results>/sweeps/{sweep}/results.parquet", sweep=SWEEPS),
    localrule: True
