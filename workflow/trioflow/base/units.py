"""Conversions between the units on disk and the units in the library.

Measured time is stored as integer nanoseconds and computed with as float
seconds; sizes are bytes and prefixes are decimal. No other module converts.
"""

from collections.abc import Sequence

NS_PER_S = 1_000_000_000
_NS_PER_MS = 1_000_000
NS_PER_US = 1_000
BYTES_PER_KIB = 1 << 10
BYTES_PER_MIB = 1 << 20
BYTES_PER_GIB = 1 << 30
"""Binary mebibyte: PyTorch states its bucket limits in it."""


def ns_to_s(time_ns: float) -> float:
    """Convert nanoseconds [ns] to seconds [s]."""
    return time_ns / NS_PER_S


def s_to_ns(time_s: float) -> int:
    """Convert seconds [s] to the nearest whole nanosecond [ns]."""
    return round(time_s * NS_PER_S)


def us_to_ns(time_us: float) -> int:
    """Convert microseconds [us], as profilers write them, to nanoseconds [ns]."""
    return round(time_us * NS_PER_US)


def ms_to_ns(time_ms: float) -> int:
    """Convert milliseconds [ms], as tables of other tools hold them, to nanoseconds [ns]."""
    return round(time_ms * _NS_PER_MS)


def ms_to_s(time_ms: float) -> float:
    """Convert milliseconds [ms] to seconds [s]."""
    return time_ms * _NS_PER_MS / NS_PER_S


_MOST_DIGITS = 12
"""Of a size that another one nearly equals."""


def _scale(value: float, units: Sequence[tuple[float, str]], digits: int = 3) -> str:
    """Write a value in the first of the units, the largest first, that it reaches, else in the last."""
    size, unit = next((one for one in units if abs(value) >= one[0]), units[-1])
    return f"{value / size:.{digits}g} {unit}"


def format_time(time_s: float) -> str:
    """Write a time [s] with three significant digits and a readable unit; zero is ``0 s``."""
    time_s = float(f"{time_s:.3g}")  # rounding up may reach the next unit
    return _scale(time_s, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))) if time_s else "0 s"


def format_bytes(size_bytes: float, digits: int = 3) -> str:
    """Write a size [bytes] with some significant digits and a decimal prefix."""
    prefixes = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return _scale(size_bytes, prefixes, digits) if abs(size_bytes) >= 1e3 else f"{size_bytes:.0f} B"


def format_apart(size_bytes: float, other_bytes: float) -> tuple[str, str]:
    """Write two sizes [bytes] as ``format_bytes``, with more digits where they would read alike but differ."""
    digits = 3
    one, other = format_bytes(size_bytes), format_bytes(other_bytes)
    while one == other and size_bytes != other_bytes and digits < _MOST_DIGITS:
        digits += 1
        one, other = format_bytes(size_bytes, digits), format_bytes(other_bytes, digits)
    return one, other


def format_count(count: float) -> str:
    """Write a plain count (operations, say) with a decimal prefix."""
    return _scale(count, ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")))
