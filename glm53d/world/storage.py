"""The folder of page files: one daemon at a time has it, and its key lies in it. [R19] [R32]

The key makes page hashes that nobody outside can foresee. Without a folder it is new at every start; with one it has to
be the same, or no file would ever be found again.
"""

import fcntl
import os
import secrets
from pathlib import Path

from glm53d.errors import StartError

KEY_BYTES = 16


class Storage:
    """Holds the folder's lock while it lives."""

    def __init__(self, path: str):
        """path: empty: there is no folder. Raises StartError when it cannot be used, or another daemon uses it."""
        self._lock = -1
        self.hash_key = secrets.token_bytes(KEY_BYTES)
        if not path:
            return
        folder = Path(path)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.hash_key = self._read_key(folder / "key")
        except BlockingIOError:
            raise StartError(f"cache.storage_path {path} is in use by another daemon") from None
        except OSError as error:
            raise StartError(f"cache.storage_path {path} cannot be used: {error.strerror}") from None

    def _read_key(self, path: Path) -> bytes:
        """The key that lies there, or from now on does."""
        try:
            key = path.read_bytes()
            if len(key) == KEY_BYTES:
                return key
        except FileNotFoundError:
            pass
        unfinished = path.with_suffix(".new")
        unfinished.unlink(missing_ok=True)
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(fd, self.hash_key)
        finally:
            os.close(fd)
        unfinished.rename(path)
        return self.hash_key

    def close(self) -> None:
        """Another daemon may have the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
