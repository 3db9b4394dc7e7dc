"""A picture of the real application on a real run, for the README:

    python -m tests.picture RUN OUT.svg [--size 120x36] [--theme whale-dark] [--keys 4,d]

RUN is a run's name or directory; its engine may run or not. Keys are pressed before the picture is taken.
"""

from __future__ import annotations

import argparse
import asyncio
import html
import re
import tempfile
from pathlib import Path

from whale_tui.service import discovery
from whale_tui.tui.app import WhaleApp
from whale_tui.tui.session import real_services


async def take(run: str, nowhere: Path, size: tuple[int, int], theme: str, keys: list[str]) -> str:
    """The picture. `nowhere`: a folder without anybody's settings. Raises SystemExit where there is no such run."""
    rundir = discovery.find(run)
    if rundir is None:
        raise SystemExit(f"no run {run!r}")
    app = WhaleApp(
        real_services("you"), who="you", rundir=rundir, theme=theme, config_folder=nowhere, state_folder=nowhere
    )
    async with app.run_test(size=size) as pilot:
        await pilot.pause(1.5)
        for key in keys:
            await pilot.press(key)
            await pilot.pause(0.5)
        return with_blanks_as_offsets(app.export_screenshot(title=f"whale-tui attach {rundir.name}"))


_TEXT = re.compile(r'<text([^>]*?)x="([\d.]+)"([^>]*?)textLength="([\d.]+)"([^>]*?)>([^<]*)</text>')


def with_blanks_as_offsets(svg: str) -> str:
    """Blanks around a text become its place: renderers differ in what they make of them."""

    def placed(found: re.Match[str]) -> str:
        head, x, middle, length, rest, text = found.groups()
        text = html.unescape(text)
        body = text.strip("\xa0")
        cell = float(length) / max(1, len(text))
        at = float(x) + cell * (len(text) - len(text.lstrip("\xa0")))
        where = f'x="{at:.1f}"{middle}textLength="{cell * len(body):.1f}"'
        return f"<text{head}{where}{rest}>{html.escape(body)}</text>" if body else ""

    return _TEXT.sub(placed, svg)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="120x36")
    parser.add_argument("--theme", default="whale-dark")
    parser.add_argument("--keys", default="")
    given = parser.parse_args()
    width, height = map(int, given.size.split("x"))
    keys = [key for key in given.keys.split(",") if key]
    with tempfile.TemporaryDirectory() as nowhere:
        picture = asyncio.run(take(given.run, Path(nowhere), (width, height), given.theme, keys))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(picture)


if __name__ == "__main__":
    main()
