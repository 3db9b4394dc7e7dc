"""Prompt ids are what transformers would make of the same messages; ids come back as the text they were."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from tests.tiny import real_model, tiny_model
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.protocol import PolicyFailure

CONVERSATIONS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wie heißt du? 🐋\n\n  two  spaces "}],
    [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "<answer>2</answer>"},
        {"role": "user", "content": "a literal <|im_end|> and {{ braces }} {% raw %}"},
    ],
    [{"role": "user", "content": ""}],
]

THINKING = (
    "{%- set found = namespace(value=false) %}\n"
    "{%- for m in messages %}\n    {%- if m.role == 'skip' %}{% continue %}{% endif %}\n"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content | tojson + '<|im_end|>\\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n{{- '<|im_start|>assistant\\n' }}\n"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}\n"
    "{%- endif %}\n"
    "{%- if messages[0].role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["tiny", "real"])
def folder(request, tiny):
    return tiny if request.param == "tiny" else real_model()


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_ids_equal_transformers(folder, messages):
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ChatTokenizer(folder).render(messages) == expected


@pytest.mark.parametrize("thinking", [None, True, False])
def test_template_features_equal_transformers(tiny, tmp_path, thinking):
    folder = shutil.copytree(tiny, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(THINKING)
    messages = [{"role": "user", "content": 'say "ü" <b>'}, {"role": "skip", "content": "x"}]
    extra = {} if thinking is None else {"enable_thinking": thinking}
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **extra
    )
    assert ChatTokenizer(folder).render(messages, thinking=thinking) == expected
    with pytest.raises(ValueError, match="no such role"):
        ChatTokenizer(folder).render([{"role": "bad", "content": ""}])


def test_a_template_may_not_reach_out(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ValueError, match="unsafe"):
        ChatTokenizer(folder).render(CONVERSATIONS[0])


def test_decode_hides_special_tokens_and_pieces_show_them(folder):
    chat = ChatTokenizer(folder)
    text = "Tamber Vale — ☃ 12*3\n"
    ids = [*chat.encode(text), chat.stop_ids[0]]
    assert chat.decode(ids) == text
    pieces = chat.decode_each(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text + chat.decode_each(ids[-1:])[0]
    assert pieces[-1] == "<|im_end|>"


def test_stop_ids_come_from_every_place(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert ChatTokenizer(folder).stop_ids == [0, 2]


def test_hash_is_of_tokenizer_and_template(tiny, tmp_path):
    before = ChatTokenizer(tiny).hash
    folder = shutil.copytree(tiny, tmp_path / "model")
    assert ChatTokenizer(folder).hash == before
    (folder / "chat_template.jinja").write_text(THINKING)
    assert ChatTokenizer(folder).hash != before


@pytest.mark.parametrize("broken", ["tokenizer.json", "chat_template.jinja"])
def test_missing_parts_are_named(tiny, tmp_path, broken):
    folder = shutil.copytree(tiny, tmp_path / "model")
    (folder / broken).unlink()
    with pytest.raises(PolicyFailure, match=r"tokenizer\.json|chat template") as failure:
        ChatTokenizer(folder)
    assert failure.value.kind == "bad-model"
