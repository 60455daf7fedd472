"""Collect what a campaign has measured so far."""

from pathlib import Path

from trioflow.base.job_log import log_job
from trioflow.campaign.items import collect_campaign, load_items

with log_job(snakemake.log[0]):
    items = load_items(snakemake.params.campaign).values()
    files = [Path(snakemake.output.table), Path(snakemake.output.times)]
    collect_campaign(items, snakemake.params.results, *files)
