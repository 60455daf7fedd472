"""Fit the collective cost model from every session's samples."""

import pandas as pd
from trioflow.base.job_log import log_job
from trioflow.costmodel.fits.collectives import fit_collective_model
from trioflow.tables import read_table

with log_job(snakemake.log[0]):
    samples = [read_table(path, "collective_samples") for path in snakemake.input]
    model = fit_collective_model(pd.concat(samples, ignore_index=True))
    model.save(snakemake.output[0], inputs=snakemake.input)
