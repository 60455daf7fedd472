# Purpose: make traces from public files.
# Inputs:  rows of imports.tsv and the retrieved files
# Outputs: results/imported_traces/<trace>/: operators.parquet, tensors.parquet, trace.json


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


rule published_traces:
    """Import the public traces of config/imports.tsv and put them side by side."""
    input:
        "<results>/report/published_traces.html",
    localrule: True
