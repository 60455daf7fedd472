"""The words under the figures of the case studies: what each shows, how to read it, one limit.

``workflow/report/*.rst`` hold the same words for Snakemake's own report; a
test compares them.
"""

from __future__ import annotations

CAPTIONS: dict[str, tuple[str, str]] = {
    "wafer": (
        "A step of 84 GPUs on an electrical mesh of 7 x 12, and on photonic circuits.",
        "Each panel is a workload with its samples a replica and its plan. The line is the step on the "
        "mesh, in units of the step on a network that takes no time, against the bandwidth of the "
        "mesh's links: with the ring laid along the mesh (snake) and row by row. Level lines are "
        "circuits, which have no such bandwidth: a GPU has 484 GB/s on 8 ports, a circuit takes 20 ms "
        "to set up and bundles one port or all eight. In the first step no circuit is open, later ones "
        "find those of the step before, and without reuse every flow waits for a circuit of its own. "
        "The star is where the mesh has the share of communication that the TrioSim paper reports. "
        "Limit: nothing here was measured. Operator times are predicted for an A100 from shapes alone, an "
        "all-reduce is the ring's closed form, and the paper published neither its mesh's bandwidth nor "
        "how a ring uses the ports.",
    ),
    "hop_speedup": (
        "What Hop's rules gain over waiting for every neighbour, on 8 workers.",
        "Each dot is a seed: a draw of slow-downs between 1 and 10; the bar is the median. A panel says what "
        "is slowed. Speed-up compares the time until all workers have finished 100 iterations with that of "
        'the standard rules on the same graph and the same draw. "gap 2" lets a worker be two iterations '
        'ahead of a neighbour instead of eight; "skip" lets one that is behind leave iterations out, which '
        "counts as finishing them. Limit: time alone is simulated. An iteration on stale or missing updates, "
        "or one that was skipped, teaches the model less than a full one, and nothing here says how much.",
    ),
    "hop_bandwidth": (
        "How the gain of Hop's rules depends on the links.",
        "Medians over eight seeds, against the bandwidth of a link that is not slowed, for both graphs and "
        "each thing that is slowed. Where links are wide, slow links cost little and there is little to gain; "
        "where they are narrow, their throughput limits every rule that uses all updates, and leaving the "
        "slowest neighbour out is what helps. Slow GPUs hold everyone up at any bandwidth. Limit: links are "
        "independent of each other, tokens travel in no time, and the computation is one predicted time of "
        "VGG-11 at batch 128 on an A100.",
    ),
    "distsim_search": (
        "Steps a second of the 15 plans that DistSim (CF 2023) searched: a 48-layer BERT, global batch 16, 4 nodes of 4 A10.",
        "Plans stand in the order of the assumed network (100 Gb/s a node), whose 80 % interval is shaded; the "
        "other lines take communication two to four times as slow. Stars are the two plans that DistSim names, "
        "as measured there. Limit: hidden size, precision, schedule and network were not published and are "
        "assumed, so only order and ratio can be compared.",
    ),
}  # fmt: skip
"""Of each figure: what it shows, and how to read it."""
