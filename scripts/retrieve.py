"""Retrieve one file of public data."""

from trioflow.base.job_log import log_job
from trioflow.datasets.catalogue import DatasetFile
from trioflow.datasets.retrieve import choose_source, retrieve_file

with log_job(snakemake.log[0]):
    source = choose_source(**snakemake.params.addresses)
    entry = DatasetFile(**snakemake.params.entry)
    retrieval = retrieve_file(entry, snakemake.output[0], source)
    print(f"{entry.key}: {retrieval.source}, {entry.licence}")
