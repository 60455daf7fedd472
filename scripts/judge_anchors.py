"""Judge the ways from operators timed alone to whole steps on single-GPU steps."""

from trioflow.job_log import log_job
from trioflow.provenance import stamp
from trioflow.published.judge import ANCHORS, judge_anchored_steps
from trioflow.tables import write_table

with log_job(snakemake.log[0]):
    files = snakemake.params.tables
    anchors = judge_anchored_steps(snakemake.params.data, files["imports"], files["published"])
    write_table(anchors, "anchors", snakemake.output[0], stamp(snakemake.input), ANCHORS)
