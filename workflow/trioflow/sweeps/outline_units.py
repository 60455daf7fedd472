"""What the units of a model take and keep: the sums that an outline is made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trioflow.trace.store import Trace

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class OperatorWork:
    """One rank's operators for one micro-batch of some samples.

    Attributes
    ----------
    trace : Trace
        The one that they are of.
    factor : float
        Samples over the traced ones.
    alone_s : ndarray
        Time of each operator by itself [operators] [s].
    spent_s : ndarray
        Time of each unit's phases [units, phases] [s].
    """

    trace: Trace
    factor: float
    alone_s: Floats
    spent_s: Floats


@dataclass(frozen=True)
class UnitWork:
    """What each unit of the model takes on one rank, for one micro-batch of some samples."""

    # Time of each unit's operators and of the tensor-parallel exchanges beside them, what backward
    # computes again included [units] [s]
    forward_s: Floats
    backward_s: Floats
    update_s: Floats
    activation_bytes: Floats  # what forward keeps for backward [units] [bytes]
    send_bytes: Floats  # what goes from each unit to the next one [units] [bytes]


@dataclass(frozen=True)
class UnitState:
    """What each unit keeps on one tensor-parallel rank, whatever the batch."""

    # Parameters, their gradients, optimizer state, and buffers [units] [bytes]
    parameter_bytes: Floats
    gradient_bytes: Floats
    state_bytes: Floats
    buffer_bytes: Floats


@dataclass(frozen=True)
class UnitUpkeep:
    """What gradients of one tensor-parallel rank take beside their operators."""

    # Copying each unit's gradients into buckets, copying them back, and adding a further micro-
    # batch's [units] [s]
    copy_s: Floats
    return_s: Floats
    add_s: Floats
