"""Configuration: TOML into structs, every key documented where it is defined.

A config names what differs from the defaults; `--set a.b=value` comes last. The resolved config, with the origin of
each value, is kept in the run directory as config.toml and is itself a valid config.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
import tomli
import tomli_w
from msgspec import Meta, Struct, field

from whale_tui.records import Condition, Sampling, Settings, content_hash

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
ProposerKind = Literal["rules", "person", "api", "agent", "claude", "codex", "opencode", "gemini", "mini"]


class ConfigError(Exception):
    """Bad configuration. The text names the file, the line or key path, and the mend."""


class Run(Struct, forbid_unknown_fields=True, kw_only=True):
    """[run]: the run as a whole."""

    name: str = ""
    """Name of the run and of its directory. Empty: the config file's name."""
    seed: Count = 0
    """Fixes task order, sampling, proposals and the first adapter."""
    condition: Condition = "whale"
    """whale | adaptive | weight-only | harness-only | fst | stagewise (see docs/method.md)."""
    first_phase: Literal["weight", "harness", "auto"] = "weight"
    """"weight" is the paper's order; "auto" looks at h0 and searches first when it accepts next to nothing."""
    look_episodes: Positive = 64
    """Episodes of the look at h0 under `first_phase = "auto"`."""
    look_share: Share = 0.03
    """Accepted share under which "auto" searches first."""
    cycles: Count = 0
    """Phases of weight training to run before the run finishes. 0: until the budget is spent, as stagewise always
    does."""
    budget_episodes: Positive = 1_000_000
    """Episodes of training and search together; tests are not counted."""


class Model(Struct, forbid_unknown_fields=True, kw_only=True):
    """[model]: the policy's base model."""

    name: str = "smollm2-135m-instruct"
    """"smollm2-135m-instruct" (embedded), a local folder in the hub's layout, or a hub id."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """"auto" takes cuda, then mps, then cpu."""
    adapt: Literal["lora", "full"] = "lora"
    """What training changes: "lora" an adapter beside frozen weights, "full" all weights (docs/training.md)."""
    lora_rank: Positive = 16
    """Rank of the adapter."""
    lora_alpha: Positive = 32
    """Scale of the adapter: its update is multiplied by alpha / rank."""
    checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, about a third more time."""


class Rollout(Struct, forbid_unknown_fields=True, kw_only=True):
    """[rollout]: how episodes are sampled. It belongs to the run; a harness can't change it."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """What samples: "transformers" is the policy worker itself; "vllm" is one or more servers, see [vllm]."""
    temperature: Annotated[float, Meta(ge=0.0)] = 1.0
    """0 is greedy."""
    top_k: Count = 20
    """Sample among the k likeliest tokens. 0: all."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling. 1: off."""
    max_tokens: Positive = 256
    """Most new tokens of one call; a harness may ask for fewer."""
    max_calls: Positive = 8
    """Most policy calls of one episode."""
    max_episode_tokens: Positive = 8192
    """Most sampled tokens of one episode."""
    max_context: Positive = 8192
    """Most tokens of one call, prompt and answer together; at most what the model was made for."""
    episode_seconds: Annotated[float, Meta(gt=0)] = 30.0
    """Wall seconds that a harness may compute between two calls before its episode is cut as a timeout."""
    max_rows: Positive = 256
    """Most calls that decode at once; the others wait their turn."""
    concurrency: Positive = 1024
    """Most episodes in flight at once."""
    stall_seconds: Annotated[float, Meta(gt=0)] = 1800.0
    """Wall seconds without a sampled call, a tool's result or an ended episode after which the policy counts as hung:
    its worker is started anew, and the batch runs again."""
    worker_memory_mb: Positive = 1024
    """Address space of a sealed harness worker."""
    allow_unsealed: bool = False
    """Run harnesses without the seal where this system has no seccomp. Candidates are code: think first."""


