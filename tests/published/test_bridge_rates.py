"""Megatron-Bridge's own pages: every row of H100 is read, whatever the release's form."""

import os

import pytest
from trioflow.datasets.catalogue import load_catalogue
from trioflow_evaluation.clusters.bridge import DATASET, read_rates


def test_every_row_of_h100_is_read() -> None:
    told = os.environ.get("TRIOFLOW_DATA_MIRROR")
    files = load_catalogue().held_files(told, [DATASET]) if told else []
    if len(files) < 2:
        pytest.skip("the public data is not at hand")
    counted, within = 0, False
    for file in files:
        for line in file.read_text().splitlines():
            if line.startswith("#### "):
                within = "DGX-H100" in line
            counted += line.startswith("|") and (
                "| DGX-H100 |" in line or (within and line[1:8] not in (" Model ", "-------"))
            )
    rates = read_rates(files)
    assert len(rates) == counted > 30
    assert all(rate.measured_tokens_per_s > 100 and rate.gpus >= 8 for rate in rates)
