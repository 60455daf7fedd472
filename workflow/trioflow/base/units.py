"""Conversions between the units on disk and the units in the library.

Measured time is stored as integer nanoseconds and computed with as float
seconds; sizes are bytes and prefixes are decimal. No other module converts.
"""

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


def format_time(time_s: float) -> str:
    """Write a time [s] with three significant digits and a readable unit; zero is ``0 s``."""
    time_s = float(f"{time_s:.3g}")  # rounding up may reach the next unit
    if not time_s:
        return "0 s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(time_s) >= scale:
            return f"{time_s / scale:.3g} {unit}"
    return f"{time_s / 1e-9:.3g} ns"


def format_bytes(size_bytes: float, digits: int = 3) -> str:
    """Write a size [bytes] with some significant digits and a decimal prefix."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(size_bytes) >= scale:
            return f"{size_bytes / scale:.{digits}g} {unit}"
    return f"{size_bytes:.0f} B"


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
    for scale, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.3g} "