class Vllm(Struct, forbid_unknown_fields=True, kw_only=True):
    """[vllm]: the servers that sample under `rollout.engine = "vllm"` (docs/vllm.md)."""

    mode: Literal["managed", "external"] = "managed"
    """"managed": the run starts `vllm serve`, restarts it and ends it. "external": servers that you started, by URL."""
    urls: list[str] = field(default_factory=list)
    """External servers, e.g. ["http://10.0.0.2:8000"]. They must see the run's directory under the same path."""
    model: str = ""
    """Name under which external servers serve the base model. Empty: the one they serve."""
    api_key_env: str = ""
    """Variable that holds the key which external servers ask for."""
    python: str = ".venv-vllm/bin/python"
    """The python of the environment that vLLM is installed in, from the config's folder or from where a run is started.
    `make vllm-env` makes one for a CPU."""
    devices: list[str] = field(default_factory=lambda: [""])
    """GPUs of each managed server, e.g. ["1", "2", "3"] for three servers, ["0,1"] for one over two GPUs. An empty
    string: what the server finds."""
    share_gpu: bool = False
    """Trainer and servers share GPUs: the servers sleep while the trainer trains."""
    memory_share: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.85
    """Share of a GPU's memory that a managed server takes. Less where a trainer stays beside it on the same GPU."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "bfloat16"
    """What managed servers compute in."""
    max_loras: Positive = 2
    """Adapters that a managed server holds at once: the version that samples, and the one that is being loaded."""
    max_lora_rank: Count = 0
    """Rank that managed servers make room for. 0: the least one that holds model.lora_rank."""
    args: list[str] = field(default_factory=list)
    """More arguments of `vllm serve`, e.g. ["--enforce-eager"]. They come last."""
    env: dict[str, str] = field(default_factory=dict)
    """[vllm.env]: more variables for managed servers."""
    concurrency: Positive = 256
    """Most calls in flight at one server; fewer while it refuses some."""
    health_seconds: Annotated[float, Meta(gt=0)] = 900.0
    """Longest wait for a server to come up."""
    request_seconds: Annotated[float, Meta(gt=0)] = 1200.0
    """Longest wait for one call, after which it is lost and its episode invalid."""
    retry_seconds: Annotated[float, Meta(ge=0)] = 300.0
    """Longest time for which a call that servers refuse (busy, paused) is sent again."""
    restarts: Count = 3
    """Times that a managed server is started again after it died, before it is taken out."""


class Weight(Struct, forbid_unknown_fields=True, kw_only=True):
    """[weight]: the weight phase (online rejection-sampling fine-tuning)."""

    prompts_per_step: Positive = 256
    """Tasks of one step."""
    samples_per_task: Positive = 8
    """Episodes of each task (G)."""
    minibatch: Positive = 64
    """Accepted episodes of one optimizer step."""
    learning_rate: Annotated[float, Meta(gt=0)] = 1e-4
    """Of the optimizer, without decay. The default is for a LoRA adapter. Full fine-tuning wants less: 1e-5 to 5e-5 for
    small models, 1e-7 in the paper."""
    optimizer: Literal["adamw", "adafactor"] = "adamw"
    """"adamw" keeps two more numbers for every trained one; "adafactor" next to none, and its steps are relative to the
    size of the weights."""
    processes: Positive = 1
    """Processes that train together, each on a GPU of its own, from the first on: weights, gradients and the
    optimizer's state are split over them. Only where servers sample (docs/training.md)."""
    max_accepted_per_task: Count = 0
    """Most accepted episodes that one task may contribute, duplicates dropped. 0: off, the paper's rule."""
    train_truncated: bool = False
    """Train on accepted episodes that were cut at a length limit."""
    empty_steps: Positive = 10
    """Steps in a row with nothing accepted that end the phase."""


