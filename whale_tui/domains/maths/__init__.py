"""Maths problems from files, with Python or a calculator, and answers that are compared as mathematics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from whale_tui.domains import arithmetic, tables
from whale_tui.domains.arithmetic.calculator import calculate
from whale_tui.domains.base import DomainError, Known, Tool, read_brief, read_h0
from whale_tui.domains.maths import verdict
from whale_tui.domains.maths.demonstrations import DEMONSTRATIONS
from whale_tui.domains.maths.edits import RULES
from whale_tui.domains.maths.python_tool import MODULES, SKIPPED, Python, SandboxPython, SealedPython
from whale_tui.domains.maths.rows import read_task
from whale_tui.harness.forks import Ended, Forks
from whale_tui.records import Episode, Split, Task, Verdict

GET = (
    "put a file of problems there, JSONL, JSON, CSV or Parquet: DAPO-Math-17K (BytedTsinghua-SIA/DAPO-Math-17k), GSM8K "
    "(openai/gsm8k), AIME, MAWPS (mwpt5/MAWPS), or your own with the columns question and answer"
)
CUT_TEST = 256
COMPARE_SECONDS = 5
Size = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]


class Options(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """[domain.options] of maths. Paths start from the config's folder."""

    train: Path | None = None
    """The file of D_weight; D_harness and D_test are cut from it where they have no file of their own."""
    harness_file: Path | None = None
    """The file of D_harness."""
    test_file: Path | None = None
    """The file of D_test."""
    weight: Count = 0
    """Tasks of D_weight. 0: all that are left."""
    harness: Size = 256
    """Tasks of D_harness."""
    test: Count = 0
    """Tasks of D_test. 0: all of `test_file`, or 256 where it is cut from `train`."""
    seed: int = 0
    """Another seed cuts and samples the files in another way."""
    allow_overlap: bool = False
    """Let tasks of D_test be in D_weight or D_harness too."""
    verifier: Literal["math-verify", "boxed"] = "math-verify"
    """"math-verify": the returned answer is mathematically the reference. "boxed": the last \\boxed{} that the policy
    wrote is the reference, character for character (the rule of the study)."""
    tool: Literal["python", "calc"] = "python"
    """"python" runs code; "calc" works out one expression, which suits a small model and word problems."""
    sandbox: tuple[str, ...] = ()
    """Of `python`: URLs of SandboxFusion servers, e.g. ["http://10.0.0.5:8080"]. None: sealed on this machine."""
    python_seconds: Size = 5
    """Processor seconds of one call; wall-clock may be six times that."""
    python_memory_mb: Size = 512
    """Memory of one call."""
    python_output: Annotated[int, Meta(ge=1, le=100_000)] = 4000
    """Characters of output that a call gives back."""
    allow_unsealed: bool = False
    """Run the policy's code without the seal where this system has no seccomp. Think first."""


