# Purpose: put public data at its place, from a mirror or its pinned address, verified.
# Inputs:  an entry of workflow/resources/datasets.yaml; the network, or the folder that
#          TRIOFLOW_DATA_MIRROR names; TRIOFLOW_DATA_URL replaces the entry's address
# Outputs: results/data/<owner>+<repository>/<path>


rule retrieve:
    output:
        "<results>/data/{dataset_file}",
    log:
        "<logs>/retrieve/{dataset_file}.log",
    benchmark:
        "<benchmarks>/retrieve/{dataset_file}.tsv"
    retries: 1
    # Nodes of a cluster often have no network; the machine that starts the run has.
    localrule: True
    conda:
        "../envs/analysis.yaml"
    resources:
        mem_mb=500,
        runtime=30,
    params:
        library=library_digest("retrieve"),
        entry=dataset_entry,
        addresses=dataset_addresses,
    message:
        "retrieve {wildcards.dataset_file}"
    script:
        "../scripts/retrieve.py"


rule data:
    """Retrieve the public data that the settings name."""
    input:
        public_files(*config["data"]["groups"]),
    localrule: True
