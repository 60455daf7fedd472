"""Small sweeps to test with: the shipped trace, the shipped machines."""

from pathlib import Path
from typing import Any

import yaml

SMALL: dict[str, Any] = {
    "description": "a small sweep",
    "grid": [
        {
            "trace": "gpt2-tiny-b8",
            "platform": ["cpu2-gloo", "dgx-a100"],
            "ranks": [1, 2],
            "tensor": [1, 2],
            "communication_scale": [1, 2.0],
        }
    ],
}


def write_sweep(folder: Path, content: dict[str, Any] | str = SMALL, name: str = "small") -> Path:
    file = folder / f"{name}.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return file
