"""trioflow: predict a training step on many GPUs from an operator trace of one."""

from __future__ import annotations

__version__ = "0.1.0"
