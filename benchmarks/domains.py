"""mean@k of a domain's h0, and of a better harness, on the small model: is there something for a search to find?

    python -m benchmarks.domains [--domain NAME ...] [--set KEY=VALUE] [--harness FILE ...] [--tasks N] [--samples K]

The settings are those of sample_configs/NAME-small.toml (or NAME.toml), so the data are where that file says; say
otherwise with --set 'domain.options.train="..."'. The better harness is benchmarks/harnesses/NAME.py, or what --harness
names. Tasks are the first N of D_test (--split for another). Every harness meets the same tasks and the same chances.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from whale_tui import config
from whale_tui.domains import base
from whale_tui.harness.checks import check, source_hash
from whale_tui.loop.evaluation import mean_at_k, results
from whale_tui.loop.rollouts import Job, Rollouts, Subject, Where
from whale_tui.policy import source
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.client import TransformersEngine
from whale_tui.records import Episode, summarise

ROOT = Path(__file__).parents[1]
HARNESSES = Path(__file__).with_name("harnesses")


def settings(name: str, overrides: list[str]) -> config.Resolved:
    """The domain's sample config; for a domain without one, the defaults."""
    for stem in (f"{name}-small", name):
        file = ROOT / "sample_configs" / f"{stem}.toml"
        if file.is_file():
            return config.load(file, overrides)
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        return config.load(Path(file.name), [f"domain.name={name}", *overrides])


async def measure(name: str, options: argparse.Namespace) -> None:
    resolved = settings(name, options.set)
    given = resolved.config
    domain = base.load(name, given.domain.options, relative_to=resolved.folder)
    better = [Path(file) for file in options.harness] or [HARNESSES / f"{name}.py"]
    sources = [("h0", domain.h0), *((file.name, file.read_text()) for file in better if file.is_file())]
    tasks = list(domain.tasks(options.split))[: options.tasks]
    print(f"{name}: {len(tasks)} tasks of D_{options.split} x {options.samples}, {given.model.name}")
    for line in report.lines() if (report := getattr(domain, "report", None)) is not None else ():
        print(f"  {line}")
    path = source.resolve(given.model.name, print)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "worker.log"
        policy = TransformersEngine(path, log_path=log, device=given.model.device, max_rows=given.rollout.max_rows)
        try:
            info = await policy.start()
            rollouts = Rollouts(policy, ChatTokenizer(path), domain, given.rollout, given.sampling())
            where = Where(0, None, 0, 0, "test", "theta-0000", info.base_hash, given.run.seed)
            print(f"  {'harness':16} {'mean@' + str(options.samples):>7} {'95% interval':>16} {'pass@k':>7} "
                  f"{'invalid':>8} {'cut':>5} {'calls':>6} {'tokens':>7} {'s':>6}")  # fmt: skip
            for number, (label, text) in enumerate(sources):
                checked = check(text)
                if not checked.ok:
                    raise SystemExit(f"{label}: {checked.reason}")
                subject = Subject(f"h{number:04}", source_hash(text), text)
                jobs = [Job(task, subject, sample) for task in tasks for sample in range(options.samples)]
                started = time.perf_counter()
                episodes = await rollouts.run(jobs, where)
                show(label, episodes, time.perf_counter() - started, options.show)
        finally:
            await policy.close()
            await base.close(domain)


def show(label: str, episodes: list[Episode], seconds: float, shown: int) -> None:
    batch, mean = summarise(episodes, seconds), mean_at_k(results(episodes))
    print(
        f"  {label:16} {mean.mean:7.1%} {f'[{mean.low:.1%}, {mean.high:.1%}]':>16} {batch.pass_at or 0:7.1%} "
        f"{batch.invalid:8} {batch.truncated:5} {batch.calls:6} {batch.output_tokens:7} {seconds:6.1f}",
        flush=True,
    )
    for episode in episodes[:shown]:
        uses = "; ".join(f"{use.name}({use.args}) -> {use.result!r}" for use in episode.tools)
        print(f"    {episode.task}: {episode.verdict}, {episode.reason}; answer {episode.answer[:100]!r} {uses[:600]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--domain", nargs="+", default=[])
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--harness", nargs="+", default=[])
    parser.add_argument("--split", choices=["weight", "harness", "test"], default="test")
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--show", type=int, default=0, help="episodes to print of each harness")
    options = parser.parse_args()
    for name in options.domain or sorted(file.stem for file in HARNESSES.glob("*.py")):
        try:
            asyncio.run(measure(name, options))
        except base.DomainError as missing:
            print(f"{name}: left out: {missing}")


if __name__ == "__main__":
    main()
