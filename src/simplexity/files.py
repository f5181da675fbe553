"""Files that are whole or absent: written beside their place, then moved into it."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FORMATS = (".png", ".svg", ".pdf")  # of figures


def check_writable(path: Path) -> None:
    """Raise a ValueError where `path` could not be written, before hours of work depend on it."""
    folder = path.parent
    if path.is_dir():
        raise ValueError(f"cannot write {path}: it is a folder")
    if not folder.is_dir():
        raise ValueError(f"cannot write {path}: the folder {folder} does not exist")
    try:
        descriptor, name = tempfile.mkstemp(dir=folder)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error
    os.close(descriptor)
    os.unlink(name)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to; it becomes `path` when the block ends, and is removed when the block fails."""
    check_writable(path)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(descriptor)
    draft = Path(name)
    try:
        yield draft
        umask = os.umask(0)
        os.umask(umask)
        draft.chmod(0o666 & ~umask)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