class Harness(Struct, forbid_unknown_fields=True, kw_only=True):
    """[harness]: the harness phase (Meta-Harness search)."""

    candidates: Positive = 3
    """Candidates of one iteration (M)."""
    confirm: Count = 0
    """More episodes per task for leader and runner-up before one is accepted. 0: the paper's rule."""
    revisit: Count = 0
    """Best archived harnesses to measure again beside the incoming one when the policy is new. 0: the paper's rule."""
    approval: Literal["auto", "before-eval", "before-accept"] = "auto"
    """Where a person approves or vetoes: nowhere, before a candidate costs episodes, or before it is accepted."""
    approval_timeout: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds after which a waiting candidate goes on without a person. 0: wait for ever."""
    while_pinned: Literal["skip", "search-only"] = "skip"
    """What a harness phase does while a harness is pinned."""
    holdout: Count = 0
    """Tasks of D_harness set aside: scored beside the others, shown to you, never to a proposer. 0: none."""
    early_rejection: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    """Stop evaluating a candidate whose chance to reach the leader falls under this, e.g. 0.05. 0: the paper's rule,
    every candidate in full."""
    early_slice: Positive = 32
    """Tasks between two looks of early rejection."""
    infra_retries: Count = 2
    """Times that episodes of an evaluation which the machinery ended run again before they count as invalid."""
    answer_from_samples: Literal["off", "warn", "strict"] = "off"
    """Whether an answer must occur in what the policy said: "warn" on the card, "strict" makes the candidate invalid.
    For domains whose answer is the policy's own words, not a tool's."""
    strict_leaks: bool = False
    """Warnings of the leak checks (docs/search.md) make a candidate invalid."""


class Schedule(Struct, forbid_unknown_fields=True, kw_only=True):
    """[schedule]: when a phase ends. `condition` picks the rule: adaptive is patience, the others are fixed."""

    epochs: Annotated[float, Meta(gt=0)] = 0.6
    """E: epochs of a weight phase. One epoch is floor(len(D_weight) / prompts_per_step) steps."""
    iterations: Positive = 6
    """I: iterations of a harness phase, the evaluation of the incoming harness included."""
    weight_min: Annotated[float, Meta(gt=0)] = 0.2
    """Patience rule: least length of a weight phase, in epochs."""
    weight_window: Annotated[float, Meta(gt=0)] = 0.2
    """Patience rule: length of the window whose mean is watched, in epochs."""
    weight_patience: Annotated[float, Meta(gt=0)] = 0.2
    """Patience rule: epochs without a new best window before the phase ends."""
    harness_min: Positive = 6
    """Patience rule: least iterations of a harness phase."""
    harness_patience: Positive = 2
    """Patience rule: iterations without a strictly better archive score before the phase ends."""
    harness_cap: Positive = 15
    """Patience rule: most iterations of a harness phase."""
    stagewise_weight_share: Share = 0.5
    """Condition stagewise: share of the budget that goes to weight training first."""


class DomainConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    """[domain]: where tasks come from."""

    name: str = "encyclopedia"
    """A built-in domain, one from an installed package, or a folder of yours (relative to the config)."""
    options: dict[str, Any] = field(default_factory=dict)
    """[domain.options]: the domain's own keys."""
    harness: str = ""
    """A file to take as h0 instead of the domain's."""


class ProposerConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    """[proposer]: who writes candidates."""

    kind: ProposerKind = "rules"
    """"rules" is built in and needs no network; "person" waits for `whale-tui propose RUN FILE` or the app; "claude",
    "codex", "opencode", "gemini" and "mini" are coding agents that are installed here; "agent" is any other, by its
    `command`; "api" is a model behind an endpoint."""
    proposers: list[ProposerKind] = field(default_factory=list)
    """Several kinds that take turns, one an iteration, e.g. ["claude", "rules"]. Empty: `kind` alone. One that fails
    for good leaves its turn to the next."""
    retries: Count = 3
    """Attempts after a transient failure, with growing pauses."""
    command: str = ""
    """The agent's command, in place of the known one. {prompt}, {prompt_file}, {scratch} and {model} are filled in; it
    runs without a shell."""
    model: str = ""
    """The model that the agent is told to use (empty: its own default), or that the endpoint serves."""
    provider: Literal["openai", "anthropic"] = "openai"
    """How the endpoint of kind "api" is spoken to; "openai" is what vLLM and most others understand."""
    api_base: str = ""
    """Address of the endpoint, e.g. "http://localhost:8000/v1". Empty: the provider's own."""
    api_key_env: str = ""
    """Variable that holds the endpoint's key. Empty: OPENAI_API_KEY or ANTHROPIC_API_KEY."""
    wall_seconds: Annotated[float, Meta(gt=0)] = 1800.0
    """Longest session of an agent. What it has written by then is taken."""
    idle_seconds: Annotated[float, Meta(gt=0)] = 300.0
    """Longest silence of an agent, after which its session is ended."""
    max_dollars: Annotated[float, Meta(ge=0)] = 20.0
    """Most that proposers may spend over the run. When it is reached the run pauses; raise it with
    `whale-tui ctl RUN set max_dollars=..`. 0: no limit."""
    max_tokens: Count = 0
    """The same in tokens, prompts and cached ones included. 0: no limit."""
    session_dollars: Annotated[float, Meta(ge=0)] = 5.0
    """Most that one session may spend, after which it is ended. 0: no limit but the run's."""
    session_tokens: Count = 0
    """The same in tokens."""
    price_prompt: Annotated[float, Meta(ge=0)] = 0.0
    """Dollars for a million prompt tokens, for agents that give tokens and no dollars. 0: not known."""
    price_cached: Annotated[float, Meta(ge=0)] = 0.0
    """Dollars for a million prompt tokens that come from the provider's cache."""
    price_output: Annotated[float, Meta(ge=0)] = 0.0
    """Dollars for a million sampled tokens."""
    env: list[str] = field(default_factory=list)
    """Names of variables that an agent may see beside those it is known to need (its API key, PATH, proxies)."""
    home_files: list[str] = field(default_factory=list)
    """Files of your home folder that are copied into the agent's own, e.g. [".codex/auth.json"] for its login."""
    readable: list[str] = field(default_factory=list)
    """Folders that the agent may read although its jail hides your home folder, where its installation needs more."""
    show_answers: bool = False
    """Let proposers read the reference answers of D_harness tasks in the episodes; they may end up in harnesses."""

    def whose(self, turn: int) -> ProposerKind:
        """Which kind proposes in a turn (iterations with proposals so far)."""
        return self.proposers[turn % len(self.proposers)] if self.proposers else self.kind


class Test(Struct, forbid_unknown_fields=True, kw_only=True):
    """[test]: measuring pairs on D_test. It never influences a decision."""

    __test__ = False

    samples: Count = 8
    """Episodes per task (the k of mean@k). 0: never test."""
    at: Literal["end", "ends", "cycles", "phases"] = "cycles"
    """Which pairs: "ends" the first and the last; "cycles" also after every cycle; "phases" after every phase.
    "end" measures first and last pair when all else is done, so that nothing waits for a test."""


class Retention(Struct, forbid_unknown_fields=True, kw_only=True):
    """[retention]: which policy versions stay on disk. Tested, current and phase-ending ones always do."""

    keep_versions: Positive = 3
    """Newest versions to keep beside those."""
    min_free_gb: Annotated[float, Meta(ge=0)] = 1.0
    """Free space under which the run pauses rather than fill the disk."""


class Sinks(Struct, forbid_unknown_fields=True, kw_only=True):
    """[sinks]: where the run's series are sent beside its own journal. A sink that fails never stops a run."""

    tensorboard: bool = False
    """Write them for TensorBoard, into `tensorboard` in the run's folder. Needs `whale-tui[tensorboard]`."""
    wandb: bool = False
    """Send them to wandb, under the account that it knows; WANDB_MODE=offline keeps them here. Needs
    `whale-tui[wandb]`."""
    wandb_project: str = "whale-tui"
    """Project of wandb that the run appears in."""


