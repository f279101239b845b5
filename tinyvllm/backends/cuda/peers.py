"""Memory of a GPU that the GPUs of other processes reach: where ranks meet without the host.

Each rank offers memory of its own GPU by a handle of the driver, and maps what the others offer. Whether that works depends on the GPUs, on
what connects them and on the driver, and there are machines where it seems to work and numbers do not arrive. So the ranks try it: each
writes into the memory of all others, and they meet there only if everything has arrived. They agree by votes in the page of the host's
memory that they share.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import time

import numpy as np
from tinygrad import Tensor

from tinyvllm.backends.cuda.driver import copies_of
from tinyvllm.bridge import cuda_driver, over_address, synchronize
from tinyvllm.errors import KernelError
from tinyvllm.integers import round_up

log = logging.getLogger("tinyvllm")

HEADER, SITE_HEADER = 4096, 2048  # bytes of the host's memory, and of a site, before their places: kernels/cuda/include/meeting.cuh
VOTE_SECONDS = 50.0  # until a rank that does not vote counts as hanging
_HANDLES, _HANDLE, _VOTES = 1024, 64, 2048  # in the page: where handles begin, their size, where votes begin
_YES, _NO = 1, 2
_MAX_RANKS = 8
_LAZY_ENABLE_PEER_ACCESS = 1
_MARK = 0x5EED0000


class _Page:
    """The page of the host's memory as one rank of `count` sees it. Its first word is not 0 once a rank has ended."""

    def __init__(self, page: np.ndarray, rank: int, count: int):
        self._given_up, self._votes = page[:4].view(np.uint32), page[_VOTES:].view(np.uint32).reshape(-1, _MAX_RANKS)
        self._handles = page[_HANDLES:][: _HANDLE * _MAX_RANKS].reshape(_MAX_RANKS, _HANDLE)
        self._rank, self._count, self._vote = rank, count, 0

    def offer(self, handle: bytes) -> None:
        self._handles[self._rank] = np.frombuffer(handle, np.uint8)

    def offered(self, rank: int) -> bytes:
        return bytes(self._handles[rank])

    def all_agree(self, good: bool) -> bool:
        """Whether all ranks say yes in this vote, which is the n-th of each. KernelError if one has ended, or does not vote."""
        votes, end = self._votes[self._vote, : self._count], time.monotonic() + VOTE_SECONDS
        self._vote += 1
        votes[self._rank] = _YES if good else _NO
        while not votes.all():
            if self._given_up[0]:
                raise KernelError("ranks: another rank has ended before the GPUs have met")
            if time.monotonic() > end:
                missing = ", ".join(str(rank) for rank in np.flatnonzero(votes == 0))
                raise KernelError(f"ranks: rank {missing} of {self._count} has not come to the GPUs' meeting for {VOTE_SECONDS:.0f} s")
            time.sleep(0.0005)
        return bool((votes == _YES).all())


def peer_sites(device: str, page: np.ndarray, rank: int, count: int, nbytes: int) -> list[Tensor] | None:
    """The sites of all ranks, uint8 [nbytes] each, in the memory of their GPUs; None in all ranks if a GPU does not reach another one's.

    All ranks call it at the same time, once for a `page`, uint8 [HEADER], which was zeros. KernelError if one does not.
    """
    synchronize(device)  # makes the device this thread's current one
    votes, own = _Page(page, rank, count), _allocated(nbytes)
    handle = None if own is None else _handle_of(own)
    votes.offer(bytes(_HANDLE) if handle is None else handle)
    addresses: list[int | None] = [None] * count
    reached = votes.all_agree(handle is not None)
    if reached:
        addresses = [own if other == rank else _opened(votes.offered(other)) for other in range(count)]
        reached = votes.all_agree(None not in addresses)
    sites = [address for address in addresses if address is not None]
    reached = reached and _arrives(device, votes, sites, rank)
    releases = [functools.partial(_free if address == own else _close, device, address) for address in sites]
    if not reached:
        for release in releases if sites else [functools.partial(_free, device, own)] if own is not None else []:
            release()
        log.info("ranks: GPUs do not reach each other's memory and meet in that of the host")
        return None
    return [over_address(address, nbytes, device, release) for address, release in zip(sites, releases, strict=True)]


def _arrives(device: str, votes: _Page, sites: list[int], rank: int) -> bool:
    """Whether a word that each rank writes into all sites is there afterwards. Leaves the words of the sites zeros."""
    copies = copies_of(device)

    def write(site: int, start: int, words: np.ndarray) -> None:
        copies.upload(site + 4 * start, words)
        synchronize(device)

    write(sites[rank], 0, np.zeros(SITE_HEADER // 4, np.uint32))
    votes.all_agree(True)
    for site in sites:
        write(site, rank, np.array([_MARK + rank], np.uint32))
    votes.all_agree(True)
    found = np.zeros(len(sites), np.uint32)
    status = cuda_driver().cuMemcpyDtoH_v2(ctypes.c_void_p(found.ctypes.data), ctypes.c_uint64(sites[rank]), found.nbytes)
    arrived = votes.all_agree(status == 0 and found.tolist() == [_MARK + other for other in range(len(sites))])
    write(sites[rank], 0, np.zeros(SITE_HEADER // 4, np.uint32))
    votes.all_agree(True)
    return arrived


def _allocated(nbytes: int) -> int | None:
    """Memory of its own, as the driver gives it: a handle is of a whole allocation."""
    found = ctypes.c_uint64()
    return None if cuda_driver().cuMemAlloc_v2(ctypes.byref(found), round_up(nbytes, 4096)) else found.value


def _handle_of(address: int) -> bytes | None:
    cuda = cuda_driver()
    handle = cuda.CUipcMemHandle()
    status = cuda.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(address))
    return None if status else ctypes.string_at(ctypes.addressof(handle), _HANDLE)


def _opened(handle: bytes) -> int | None:
    cuda, found = cuda_driver(), ctypes.c_uint64()
    copy = cuda.CUipcMemHandle()
    ctypes.memmove(ctypes.addressof(copy), handle, _HANDLE)
    return None if cuda.cuIpcOpenMemHandle_v2(ctypes.byref(found), copy, _LAZY_ENABLE_PEER_ACCESS) else found.value


def _free(device: str, address: int) -> None:
    synchronize(device)
    cuda_driver().cuMemFree_v2(ctypes.c_uint64(address))


def _close(device: str, address: int) -> None:
    synchronize(device)
    cuda_driver().cuIpcCloseMemHandle(ctypes.c_uint64(address))