class Maths:
    name = "maths"

    def __init__(self, options: Options) -> None:
        self.report = tables.Report()
        self._verifier = options.verifier
        self._tasks = _splits(options, self.report)
        self._python: Python | None = None
        self._compare = Forks(
            Path(__file__).with_name("inside_compare.py"),
            modules=("math_verify", *MODULES),
            skip=SKIPPED,
            cpu_seconds=COMPARE_SECONDS,
            wall_seconds=6.0 * COMPARE_SECONDS,
            memory_mb=1024,
            allow_unsealed=options.allow_unsealed,
        )
        if options.tool == "calc":
            worked = arithmetic.demonstrations()
            self.h0 = read_h0(arithmetic.__file__)
            self.brief = read_brief(__file__, {"calc": arithmetic.CALC}, worked, "brief_calc.md")
            self.edits = arithmetic.RULES
            return
        limits = (options.python_seconds, options.python_memory_mb, options.python_output)
        if options.sandbox:
            self._python = SandboxPython(options.sandbox, *limits)
        else:
            self._python = SealedPython(*limits, allow_unsealed=options.allow_unsealed)
        said = (
            "python(code) -> str: runs a Python program with math, fractions, itertools, sympy and numpy; what it "
            f"printed, then the traceback where it raised. {options.python_seconds} s, {options.python_memory_mb} MB, "
            f"{options.python_output:,} characters; cut with a mark. Each call starts anew"
        )
        self.h0 = read_h0(__file__)
        self.brief = read_brief(__file__, {"python": said}, DEMONSTRATIONS)
        self.edits = RULES

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks[split]

    def tools(self, task: Task) -> Mapping[str, Tool]:
        return {"calc": calculate} if self._python is None else {"python": self._python.python}

    def export(self, folder: Path) -> list[str] | None:
        """The calculator. `python` runs what a policy writes, behind this product's seal: it is not taken along."""
        return arithmetic.export_calculator(folder) if self._python is None else None

    async def verify(self, task: Task, answer: str, episode: Episode, *, sampled: Sequence[str] = ()) -> Verdict:
        """The rules are in verdict.py. No reason tells the reference."""
        reference: str = task.private["answer"]
        if self._verifier == "boxed":
            box = verdict.last_written_box(sampled)
            if box is None:
                return Verdict("reject", "the policy wrote no \\boxed{}")
            if box == reference:
                return Verdict("accept", "the box matches")
            return Verdict("reject", "another box than the reference")
        given, wanted = verdict.tidy(answer), verdict.tidy(reference)
        if not given:
            return Verdict("reject", "no answer")
        if len(given) > verdict.MAX_CHARS:
            return Verdict("reject", f"an answer of {len(given):,} characters; at most {verdict.MAX_CHARS:,}")
        same = given == wanted or verdict.same_number(given, wanted)
        if same is None:
            ended = await self._compare.run({"reference": wanted, "answer": given})
            if ended.kind != "done":
                return Verdict("reject", f"the answer can't be compared: {_limit(ended)}")
            if ended.output == "?":
                return Verdict("reject", "the answer can't be read as mathematics")
            same = ended.output == "="
        if same:
            return Verdict("accept", "the answer matches")
        return Verdict("reject", "another answer than the reference")

    async def preflight(self) -> list[str]:
        """The tool answers and is sealed; math-verify tells right from wrong; references are equal to themselves."""
        found = [] if self._python is None else await self._python.preflight()
        if self._verifier == "math-verify":
            try:
                for reference, answer, wanted in (("\\sqrt{8}", "2\\sqrt{2}", "="), ("\\sqrt{8}", "3", "!")):
                    ended = await self._compare.run({"reference": reference, "answer": answer})
                    if ended.output != wanted:
                        found.append(f"math-verify calls {answer} for {reference} {ended.output!r} ({ended.kind})")
            except Exception as error:
                found.append(f"math-verify does not start: {error}")
        return found

    def known_answers(self) -> Iterator[Known]:
        """References as they stand, one more than each, and no answer."""
        for task in self._tasks["weight"][:4]:
            reference = task.private["answer"]
            yield Known(task, reference, "accept")
            yield Known(task, f"{reference} + 1", "reject")
            yield Known(task, "", "reject")

    async def close(self) -> None:
        await self._compare.close()
        if self._python is not None:
            await self._python.close()


def build(options: Options) -> Maths:
    return Maths(options)


def _splits(options: Options, report: tables.Report) -> dict[Split, list[Task]]:
    """D_weight from `train`; the others from their own files, or cut from it first."""
    if options.train is None:
        raise DomainError(f"domain.options.train is not set; {GET}, and name it there")
    from_train: dict[Split, int | float | None] = {"weight": options.weight or None}
    splits: dict[Split, list[Task]] = {}
    own: tuple[tuple[Split, Path | None, int], ...] = (
        ("test", options.test_file, options.test),
        ("harness", options.harness_file, options.harness),
    )
    for split, file, size in own:
        if file is None:
            from_train[split] = size or CUT_TEST
        else:
            tasks = _read(file, report)
            splits |= tables.cut(tasks, {split: min(size, len(tasks)) or None}, options.seed)
    splits |= tables.cut(_read(options.train, report), from_train, options.seed)
    return tables.assemble(splits, report, allow_overlap=options.allow_overlap)


def _read(file: Path, report: tables.Report) -> list[Task]:
    counts = report.of(file.name)
    tasks = tables.distinct(tables.convert(tables.read_rows(file, GET), read_task, counts), counts)
    if not tasks:
        raise DomainError(f"{file}: no problems in it ({'; '.join(report.lines())})")
    return tasks


def _limit(ended: Ended) -> str:
    words = {"cpu": f"it takes over {COMPARE_SECONDS} s", "wall": f"it takes over {6 * COMPARE_SECONDS} s"}
    return words.get(ended.kind, "it takes too much memory, or crashes the comparison")
