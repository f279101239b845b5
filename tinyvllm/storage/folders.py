"""Which folder may hold files that are executed or mapped: one that only this user, or root, can change.

A file is believed if it is a regular file of this user or of root, not a link, not writable by others, in such a folder. No digest inside a
folder protects from a user that can write there: that user writes the digest, too.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import stat
import tempfile
import threading
from pathlib import Path

log = logging.getLogger("tinyvllm")

_logged: set[str] = set()
_lock = threading.Lock()


class Refusal(Exception):
    """A folder or a file that is not used; the message is the reason."""


def warn_once(subject: str, message: str) -> None:
    """Log a warning, once for each `subject` of this process: a hundred damaged files are one line."""
    with _lock:
        if subject in _logged:
            return
        _logged.add(subject)
    log.warning("%s", message)


def reason_of(error: OSError) -> str:
    """The system's words for an error, or its class."""
    return error.strerror or type(error).__name__


def require_private(folder: Path) -> Path:
    """The folder without links, created with mode 0700 if it does not exist. Refusal if others can change what is in it.

    A folder of this user that its group may write to, or that others may read, is made private: its files are checked one by one.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()
        status = folder.stat()
        if status.st_uid not in (os.getuid(), 0):
            raise Refusal(f"it belongs to another user (uid {status.st_uid})")
        if status.st_mode & stat.S_IWOTH:
            raise Refusal("every user can write to it; try `chmod 700` on it after a look at what is in it")
        if status.st_uid == os.getuid() and status.st_mode & 0o077:
            folder.chmod(0o700)
        elif status.st_mode & stat.S_IWGRP:
            raise Refusal("it is root's, and its group can write to it; try `chmod 755` on it")
        _require_fixed_parents(folder)
    except OSError as error:
        raise Refusal(reason_of(error)) from error
    return folder


def _require_fixed_parents(folder: Path) -> None:
    """Refusal if another user can put another folder in place of this one: a parent that all can write to and that has no sticky bit."""
    for parent in folder.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise Refusal(f"every user can write to {parent}, and so can put another folder in its place")


def temporary_folder() -> Path | None:
    """A new private folder that is removed when this process ends; None where there is no space for one."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="tinyvllm-"))
    except OSError:
        return None
    atexit.register(_remove_own, folder, os.getpid())
    return folder


def _remove_own(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child must not remove the folder of its parent
        shutil.rmtree(folder, ignore_errors=True)


def open_believed(path: Path) -> int:
    """A descriptor to read a file that only this user or root can have written.

    FileNotFoundError if there is none; Refusal for everything else that cannot be believed or read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Refusal("it is a symbolic link" if path.is_symlink() else reason_of(error)) from error
    status = os.fstat(descriptor)
    reason = None
    if not stat.S_ISREG(status.st_mode):
        reason = "it is not a regular file"
    elif status.st_uid not in (os.getuid(), 0):
        reason = f"it belongs to another user (uid {status.st_uid})"
    elif status.st_mode & stat.S_IWOTH:
        reason = "every user can write to it"
    if reason is not None:
        os.close(descriptor)
        raise Refusal(reason)
    return descriptor


def remove(path: Path) -> bool:
    """Remove what is at a place of ours, whatever it is; whether nothing is there now."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError:
        return False
    return True
