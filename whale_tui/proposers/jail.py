"""The jail of an agent's session: bubblewrap with a read-only root and one writable place.

The agent keeps the network, for its API. It sees the system's programs and its own installation; it does not see the
home folder, the runs, the data, other processes, or the sockets by which it could approve its own candidates.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from whale_tui.proposers.scratch import PACKAGES


@cache
def available() -> tuple[str, str]:
    """(path of bwrap, ""), or ("", why there is no jail). Tries it once, since user namespaces may be forbidden."""
    path = shutil.which("bwrap")
    if sys.platform != "linux":
        return "", "bubblewrap exists on Linux only"
    if path is None:
        return "", "bubblewrap (bwrap) is not installed"
    tried = subprocess.run(
        [path, "--ro-bind", "/", "/", *_NAMESPACES, "--proc", "/proc", "--dev", "/dev", "true"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    if tried.returncode:
        return "", f"bubblewrap does not work here: {tried.stderr.strip() or tried.returncode}"
    return path, ""


_NAMESPACES = (
    "--unshare-user-try", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
    "--die-with-parent", "--new-session",
)  # fmt: skip


def command(
    bwrap: str, program: Path, writable: Sequence[Path], hidden: Sequence[Path], readable: Sequence[Path], cwd: Path
) -> list[str]:
    """The words to put before a command that runs `program`.

    `writable` folders stay where they are; `hidden` files and folders are empty inside; `readable` ones are given back
    where a mask would cover them, as the installations of the program and of Python are.
    """
    masks = [p for p in (Path.home(), Path("/tmp"), Path("/var/tmp"), Path("/run")) if p.is_dir() and p != Path("/")]
    masks = list(dict.fromkeys(p.resolve() for p in masks))
    wide = [p.resolve() for p in hidden if p.is_dir()]
    given = [*_installation(program), *map(Path, (sys.prefix, sys.base_prefix)), PACKAGES / "whale_tui", *readable]
    words = [bwrap, "--ro-bind", "/", "/", *_NAMESPACES, "--proc", "/proc", "--dev", "/dev"]
    covers = sorted({*masks, *wide}, key=lambda path: len(path.parts))  # an outer one would cover an inner one
    for mask in covers:
        words += ["--tmpfs", str(mask)]
    back: list[Path] = []
    for path in dict.fromkeys([*given, *_names()]):
        covered = any(path.is_relative_to(mask) and path != mask for mask in covers)
        if path.exists() and covered and not any(mask.is_relative_to(path) for mask in masks):
            words += ["--ro-bind", str(path), str(path)]
            back.append(path)
    for path in map(Path.resolve, hidden):
        if path.is_file():
            words += ["--ro-bind", "/dev/null", str(path)]
        elif path.is_dir() and any(path.is_relative_to(given) for given in back):  # what was given back holds it
            words += ["--tmpfs", str(path)]
    for path in writable:
        words += ["--bind", str(path), str(path)]
    for mask in covers:
        if mask not in (Path("/tmp"), Path("/var/tmp")):
            words += ["--remount-ro", str(mask)]
    return [*words, "--chdir", str(cwd), "--"]


def _installation(program: Path) -> Iterator[Path]:
    """Folders that a program needs around it: as it is named, as it is linked, and its interpreter's."""
    home = Path.home().resolve()
    for path in dict.fromkeys([program, program.resolve()]):
        root = path.parent
        if "node_modules" in path.parts:
            root = Path(*path.parts[: path.parts.index("node_modules")])
            root = root.parent if root.name == "lib" else root
        elif root.name == "bin" and not home.is_relative_to(root.parent) and root.parent != home / ".local":
            root = root.parent
        yield root if not home.is_relative_to(root) else path
        interpreter = root / "bin" / "python"
        if interpreter.exists():
            yield interpreter.resolve().parent.parent
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        if folder and Path(folder).resolve().is_relative_to(home) and Path(folder).resolve() != home:
            yield Path(folder)


def _names() -> Iterator[Path]:
    """Where names are looked up, on systems that keep it under /run."""
    resolver = Path("/etc/resolv.conf").resolve()
    if resolver.is_relative_to("/run") and resolver.parent != Path("/run"):
        yield resolver.parent
    elif resolver.is_relative_to("/run"):
        yield resolver
