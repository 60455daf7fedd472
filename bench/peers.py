"""How long other simulators took: measured once, on another machine of two cores, in CPU seconds.

The table cites them; nothing here was measured by ``make bench``. Their code: TrioSim's public
simulator, and ASTRA-sim's analytical network (ring all-reduce, all ranks simulated).
"""

from __future__ import annotations

from rows import Peer

SOURCE = (
    "Times of other simulators were measured once, on another machine of two cores, in CPU seconds; "
    "the ratios say how many times as long they took as trioflow's wall time here."
)
TRIOSIM_RESNET50 = {ranks: Peer("TrioSim", taken_s) for ranks, taken_s in ((16, 5.2), (32, 28.5), (64, 254.0))}
"""DDP of ResNet-50, by GPUs."""
TRIOSIM_VGG13 = {64: Peer("TrioSim", 8.4)}
"""DDP of VGG-13, by GPUs."""
ASTRASIM_RING = {ranks: Peer("ASTRA-sim", taken_s) for ranks, taken_s in ((64, 0.04), (256, 0.41), (1024, 8.2))}
"""One ring all-reduce, by ranks."""
ASTRASIM_LAYERS = {
    64: Peer("ASTRA-sim", 1.06),
    256: Peer("ASTRA-sim", 18.0, "18 to 29 s"),
    1024: Peer("ASTRA-sim", 280.0, "not done after 280 s"),
}
"""DDP of 50 layers with one ring all-reduce each, by ranks."""
