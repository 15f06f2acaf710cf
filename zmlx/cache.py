"""Where zmlx keeps what it compiled: the native core, CPU kernels, CUDA cubins.

The directory is `$ZMLX_CACHE_DIR`, else `zmlx` in the user's cache directory (`$XDG_CACHE_HOME` or
`~/.cache`). Objects in it are loaded into the process, so it must belong to the user, nobody else
may write to it, and the folders with the objects have mode 0700. A folder that fails this, cannot
be written, or lets nothing run, is left alone: one warning says why, and the process works in a
temporary directory that it removes at exit. `ZMLX_CACHE=0` asks for that without a warning.
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
    return _folder(root(), kind)


def is_kept(kind: str) -> bool:
    """Whether what is written to `directory(kind)` is there for the next process."""
    wanted = root()
    return wanted is not None and directory(kind) == wanted / kind


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


def root() -> Path | None:
    """The directory that the environment names, not looked at yet; None where nothing is kept."""
    if not enabled():
        return None
    chosen = os.environ.get("ZMLX_CACHE_DIR")
    if chosen:
        try:
            path = Path(chosen).expanduser().absolute()
            str(path).encode()
        except (RuntimeError, UnicodeEncodeError) as error:
            raise ValueError(
                "[zmlx] 'ZMLX_CACHE_DIR' must be a directory whose name is UTF-8 but got "
                f"{chosen!r}: {error}"
            ) from None
        return path
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):
        return Path(base) / "zmlx"
    try:
        return Path.home() / ".cache" / "zmlx"
    except RuntimeError:  # no home directory is known
        return None


@functools.cache
def _folder(wanted: Path | None, kind: str) -> Path:
    """The folder of one kind in `wanted`, checked, or one in a temporary directory instead."""
    if wanted is not None:
        path = wanted / kind
        try:
            wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(wanted, 0o022)
            path.mkdir(mode=0o700, exist_ok=True)
            _check_owner(path, 0o077)
            if os.statvfs(path).f_flag & os.ST_NOEXEC:
                raise _Unusable("it is mounted noexec, so that nothing in it can run")
            with tempfile.TemporaryFile(dir=path):
                pass
        except (OSError, _Unusable) as error:
            _warn(wanted, error.strerror if isinstance(error, OSError) else str(error))
        else:
            return path
    path = _temporary() / kind
    path.mkdir(mode=0o700, exist_ok=True)
    return path


@functools.cache
def _warn(wanted: Path, reason: str | None) -> None:
    """Says once, whatever number of folders it is true of, why `wanted` is not the cache."""
    warnings.warn(
        f"zmlx cannot keep compiled kernels in {wanted}: {reason}. They are compiled again in "
        "each process; set ZMLX_CACHE_DIR to a directory of your own.",
        RuntimeWarning,
        stacklevel=4,
    )


def _check_owner(path: Path, forbidden: int) -> None:
    info = path.stat()
    if not stat.S_ISDIR(info.st_mode):
        raise _Unusable(f"{path} is not a directory")
    if info.st_uid != os.geteuid():
        raise _Unusable(f"{path} belongs to user {info.st_uid} and not to {os.geteuid()}")
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
