"""Megatron-Bridge's own pages: every row of H100 is read, whatever the release's form."""

from mirror import find_public
from trioflow_evaluation.clusters.bridge import DATASET, read_rates


def test_every_row_of_h100_is_read() -> None:
    files = find_public([DATASET], least=2)
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
