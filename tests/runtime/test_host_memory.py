"""Freed buffers come back without page faults once malloc was asked to keep them."""

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys
from jaxkv.runtime.host_memory import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        memory = [libc.malloc(8 << 20) for _ in range(3)]
        for block in memory:
            ctypes.memset(block, 1, 8 << 20)
        for block in memory:
            libc.free(ctypes.c_void_p(block))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
if not keep_freed_memory():
    sys.exit(3)
faults(2)
print(faults(10))
"""


def test_buffers_are_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    if done.returncode == 3:
        pytest.skip("malloc of this C library takes no options")
    assert done.returncode == 0, done.stderr
    # Ten rounds touch 61,440 pages of 4 KiB.
    assert int(done.stdout) < 100
