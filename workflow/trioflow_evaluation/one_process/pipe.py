"""The old ``torch.distributed.pipeline.sync.Pipe``, one process for all stages, as a schedule of trioflow's.

References: Y. Huang et al., GPipe, arXiv 1811.06965; C. Kim et al., torchgpipe, arXiv 2004.09910.
"""

from trioflow.base.plan_row import ScheduleTraits
from trioflow.parallel.schedules.table import BACKWARD, FORWARD, Action, Row, Schedule


def order_pipe(ranks: int, micro_batches: int, stages_per_rank: int) -> Schedule:
    """Return the actions under ``checkpoint="except_last"``: backwards from the last micro-batch, to which each is tied.

    All but the last one's, whose activations are kept, first run the forward again.
    """
    last, rows = micro_batches - 1, list[Row]()
    for rank in range(ranks):
        row = [Action(rank, FORWARD, i) for i in range(micro_batches)] + [Action(rank, BACKWARD, last)]
        for i in reversed(range(last)):
            row += [Action(rank, FORWARD, i), Action(rank, BACKWARD, i)]
        rows.append(tuple(row))
    return Schedule("gpipe-recompute", micro_batches, tuple(rows))


order_pipe.traits = ScheduleTraits(fixed=True, repeats=True, one_process=True)  # type: ignore[attr-defined]
