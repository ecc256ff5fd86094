"""The nano model's checkpoint folder: package data in the official FP8 format, checked against its list of sums."""

import hashlib
from pathlib import Path

from glm53d.errors import CheckpointError

PACKAGE = Path(__file__).parent
SUMS = "SHA256SUMS"


def nano_folder() -> Path:
    """A folder like any checkpoint's. Raises CheckpointError naming a file that is missing or is not what was shipped.

    Weights that were changed answer nonsense and look like a broken engine, so nobody serves them by accident.
    """
    for line in (PACKAGE / SUMS).read_text("utf-8").splitlines():
        digest, name = line.split("  ")
        path = PACKAGE / name
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from None
        if hashlib.sha256(content).hexdigest() != digest:
            raise CheckpointError(f"{path} is not the file that glm53d was shipped with: its SHA-256 differs")
    return PACKAGE
