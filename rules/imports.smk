# Purpose: make traces from public files, and put all traces side by side on a page.
# Inputs:  rows of imports.tsv and the retrieved files; results/operator_tables/
# Outputs: results/imported_traces/<trace>/: operators.parquet, tensors.parquet, trace.json;
#          results/report/traces.html, traces.parquet and the same of the imported ones,
#          published_traces.html, published_traces.parquet


rule import_trace:
    input:
        imported_files,
    output:
        operators="<results>/imported_traces/{imported}/operators.parquet",
        tensors="<results>/imported_traces/{imported}/tensors.parquet",
        facts="<results>/imported_traces/{imported}/trace.json",
    log:
        "<logs>/import_trace/{imported}.log",
    benchmark:
        "<benchmarks>/import_trace/{imported}.tsv"
    conda:
        "../envs/analysis.yaml"
    params:
        library=library_digest("import_trace"),
        folder=subpath(output.facts, parent=True),
        row=import_row,
    message:
        "import {wildcards.imported}"
    script:
        "../scripts/import_trace.py"


rule describe_traces:
    input:
        facts=page_traces,
    output:
        page="<results>/report/{traces_page}.html",
        table="<results>/report/{traces_page}.parquet",
    log:
        "<logs>/describe_traces/{traces_page}.log",
    benchmark:
        "<benchmarks>/describe_traces/{traces_page}.tsv"
    conda:
        "../envs/analysis.yaml"
    params:
        library=library_digest("describe_traces"),
        traces=trace_folders,
    message:
        "put the traces side by side: {wildcards.traces_page}"
    script:
        "../scripts/describe_traces.py"


rule published_traces:
    """Import the public traces of config/imports.tsv and put them side by side."""
    input:
        "<results>/report/published_traces.html",
    localrule: True
