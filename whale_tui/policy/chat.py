"""Messages to token ids and back, exactly as transformers does it, without loading transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from whale_tui.policy.protocol import PolicyFailure


class ChatTokenizer:
    """The tokenizer and chat template of a hub-layout folder. Raises PolicyFailure("bad-model") where one is
    missing.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._tokenizer_json = _read(self.folder / "tokenizer.json")
        self._settings = _read_json(self.folder / "tokenizer_config.json")
        self._special = {
            key: _token_text(value) for key, value in self._settings.items() if key.endswith("_token") and value
        }
        self.template = self._find_template()
        try:
            self._tokenizer = Tokenizer.from_str(self._tokenizer_json)
            self._compiled = _environment().from_string(self.template)
        except Exception as error:
            raise PolicyFailure(
                "bad-model", f"{self.folder}: tokenizer or chat template not readable: {error}"
            ) from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.stop_ids = self._find_stop_ids()

    def render(self, messages: Sequence[Mapping[str, Any]], *, thinking: bool | None = None) -> list[int]:
        """Prompt ids of a conversation, ending where the assistant begins to speak.

        `thinking` None leaves the template's own default. Raises ValueError where the template refuses the messages.
        """
        extra = {} if thinking is None else {"enable_thinking": thinking}
        try:
            text = self._compiled.render(
                messages=list(messages),
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special,
                **extra,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from None
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Nothing is added: a rendered template already holds its special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids without the end-of-turn and other special tokens: what a harness reads."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def decode_each(self, ids: Sequence[int]) -> list[str]:
        """The piece of text that each id added, special tokens shown; together they are the whole text.

        A character whose bytes are spread over several ids is shown with the last of them.
        """
        pieces, shown = [], ""
        start = 0
        for end in range(1, len(ids) + 1):
            text = self._tokenizer.decode(list(ids[start:end]), skip_special_tokens=False)
            if text.endswith("\ufffd") and end < len(ids) and end - start < 16:
                pieces.append("")
                continue
            pieces.append(text[len(shown) :] if text.startswith(shown) else text)
            # Only a short window is decoded again, so that long outputs stay linear; the window keeps one id of
            # context.
            start = end - 1
            shown = self._tokenizer.decode([ids[end - 1]], skip_special_tokens=False)
        return pieces

    @cached_property
    def hash(self) -> str:
        """Identity of tokenizer and template: ids of different hashes never mix."""
        content = "\0".join([self._tokenizer_json, self.template, json.dumps(self._special, sort_keys=True)])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def vocabulary(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def _find_template(self) -> str:
        file = self.folder / "chat_template.jinja"
        if file.exists():
            return _read(file)
        template = self._settings.get("chat_template")
        if isinstance(template, list):  # several named templates: the one called "default"
            template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
        if not template:
            raise PolicyFailure("bad-model", f"{self.folder} has no chat template: use an instruction-tuned model")
        return template

    def _find_stop_ids(self) -> list[int]:
        """End-of-turn ids: eos of generation_config, of config, and of the tokenizer."""
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            ids = _read_json(self.folder / name).get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
        eos = self._special.get("eos_token")
        if eos is not None and (number := self._tokenizer.token_to_id(eos)) is not None:
            found.add(number)
        if not found:
            raise PolicyFailure("bad-model", f"{self.folder} names no end-of-turn token (eos_token_id)")
        return sorted(found)


def _environment() -> jinja2.Environment:
    """The sandbox that chat templates are written for (transformers' settings, filters and functions)."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _token_text(value: Any) -> str:
    return value["content"] if isinstance(value, dict) else str(value)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyFailure("bad-model", f"{path} can't be read: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise PolicyFailure("bad-model", f"{path} is not JSON: {error}") from None
