"""Curves over time that a timeline is shown with: how fast bytes move over each link."""

from __future__ import annotations

import pandas as pd

from trioflow.engine.networks import find_network
from trioflow.network.contention_free import ContentionFreeNetwork
from trioflow.network.fair_share import FairShareNetwork
from trioflow.network.link_usage import Simulated, link_rates

LINK_UNIT = "bytes/s"


def can_count_links(network: str) -> bool:
    """Tell whether a network can be simulated with ``record_links=True``.

    Parameters
    ----------
    network : str
        As for ``engine.networks.find_network``.
    """
    return find_network(network) in (FairShareNetwork, ContentionFreeNetwork)


def count_link_rates(result: Simulated) -> pd.DataFrame:
    """Return the rate of every link that bytes moved over, as ``write_perfetto`` takes curves.

    Parameters
    ----------
    result : Simulated
        Simulated with ``record_links=True``.

    Returns
    -------
    DataFrame
        ``rank`` (null: a link is of no rank), ``counter``, ``unit``,
        ``time_s`` [s] and ``value`` [bytes/s].

    Raises
    ------
    InputError
        When the result holds no traffic.
    """
    rates = link_rates(result)
    return pd.DataFrame({
        "rank": pd.array([None] * len(rates), dtype="Int64"),
        "counter": rates["link"],
        "unit": LINK_UNIT,
        "time_s": rates["time_s"],
        "value": rates["rate_bytes_per_s"],
    })  # fmt: skip
