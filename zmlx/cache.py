"""Where zmlx keeps what it compiled: the native core, CPU kernels, CUDA cubins.

The directory is `$ZMLX_CACHE_DIR`, else `zmlx` in the user's cache directory (`$XDG_CACHE_HOME` or
`~/.cache`). Objects in it are loaded into the process, so it must belong to the user, nobody else
may write to it, and the folders with the objects have mode 0700. A directory that fails this, or
that cannot be written, is left alone: one warning says why, and the process works in a temporary
directory that it removes at exit. `ZMLX_CACHE=0` asks for that without a warning.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import stat
import tempfile
import warnings
from pathlib import Path

#: Follows the bytes of an object and is itself followed by their SHA-256 in hexadecimal. Loaders
#: ignore what comes after an ELF image, so the check travels with the file.
SEAL = b"zmlx-object-1 "


class _Unusable(Exception):
    """Why a directory cannot be the cache."""


def enabled() -> bool:
    """Whether compiled objects outlive the process (`ZMLX_CACHE` is not 0)."""
    chosen = os.environ.get("ZMLX_CACHE") or "1"
    if chosen not in ("0", "1"):
        raise ValueError(f"[zmlx] 'ZMLX_CACHE' must be 0 or 1 but got {chosen}.")
    return chosen == "1"


def directory(kind: str) -> Path:
    """The private folder for objects of one kind ("core", "cpu", "cuda"), made if need be."""
    return _folder(_root(_wanted()), kind)


def is_kept() -> bool:
    """Whether what is written to `directory()` is there for the next process."""
    return not _is_temporary(_root(_wanted()))


def seal(data: bytes) -> bytes:
    """`data` with its digest, as `unseal` accepts it."""
    return data + SEAL + hashlib.sha256(data).hexdigest().encode()


def unseal(data: bytes) -> bytes | None:
    """What `seal` was given, or None where the bytes are not as it left them."""
    body, mark, digest = data[: -len(SEAL) - 64], data[-len(SEAL) - 64 : -64], data[-64:]
    intact = mark == SEAL and hashlib.sha256(body).hexdigest().encode() == digest
    return body if intact else None


def read(path: Path) -> bytes | None:
    """The data of an entry; None if there is none, or one that was damaged."""
    try:
        return unseal(path.read_bytes())
    except OSError:
        return None


def write(path: Path, data: bytes) -> None:
    """Makes an entry. Others see all of it or nothing, however many write it at once."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(seal(data))
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def keep(path: Path, data: bytes) -> Path:
    """Makes an entry; where the disk is full, one in a temporary directory, with a warning."""
    try:
        write(path, data)
    except OSError as error:
        warnings.warn(
            f"zmlx cannot keep {path}: {error.strerror}. It is made again in each process.",
            RuntimeWarning,
            stacklevel=3,
        )
        path = _temporary() / path.name
        write(path, data)
    return path


def _wanted() -> Path | None:
    if not enabled():
        return None
    chosen = os.environ.get("ZMLX_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):
        return Path(base) / "zmlx"
    try:
        return Path.home() / ".cache" / "zmlx"
    except RuntimeError:  # no home directory is known
        return None


@functools.cache
def _root(wanted: Path | None) -> Path:
    """`wanted`, checked, or a temporary directory instead of it."""
    if wanted is None:
        return _temporary()
    try:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(wanted, 0o022)
        _folder(wanted, "cpu")
        with tempfile.TemporaryFile(dir=wanted / "cpu"):
            pass
    except (OSError, _Unusable) as error:
        reason = error if isinstance(error, _Unusable) else error.strerror
        warnings.warn(
            f"zmlx cannot keep compiled kernels in {wanted}: {reason}. They are compiled again in "
            "each process; set ZMLX_CACHE_DIR to a directory of your own.",
            RuntimeWarning,
            stacklevel=3,
        )
        return _temporary()
    return wanted


def _folder(root: Path, kind: str) -> Path:
    path = root / kind
    path.mkdir(mode=0o700, exist_ok=True)
    _check_owner(path, 0o077)
    return path


def _check_owner(path: Path, forbidden: int) -> None:
    info = path.stat()
    if not stat.S_ISDIR(info.st_mode):
        raise _Unusable("it is not a directory")
    if info.st_uid != os.geteuid():
        raise _Unusable(f"it belongs to user {info.st_uid} and not to {os.geteuid()}")
    if info.st_mode & forbidden:
        mode = stat.S_IMODE(info.st_mode)
        raise _Unusable(f"{path} has mode {mode:04o} (remedy: chmod 700 {path})")


@functools.cache
def _temporary() -> Path:
    path = Path(tempfile.mkdtemp(prefix="zmlx-"))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child leaves its parent's directory alone
            shutil.rmtree(path, ignore_errors=True)

    atexit.register(remove)
    return path


def _is_temporary(root: Path) -> bool:
    return _temporary.cache_info().currsize > 0 and root == _temporary()