class Config(Struct, forbid_unknown_fields=True, kw_only=True):
    """A whole run."""

    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    rollout: Rollout = field(default_factory=Rollout)
    vllm: Vllm = field(default_factory=Vllm)
    weight: Weight = field(default_factory=Weight)
    harness: Harness = field(default_factory=Harness)
    schedule: Schedule = field(default_factory=Schedule)
    domain: DomainConfig = field(default_factory=DomainConfig)
    proposer: ProposerConfig = field(default_factory=ProposerConfig)
    test: Test = field(default_factory=Test)
    retention: Retention = field(default_factory=Retention)
    sinks: Sinks = field(default_factory=Sinks)

    @property
    def hash(self) -> str:
        return content_hash(self)

    def steps_per_epoch(self, tasks: int) -> int:
        """floor(len(D_weight) / prompts_per_step) (method.md). Raises ConfigError when that is 0."""
        steps = tasks // self.weight.prompts_per_step
        if steps == 0:
            raise ConfigError(
                f"weight.prompts_per_step = {self.weight.prompts_per_step} is more than the {tasks} tasks of D_weight; "
                f"set it to {tasks} or fewer"
            )
        return steps

    def settings(self, steps_per_epoch: int) -> Settings:
        """The part of the config that a person may change while the run goes on, lengths in steps."""

        def steps(epochs: float) -> int:
            return max(1, math.floor(epochs * steps_per_epoch + 1e-9))

        s = self.schedule
        return Settings(
            rule="patience" if self.run.condition == "adaptive" else "fixed",
            epochs=s.epochs,
            iterations=s.iterations,
            weight_min=steps(s.weight_min),
            weight_window=steps(s.weight_window),
            weight_patience=steps(s.weight_patience),
            harness_min=s.harness_min,
            harness_patience=s.harness_patience,
            harness_cap=s.harness_cap,
            candidates=self.harness.candidates,
            budget_episodes=self.run.budget_episodes,
            approval=self.harness.approval,
            approval_timeout=self.harness.approval_timeout,
            max_dollars=self.proposer.max_dollars,
            max_tokens=self.proposer.max_tokens,
        )

    def sampling(self) -> Sampling:
        r = self.rollout
        return Sampling(temperature=r.temperature, top_k=r.top_k, top_p=r.top_p, max_tokens=r.max_tokens)


class Resolved(Struct):
    """A config with where each value came from: key path -> "default", a file, or "--set"."""

    config: Config
    origins: dict[str, str]
    folder: Path
    """Folder that relative paths of the config start from."""


# ---------------------------------------------------------------------------------------------------------- reading


