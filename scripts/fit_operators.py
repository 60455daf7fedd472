"""Fit the operator cost model from all captured traces."""

from trioflow.base.job_log import log_job
from trioflow.base.provenance import stamp
from trioflow.costmodel.fits.operators import fit_named_model
from trioflow.tables import write_table
from trioflow.trace.store import load_trace

with log_job(snakemake.log[0]):
    traces = [load_trace(folder) for folder in snakemake.params.traces]
    model, diagnostics = fit_named_model(traces, snakemake.params.method)
    model.save(snakemake.output.model, inputs=snakemake.input)
    write_table(diagnostics, "operator_fit", snakemake.output.diagnostics, stamp(snakemake.input))
