"""From a campaign's Parquet files back to raw profiles and tables; needs no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow.campaign.compaction import Content, restore_file
from trioflow.campaign.packing import ITEMS_FILE, SWEEPS_FILE
from trioflow.campaign.schemas import read_parquet
from trioflow.errors import InputError

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def unpack_campaign(folder: str | Path, target: str | Path) -> list[Path]:
    """Restore the captured workloads of a campaign, one folder each.

    ``target``: where the folders go; each can be read by ``trace.profile.merge.merge_trace``.

    Raises
    ------
    InputError
        When there are no captures, or a file is damaged or not a campaign's.
    """
    packs = sorted(Path(folder).glob("captures-*.parquet"))
    if not packs:
        raise InputError(
            "no captures-*.parquet here", file=folder, fix="give the folder of a campaign's files"
        )
    folders: dict[Path, None] = {}
    for path in packs:
        for row, cells in enumerate(read_parquet(path, "files")[0]):
            names = (cells["item"], cells["file"])
            # Names become paths: nothing may leave the target folder.
            if not all(_FILE_NAME.fullmatch(name) for name in names):
                raise InputError(f"{names} are no file names", file=path, place=f"row {row}")
            place = Path(target) / cells["item"]
            restore_file(Content(cells["content"], cells["size_bytes"]), place / cells["file"])
            folders[place] = None
    return sorted(folders)


def read_sweeps(folder: str | Path) -> pd.DataFrame:
    """Return the sweep table of a campaign; columns as in ``schemas.SWEEPS``."""
    rows, _ = read_parquet(Path(folder) / SWEEPS_FILE, "sweeps")
    return pd.DataFrame(rows)


def read_items(folder: str | Path) -> pd.DataFrame:
    """Return the table of items; ``attrs["sessions"]`` says what each call found."""
    rows, metadata = read_parquet(Path(folder) / ITEMS_FILE, "items")
    frame = pd.DataFrame(rows)
    frame.attrs = dict[Any, Any](metadata)
    return frame
