"""Leave of the system to use AMX's tiles, which Linux gives a process that asks (Documentation/arch/x86/xstate.rst).

A thread with tiles has 8 KiB more to save when it is switched, so a process has to ask once, before any thread uses them. Threads and
forked children have what their process has.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import sys

_SYSCALL, _GET, _ASK = 158, 0x1022, 0x1023  # arch_prctl of x86-64; ARCH_GET_XCOMP_PERM, ARCH_REQ_XCOMP_PERM
_TILES = 18  # the part of a thread's state that has the tiles' data
BY_SYSTEM = "the system does not grant tiles"  # what a refusal begins with
_REASONS = {
    errno.EINVAL: "Linux before 5.16, or a sandbox, does not know the call",
    errno.ENOSYS: "a sandbox does not know the call",
    errno.EPERM: "a sandbox forbids the call",
    errno.EOPNOTSUPP: "the system does not support tiles on this processor",
    errno.ENOSPC: "a thread's stack for signals is too small for them",
}


@functools.cache
def tiles_refused() -> str | None:
    """Ask once for this process; None if it may use tiles, else the reason. Only for a processor that has AMX."""
    if sys.platform != "linux":
        return f"{BY_SYSTEM}: only Linux is asked"
    granted = ctypes.c_uint64()
    error = _arch_prctl(_ASK, _TILES) or _arch_prctl(_GET, ctypes.addressof(granted))
    if error == 0 and granted.value >> _TILES & 1:
        return None
    reason = _REASONS.get(error, errno.errorcode.get(error, str(error))) if error else "it was asked, and did not"
    return f"{BY_SYSTEM}: {reason}"


def _arch_prctl(request: int, argument: int) -> int:
    """The call's error number, 0 for none."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    failed = call(ctypes.c_long(_SYSCALL), ctypes.c_long(request), ctypes.c_ulong(argument)) != 0
    return ctypes.get_errno() if failed else 0
