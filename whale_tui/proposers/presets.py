"""Known coding agents: the command of each, what of the environment it may see, and how its models are priced.

Flags as the agents' own documentation gives them in November 2026. A command's words may hold {prompt}, {prompt_file},
{scratch}, {model} and {dollars} (what the session may spend).
"""

from __future__ import annotations

from msgspec import Struct

COMMON = (
    "PATH", "LANG", "LC_ALL", "TZ", "USER", "LOGNAME", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy",
    "https_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE",
)  # fmt: skip
"""Variables that any agent needs to run at all and to reach its API. None holds a secret."""


class Preset(Struct, frozen=True):
    """One agent. `jailed` is added inside the jail, where the agent may do as it likes; `unjailed` without one."""

    command: tuple[str, ...]
    env: tuple[str, ...] = ()
    """Variables of the engine's environment that are passed on, beside the common ones."""
    fixed: dict[str, str] = {}
    """Variables that are set."""
    model: tuple[str, ...] = ("--model", "{model}")
    budget: tuple[str, ...] = ()
    """Added where the session has a cap in dollars."""
    jailed: tuple[str, ...] = ()
    unjailed: tuple[str, ...] = ()
    logs: str = ""
    """Files of the private home (a glob) in which the agent logs usage earlier than it prints it."""


PRESETS = {
    "claude": Preset(
        command=("claude", "-p", "{prompt}", "--output-format", "stream-json", "--verbose"),
        env=("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL", "CLAUDE_CODE_OAUTH_TOKEN"),
        fixed={"DISABLE_AUTOUPDATER": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        budget=("--max-budget-usd", "{dollars}"),
        jailed=("--dangerously-skip-permissions",),
        unjailed=("--permission-mode", "acceptEdits", "--allowedTools", "Read,Glob,Grep,Edit,Write,Bash(./check:*)"),
    ),
    "codex": Preset(
        command=("codex", "exec", "--json", "--skip-git-repo-check", "--cd", "{scratch}", "{prompt}"),
        env=("CODEX_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL"),
        jailed=("--dangerously-bypass-approvals-and-sandbox",),
        unjailed=("--sandbox", "workspace-write"),
        logs=".codex/sessions/**/*.jsonl",
    ),
    "opencode": Preset(
        command=("opencode", "run", "--format", "json", "{prompt}"),
        env=("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "GEMINI_API_KEY", "OPENROUTER_API_KEY", "OPENCODE_API_KEY"),
        fixed={"OPENCODE_DISABLE_AUTOUPDATE": "1"},
    ),
    "gemini": Preset(
        command=("gemini", "--prompt", "{prompt}", "--output-format", "stream-json", "--approval-mode", "yolo"),
        env=("GEMINI_API_KEY", "GOOGLE_API_KEY", "GOOGLE_CLOUD_PROJECT", "GOOGLE_GENAI_USE_VERTEXAI"),
    ),
    "mini": Preset(
        command=("mini", "--task", "{prompt}", "--yolo", "--exit-immediately"),
        env=("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "GEMINI_API_KEY", "OPENROUTER_API_KEY"),
        fixed={"MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1"},
        budget=("--cost-limit", "{dollars}"),
    ),
}  # fmt: skip


class Prices(Struct, frozen=True):
    """Dollars for a million tokens: prompt, prompt from the cache, prompt into the cache, sampled."""

    prompt: float = 0.0
    cached: float = 0.0
    stored: float = 0.0
    output: float = 0.0

    @property
    def known(self) -> bool:
        return self.prompt > 0 or self.output > 0


CLAUDE_PRICES = {
    "opus": Prices(5.0, 0.5, 6.25, 25.0),
    "sonnet": Prices(3.0, 0.3, 3.75, 15.0),
    "haiku": Prices(1.0, 0.1, 1.25, 5.0),
}
"""For the estimate while a session of claude streams; the total that it gives at its end takes its place."""


def prices_of(model: str) -> Prices:
    """What a model costs, as far as its name tells: zeros where it doesn't."""
    return next((prices for family, prices in CLAUDE_PRICES.items() if family in model.lower()), Prices())
