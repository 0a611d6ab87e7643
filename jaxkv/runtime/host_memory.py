"""The C library's memory allocator, set for steps that allocate the same buffers again and again."""

from __future__ import annotations

import ctypes
import functools

# malloc.h of glibc
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MIB = 1 << 20


@functools.cache
def keep_freed_memory() -> bool:
    """Asks malloc to keep what it gets back, up to 256 MiB, and to serve buffers below 64 MiB from it. False if it cannot.

    XLA's CPU backend allocates a step's temporary buffers anew each time. By default glibc returns them to the system, which gives
    them back page by page, zeroed: a sixth of a decode step of the default model. This concerns the whole process:
    what smaller arrays have freed stays with it, too, up to those 256 MiB and what lies below memory still in use.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library than glibc
        return False
    wanted = ((_M_MMAP_THRESHOLD, 64 * _MIB), (_M_TRIM_THRESHOLD, 256 * _MIB), (_M_TOP_PAD, 64 * _MIB))
    # In this order, and no further than it goes: each setting alone ends malloc's own adapting to what it sees.
    return all(mallopt(name, value) for name, value in wanted)