def load(path: Path, overrides: Sequence[str] = ()) -> Resolved:
    """Read a config file and apply `a.b=value` overrides. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(_no_such_file(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read: {error}") from None
    try:
        raw = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    origins = dict.fromkeys((key for key, _ in _leaves(raw)), path.name)
    for override in overrides:
        key = _apply(raw, override)
        origins[key] = "--set"

    def where(key: str) -> str:
        line = _line_of(text, key)
        if any(o.split("=", 1)[0].strip() == key for o in overrides):
            return f"--set {key}"
        return f"{path}:{line}: {key}" if line else f"{path}: {key}"

    config = convert(raw, where)
    if config.rollout.engine == "vllm" and config.vllm.mode == "external" and not config.vllm.urls:
        raise ConfigError(f"{where('vllm.mode')}: external servers need their addresses in vllm.urls")
    if config.weight.processes > 1 and config.rollout.engine != "vllm":
        raise ConfigError(
            f"{where('weight.processes')}: several processes train only where servers sample; set rollout.engine = "
            '"vllm", or leave it out'
        )
    if config.weight.processes > 1 and config.weight.optimizer == "adafactor":
        raise ConfigError(f"{where('weight.optimizer')}: adafactor keeps what can't be split over weight.processes")
    for url in config.vllm.urls:
        if not re.match(r"https?://[^/]", url):
            raise ConfigError(f"{where('vllm.urls')}: {url!r} is no address; write it as http://host:port")
    if config.run.name in (".", "..") or "/" in config.run.name or "\0" in config.run.name:
        raise ConfigError(f"{where('run.name')}: {config.run.name!r} can't be the name of a folder")
    if not config.run.name:
        config.run.name = path.stem
        origins["run.name"] = "file name"
    for key, _ in _leaves(msgspec.to_builtins(config)):
        origins.setdefault(key, "default")
    return Resolved(config=config, origins=origins, folder=path.resolve().parent)


def convert(raw: Mapping[str, Any], where: Any = str) -> Config:
    """A mapping into a Config. `where` turns a key path into the words that an error begins with."""
    _refuse_unknown(raw, Config, "", where)
    for key, value in _leaves(raw):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{where(key)}: {value} is not a finite number")
    try:
        return msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        message, _, at = str(error).partition(" - at ")
        key = at.strip("`").removeprefix("$").removeprefix(".")
        raise ConfigError(f"{where(key)}: {message}") from None


def dump(resolved: Resolved) -> str:
    """The resolved config as TOML, each value followed by where it came from."""
    out = ["# The resolved configuration of this run, and where each value came from.\n"]
    for table, values in msgspec.to_builtins(resolved.config).items():
        out += _dump_table((table,), values, resolved.origins)
    return "\n".join(out)


def _dump_table(path: tuple[str, ...], values: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    yield f"[{'.'.join(tomli_w.dumps({part: 0}).rpartition(' =')[0] for part in path)}]"
    for key, value in values.items():
        if not isinstance(value, dict):
            origin = origins.get(".".join((*path, key)), "default")
            yield f"{tomli_w.dumps({key: value}).strip()}  # {origin.encode('unicode_escape').decode()}"
    yield ""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _dump_table((*path, key), value, origins)


def document() -> Iterator[tuple[str, Any, str]]:
    """Every key: its path, its default, its description (read from the source, so that there is one place)."""
    import ast
    import inspect

    tree = ast.parse(Path(inspect.getfile(Config)).read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for table, kind in get_type_hints(Config).items():
        defaults = msgspec.to_builtins(kind())
        body = classes[kind.__name__].body
        for here, after in itertools.pairwise(body):
            if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name) and isinstance(after, ast.Expr):
                text = ast.literal_eval(after.value)
                yield f"{table}.{here.target.id}", defaults.get(here.target.id), text


def _no_such_file(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path()
    near = difflib.get_close_matches(path.name, [p.name for p in folder.glob("*.toml")], n=1)
    return f"{path}: no such file" + (f"; did you mean {folder / near[0]}?" if near else "")


def _leaves(raw: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in raw.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _apply(raw: dict[str, Any], override: str) -> str:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", key):
        raise ConfigError(f"--set {override}: write it as table.key=value, e.g. --set run.seed=1")
    try:
        value = tomli.loads(f"value = {text}")["value"]
    except tomli.TOMLDecodeError:
        value = text.strip()
    *tables, last = key.split(".")
    at = raw
    for table in tables:
        at = at.setdefault(table, {})
        if not isinstance(at, dict):
            raise ConfigError(f"--set {override}: {table} is a value, not a table")
    at[last] = value
    return key


def _refuse_unknown(raw: Mapping[str, Any], kind: Any, prefix: str, where: Any) -> None:
    hints = get_type_hints(kind)
    for key, value in raw.items():
        path = f"{prefix}{key}"
        if key not in hints:
            known = [k for k, _ in _leaves(msgspec.to_builtins(Config()))] + list(get_type_hints(Config))
            near = difflib.get_close_matches(path, known, n=1, cutoff=0.5) or difflib.get_close_matches(
                key, [k.rpartition(".")[2] for k in known], n=1
            )
            full = next((k for k in known if near and (k == near[0] or k.endswith(f".{near[0]}"))), None)
            raise ConfigError(f"{where(path)}: unknown key" + (f"; did you mean {full}?" if full else ""))
        if isinstance(hints[key], type) and issubclass(hints[key], Struct) and isinstance(value, Mapping):
            _refuse_unknown(value, hints[key], f"{path}.", where)


def _line_of(text: str, key: str) -> int | None:
    """The line on which a dotted key stands, as far as plain TOML tables tell."""
    table, _, last = key.rpartition(".")
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[\s*([^\]]+?)\s*\]", line)
        if header:
            current = header[1].replace('"', "")
            if current == key:
                return number
            continue
        name, within = (last, table) if current else (key, "")
        if current == within and re.match(rf"\s*\"?{re.escape(name)}\"?\s*=", line):
            return number
    return None
