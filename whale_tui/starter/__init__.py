"""`whale-tui init NAME`: a working folder to start from, ten tasks and all that a run needs beside them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from whale_tui.domains import rows
from whale_tui.rundir import RunDirError

FOLDER = Path(__file__).with_name("folder")
HARNESS = Path(rows.__file__).with_name("harness.py")
NAMED = ("run.toml", "README.md")
"""Files in which NAME stands for the folder's name."""


def write(folder: Path, *, force: bool = False) -> list[Path]:
    """Write the starter's files into `folder`, made where it is missing. Returns them.

    Raises RunDirError where the folder holds something already; `force` overwrites files of the same names, no others.
    """
    name = folder.resolve().name
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise RunDirError(f"{name!r} can't name a run: use letters, digits, '-', '_' and '.'")
    if folder.exists() and not folder.is_dir():
        raise RunDirError(f"{folder} is a file; name a folder that doesn't exist yet")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise RunDirError(f"{folder} is not empty, and nothing was written; take another name, or --force to overwrite")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for source in [*sorted(path for path in FOLDER.iterdir() if path.is_file()), HARNESS]:
        target = folder / source.name
        if source.name in NAMED:
            text = source.read_text(encoding="utf-8")
            target.write_text(text.replace("NAME", name), encoding="utf-8")
        else:
            shutil.copyfile(source, target)
        written.append(target)
    return written
