"""A run told from a script: a real journal, harnesses and episodes of two cycles, without a model.

The tests drive the terminal with it, and it is the demo of what a run looks like:

    python -m tests.scripted DIR            writes the run into DIR
    python -m tests.scripted DIR --open     and opens the terminal on it
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from whale_tui import records as r
from whale_tui.journal import Journal, Segment
from whale_tui.loop import control
from whale_tui.loop.state import RunState, reduce
from whale_tui.records import Batch, Call, Episode, Sampling, Score, Settings, ToolUse, summarise
from whale_tui.rundir import RunDir
from whale_tui.service.protocol import Activity, CommandReply

BASE = (Path(__file__).parent.parent / "whale_tui" / "domains" / "encyclopedia" / "harness.py").read_text()
START = 1_760_000_000.0
TASKS = 24
SAMPLING = Sampling(max_tokens=32)

EDITS = {
    "read two passages": ("SEARCH_K = 1", "SEARCH_K = 2"),
    "read the whole passage": ("PASSAGE_CHARS = 120", "PASSAGE_CHARS = 400"),
    "name the title before the passage": ('PASSAGE = "{text}"', 'PASSAGE = "{title}: {text}"'),
    "search for the last two words of the question": (
        'return task["question"]\n',
        'words = task["question"].rstrip("?").split()\n    return " ".join(words[-2:])\n',
    ),
    "say that one word is enough": ('SYSTEM = ""', 'SYSTEM = "Answer in one word."'),
    "stop at the closing tag": ("STOP = []", 'STOP = ["</answer>"]'),
    "take the last line when no tag is there": (
        'return tagged[-1].strip() if tagged else ""',
        "if tagged:\n        return tagged[-1].strip()\n"
        "    lines = [line for line in text.splitlines() if line.strip()]\n"
        '    return lines[-1].strip() if lines else ""',
    ),
    "allow longer answers": ("MAX_TOKENS = 32", "MAX_TOKENS = 64"),
    "ask a second time when nothing was found": (
        "    reply = model.chat(messages(ask(task, tools)), max_tokens=MAX_TOKENS, stop=STOP)\n"
        "    return parse(reply.text)",
        "    for _ in range(2):\n"
        "        reply = model.chat(messages(ask(task, tools)), max_tokens=MAX_TOKENS, stop=STOP)\n"
        "        if parse(reply.text):\n            break\n"
        "    return parse(reply.text)",
    ),
}
"""Hypothesis -> what it replaces with what, in the base harness."""


def settings(**changes: Any) -> Settings:
    values: dict[str, Any] = {
        "rule": "patience", "epochs": 0.6, "iterations": 6, "weight_min": 4, "weight_window": 3, "weight_patience": 4,
        "harness_min": 4, "harness_patience": 2, "harness_cap": 8, "candidates": 3, "budget_episodes": 6000,
        "approval": "before-eval", "approval_timeout": 0.0,
    }  # fmt: skip
    return Settings(**(values | changes))


class Script:
    """Writes a run event by event, as an engine would: episodes in segments, sources before the events naming them."""

    def __init__(self, path: Path, seed: int = 7) -> None:
        self.rundir = RunDir(path)
        self.rundir.create()
        self.journal = Journal(self.rundir.journal)
        self.state = RunState()
        self.random = random.Random(seed)
        self.now = START
        self.skill = 0.14
        self.bonus: dict[str, float] = {"h0000": 0.0}
        write_tokenizer(self.rundir.path / "tokenizer")
        self.encode = _encoder(self.rundir.path / "tokenizer")

    # ------------------------------------------------------------------------------------------------ one event

    def tell(self, *events: r.AnyEvent, episodes: Iterable[Segment] = (), seconds: float = 4.0) -> None:
        for event in events:
            self.now += seconds
            event.at = self.now
        self.journal.commit(events, episodes)
        for event in events:
            reduce(self.state, event)

    def start(
        self, name: str = "first-light", condition: r.Condition = "adaptive", seed: int = 1, **changes: Any
    ) -> None:
        self.rundir.write_harness("h0000", BASE, {"parent": "", "hypothesis": "the base harness", "proposer": ""})
        (self.rundir.path / "config.toml").write_text(f'[run]\nname = "{name}"\ncondition = "{condition}"\n')
        self.tell(
            r.RunStarted(
                run=name, condition=condition, seed=seed, domain="encyclopedia", model="smollm2-135m-instruct",
                config_hash="c0ffee", policy_hash="p0", harness_hash=r.content_hash(BASE), tokenizer_hash="t0",
                splits={"weight": 80, "harness": TASKS, "test": TASKS}, steps_per_epoch=10, budget_episodes=6000,
                settings=settings(**changes), version="0.1.0",
            ),
            r.EngineStarted(pid=4242, resumed=False),
        )  # fmt: skip
        self.test("start")

    # ----------------------------------------------------------------------------------------------- the phases

    def test(self, label: str) -> None:
        batch, segment, _ = self.episodes("test", TASKS, 2)
        low, high = max(0.0, (batch.mean or 0) - 0.07), min(1.0, (batch.mean or 0) + 0.07)
        self.tell(
            r.TestScored(
                score=r.TestScore(
                    policy=self.state.policy, harness=self.state.harness, policy_hash=self.state.policy_hash,
                    harness_hash=self.state.harnesses[self.state.harness].source_hash, mean=batch.mean or 0.0, low=low,
                    high=high, n=TASKS, samples=2, pass_at=batch.pass_at or 0.0, label=label,
                ),
                batch=batch, segment=segment.name,
            ),
            episodes=[segment],
        )  # fmt: skip

    def weight_phase(self, steps: int, why: str = "after the harness phase", end: bool = True) -> None:
        self.tell(r.PhaseStarted(cycle=self.state.cycle + 1, phase="weight", reason=why))
        for step in range(1, steps + 1):
            self.step(step)
        if end:
            self.tell(r.PhaseFinished(cycle=self.state.cycle, phase="weight", reason="4 steps without a new best"))

    def step(self, step: int) -> None:
        self.sample(step)
        self.train(step)

    def sample(self, step: int) -> None:
        batch, segment, _ = self.episodes("train", 8, 4, step=step)
        self.tell(
            r.StepSampled(
                step=step, policy=self.state.policy, harness=self.state.harness, tasks_drawn=8 * step, batch=batch,
                segment=segment.name,
            ),
            episodes=[segment],
        )  # fmt: skip

    def train(self, step: int) -> None:
        sampled = self.state.open_step
        assert sampled is not None
        name = f"theta-{len(self.state.versions):04d}"
        if sampled.batch.accepted:
            self.skill = min(0.62, self.skill + 0.016)
            probe = -17.25 + self.random.random()
            self.tell(
                r.VersionPublished(
                    policy=name, hash=f"p{len(self.state.versions)}", parent=self.state.policy, path=f"weights/{name}",
                    manifest_hash="m", probe_trainer=probe, probe_rollout=probe,
                )
            )  # fmt: skip
        self.tell(
            r.StepFinished(
                step=step, policy=self.state.policy, trained=sampled.batch.accepted,
                trained_tokens=sampled.batch.accepted * 9, loss=1.1 - self.skill, grad_norm=0.8, seconds=2.5,
                skipped="" if sampled.batch.accepted else "nothing accepted",
            )
        )  # fmt: skip

    def begin_search(self) -> None:
        self.tell(r.PhaseStarted(cycle=self.state.cycle, phase="harness", reason="after the weight phase"))
        self.score(self.state.harness)
        self.end_iteration(True)

    def propose(self, *hypotheses: str, parent: str = "", proposer: str = "rules") -> list[str]:
        parent = parent or self.state.harness
        iteration, made = self.state.iteration + 1, []
        for hypothesis in hypotheses:
            name = f"h{len(self.state.harnesses):04d}"
            before, after = EDITS[hypothesis]
            source = self.rundir.harness_source(parent).replace(before, after)
            self.rundir.write_harness(
                name, source, {"parent": parent, "hypothesis": hypothesis, "proposer": proposer, "iteration": iteration}
            )
            self.tell(
                r.CandidateProposed(
                    harness=name, iteration=iteration, parent=parent, hypothesis=hypothesis, proposer=proposer,
                    source_hash=r.content_hash(source),
                )
            )  # fmt: skip
            made.append(name)
        folder = self.rundir.proposer / f"it-{self.state.total_iterations + 1:04d}"
        folder.mkdir(exist_ok=True)
        (folder / "prompt.md").write_text(f"Improve {parent}.\n")
        (folder / "transcript.jsonl").write_text('{"read": "harnesses/h0000/harness.py"}\n')
        self.tell(
            r.ProposalsIn(
                iteration=iteration, candidates=made, seconds=41, prompt_tokens=5200, output_tokens=900, dollars=0.021
            )
        )
        return made

    def check(self, *names: str, warnings: tuple[str, ...] = ()) -> None:
        for name in names:
            batch, segment, _ = self.episodes("smoke", 1, 1, harness=name)
            self.tell(
                r.CandidateChecked(
                    harness=name, ok=True, reason="", warnings=list(warnings), smoke=batch, segment=segment.name
                ),
                episodes=[segment],
            )

    def score(self, *names: str) -> None:
        for name in names:
            batch, segment, results = self.episodes("search", TASKS, 1, harness=name)
            self.tell(
                r.CandidateScored(
                    harness=name, iteration=self.state.iteration + 1,
                    score=Score(
                        policy=self.state.policy, policy_hash=self.state.policy_hash,
                        harness_hash=self.state.harnesses[name].source_hash, tasks_hash="d0", sampling=SAMPLING,
                        batch=batch, results=results, segment=segment.name,
                    ),
                ),
                episodes=[segment],
            )  # fmt: skip

    def end_iteration(self, measured: bool = True) -> None:
        best = self.state.ranking()[0]
        mean = best.mean(self.state.policy_hash)
        self.tell(
            r.IterationFinished(iteration=self.state.iteration + 1, best=best.id, best_mean=mean, measured=measured)
        )

    def accept(self, reason: str) -> None:
        best = self.state.ranking()[0].id
        previous = self.state.harness
        if best != previous:
            self.tell(r.HarnessAccepted(harness=best, previous=previous, reason="highest success rate of the archive"))
        self.tell(r.PhaseFinished(cycle=self.state.cycle, phase="harness", reason=reason))

    def command(self, what: str, who: str = "ann", **args: Any) -> None:
        planned = control.plan(self.state, what, args, who)
        number = len(self.state.commands)
        self.tell(
            r.CommandTaken(id=f"s{number}", who=who, what=what, args=planned.args, effect=planned.effect),
            *planned.events,
        )

    # --------------------------------------------------------------------------------------------------- episodes

    def episodes(
        self, purpose: r.Purpose, tasks: int, samples: int, harness: str = "", step: int = 0
    ) -> tuple[Batch, Segment, dict[str, list[float]]]:
        harness = harness or self.state.harness
        rate = self.skill + self.bonus.get(harness, 0.0)
        start = 8 * (step - 1) if purpose == "train" else 0
        made = [
            self.episode(purpose, f"{purpose[:2]}-{(start + task) % 80:03d}", sample, harness, step, rate)
            for task in range(tasks)
            for sample in range(samples)
        ]
        results: dict[str, list[float]] = {}
        for episode in made:
            if episode.reward is not None:
                results.setdefault(episode.task, []).append(episode.reward)
        return summarise(made, 0.4 * len(made) / 8), self.journal.write_segment(made), results

    def episode(self, purpose: r.Purpose, task: str, sample: int, harness: str, step: int, rate: float) -> Episode:
        chance, state = self.random.random(), self.state
        verdict: r.Decision = "invalid" if chance > 0.995 else "accept" if chance < rate else "reject"
        town = ("Arlen", "Bexhill", "Corvo", "Dunmere")[hash_of(task) % 4]
        answer = "slate" if verdict == "accept" else ("tin", "salt", "")[sample % 3]
        prompt = (
            f"<|im_start|>user\n{town} is a hill town known for its slate quarries, worked since 1712.\n"
            f"Question: What is {town} known for?\n"
            "Answer the question from the passage, inside <answer> and </answer>.<|im_end|>\n<|im_start|>assistant\n"
        )
        said = f"<answer>{answer}</answer><|im_end|>" if answer else f"{town} is a town known for its"
        ids = self.encode(said)
        call = Call(
            prompt_ids=self.encode(prompt), output_ids=ids, logprobs=[-self.random.expovariate(2.0) for _ in ids],
            finish_reason="stop" if answer else "length", seed=self.random.getrandbits(31), max_tokens=32,
        )  # fmt: skip
        reasons = {
            "accept": "the answer is one of the references",
            "reject": f"answered {answer!r}, wanted 'slate'" if answer else "no <answer> tag",
            "invalid": "the sealed worker was lost",
        }
        return Episode(
            id=f"{self.random.getrandbits(48):012x}", cycle=state.cycle, phase=state.phase, step=step,
            iteration=state.iteration + 1 if state.phase == "harness" else 0, purpose=purpose, task=task,
            task_hash=r.content_hash(task), sample=sample, policy=state.policy, policy_hash=state.policy_hash,
            harness=harness, harness_hash=state.harnesses[harness].source_hash, tokenizer_hash="t0", sampling=SAMPLING,
            calls=[call],
            tools=[ToolUse(name="search", args=f'{{"query": "What is {town} known for?", "k": 1}}',
                           result=f'[{{"title": "{town}", "text": "{town} is a hill town known for its slate"}}]',
                           seconds=0.002, after_call=0)],
            answer=answer, verdict=verdict, reason=reasons[verdict], truncated=not answer,
            reward=None if verdict == "invalid" else float(verdict == "accept"), seconds=0.7,
        )  # fmt: skip


def hash_of(text: str) -> int:
    return int(r.content_hash(text), 16)


# --------------------------------------------------------------------------------------------------------- the story


def write_run(path: Path, *, name: str = "first-light", until: str = "waiting") -> Script:
    """Two cycles with all that can happen in one. `until`: "training", "waiting" (for a person), or "finished"."""
    s = Script(path)
    s.start(name)
    s.weight_phase(10, "first_phase = weight")
    s.begin_search()

    first = s.propose("read two passages", "read the whole passage", "name the title before the passage")
    s.bonus.update(zip(first, (0.02, 0.17, 0.05), strict=True))
    s.check(*first[:2])
    s.check(first[2], warnings=("holds the reference answer of se-004 verbatim",))
    s.command("approve", harness=first[0])
    s.command("approve", harness=first[1])
    s.command("veto", who="bob", harness=first[2], reason="the title is the answer in a third of the tasks")
    s.score(*first[:2])
    s.end_iteration()

    second = s.propose(
        "say that one word is enough", "stop at the closing tag", "allow longer answers", parent=first[1]
    )
    s.bonus.update(zip(second, (0.08, 0.21, 0.11), strict=True))
    s.tell(r.CandidateChecked(harness=second[2], ok=False, reason="differs from no archived harness: same as h0002"))
    s.check(*second[:2])
    for name in second[:2]:
        s.command("approve", harness=name)
    s.tell(
        r.Failure(kind="worker-lost", detail="the sealed worker of h0004 ended with signal 9; its episodes run again")
    )
    batch, segment, _ = s.episodes("search", 4, 1, harness=second[0])
    s.tell(
        r.CandidateOutcome(
            harness=second[0], outcome="crash", reason="TypeError: unsupported operand at line 31", batch=batch,
            segment=segment.name,
        ),
        episodes=[segment],
    )  # fmt: skip
    s.score(second[1])
    s.end_iteration()

    third = s.propose(
        "ask a second time when nothing was found", "take the last line when no tag is there", parent=second[1]
    )
    s.bonus.update(zip(third, (0.20, 0.26), strict=True))
    s.check(*third)
    for name in third:
        s.command("approve", harness=name)
    s.tell(r.CandidateOutcome(harness=third[0], outcome="timeout", reason="one episode ran over 120 s"))
    s.score(third[1])
    s.end_iteration()
    s.accept("iteration 6, best archive score: the phase ends")
    s.test("cycle 1")

    s.weight_phase(0, end=False)
    for step in range(1, 6):
        s.step(step)
    s.command("pause")
    s.tell(r.Warned(text="free space is down to 3.1 GB: old versions are being removed"))
    s.command("resume")
    if until == "training":
        s.sample(6)
        return s
    for step in range(6, 9):
        s.step(step)
    s.tell(r.PhaseFinished(cycle=2, phase="weight", reason="4 steps without a new best"))
    s.begin_search()
    fourth = s.propose("search for the last two words of the question", "read two passages", parent=s.state.harness)
    s.bonus.update(zip(fourth, (0.33, 0.24), strict=True))
    s.check(fourth[0], warnings=("calls tools.search with a query of fewer than three words",))
    s.check(fourth[1])
    if until == "waiting":
        return s
    for name in fourth:
        s.command("approve", harness=name)
    s.score(*fourth)
    s.end_iteration()
    s.accept("no better harness for 2 iterations")
    s.test("end")
    s.tell(r.RunFinished(status="finished", reason="2 cycles done"))
    return s


# -------------------------------------------------------------------------------------------------------- the client


class ScriptedClient:
    """What `whale_tui.service.client.RunClient` offers, over a script: commands are planned by the real controls."""

    def __init__(self, script: Script, who: str = "you") -> None:
        self.script, self.who = script, who
        self.state = script.state
        self.activity: Activity | None = None
        self.live = True
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self._wake = asyncio.Event()

    async def follow(self) -> AsyncIterator[None]:
        while True:
            self._wake.clear()
            yield None
            await self._wake.wait()

    def changed(self, activity: Activity | None = None) -> None:
        self.activity = activity or self.activity
        self._wake.set()

    async def command(self, what: str, args: dict[str, Any] | None = None, *, dry_run: bool = False) -> CommandReply:
        if not self.live:
            raise ConnectionError("no engine")
        args = args or {}
        try:
            planned = control.plan(self.state, what, args, self.who)
        except control.Refused as refusal:
            return CommandReply(id="", ok=False, effect=str(refusal))
        if not dry_run:
            self.sent.append((what, args))
            number = len(self.state.commands)
            self.script.tell(
                r.CommandTaken(id=f"c{number}", who=self.who, what=what, args=planned.args, effect=planned.effect),
                *planned.events,
            )
            self.changed()
        return CommandReply(id="", ok=True, effect=planned.effect)


# --------------------------------------------------------------------------------------------------------- tokenizer


def write_tokenizer(folder: Path) -> None:
    """A small byte-level tokenizer in the hub's layout, learnt from the base harness."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([BASE, "known for its slate quarries, worked since"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    turn = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    template = f"{{% for m in messages %}}{turn}{{% endfor %}}<|im_start|>assistant\n"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": template}))


def _encoder(folder: Path) -> Any:
    from whale_tui.policy.chat import ChatTokenizer

    return ChatTokenizer(folder).encode


def main() -> None:
    folder = Path(sys.argv[1])
    script = write_run(folder, name=folder.name)
    print(f"{folder}: {script.state.seq} events, {script.state.episodes} episodes")
    if "--open" in sys.argv:
        from whale_tui.tui.app import run_app

        run_app(folder, ascii=False, mouse=True, theme=None, who="you")


if __name__ == "__main__":
    main()
