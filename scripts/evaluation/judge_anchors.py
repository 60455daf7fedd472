"""Judge the ways from operators timed alone to whole steps on single-GPU steps."""

from trioflow.base.job_log import log_job
from trioflow.base.provenance import stamp, write_json
from trioflow.tables import write_table
from trioflow_evaluation.published.judge import ANCHORS, judge_anchored_steps, measure_band

with log_job(snakemake.log[0]):
    anchors = judge_anchored_steps(snakemake.params.data)
    provenance = stamp(snakemake.input)
    write_table(anchors, "anchors", snakemake.output.anchors, provenance, ANCHORS)
    write_json(snakemake.output.band, {**measure_band(anchors), "provenance": provenance})
