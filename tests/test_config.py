"""Configuration: what is said of a bad one, where each value came from, and that it survives being written down."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as limits
from hypothesis import strategies as st

from whale_tui.config import Config, ConfigError, Resolved, document, dump, load

SAMPLES = sorted((Path(__file__).parent.parent / "sample_configs").glob("*.toml"))


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def to(text: str, name: str = "a.toml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return to


def said(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(path, overrides)
    assert "\n" not in str(error.value).split("not valid TOML")[0]
    return str(error.value)


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[run]\nsede = 1\n", 2, "run.sede: unknown key; did you mean run.seed?"),
        ("[weight]\n\n# batch\nmini_batch = 3\n", 4, "weight.mini_batch: unknown key; did you mean weight.minibatch?"),
        ("[wieght]\nminibatch = 3\n", 1, "wieght: unknown key; did you mean weight?"),
        ("learning_rate = 1e-3\n", 1, "learning_rate: unknown key; did you mean weight.learning_rate?"),
        ("[harness]\nlearning_rate = 1\n", 2, "unknown key; did you mean weight.learning_rate?"),
        ("[run]\nqqqqqqqq = 1\n", 2, "run.qqqqqqqq: unknown key"),
        ("[run]\nseed = 'one'\n", 2, "run.seed: Expected `int`, got `str`"),
        ("[run]\ncycles = -1\n", 2, "run.cycles: Expected `int` >= 0"),
        ("[run]\nseed = true\n", 2, "run.seed: Expected `int`, got `bool`"),
        ("[weight]\nminibatch = 0\n", 2, "weight.minibatch: Expected `int` >= 1"),
        ("[weight]\nminibatch = 2.5\n", 2, "weight.minibatch: Expected `int`, got `float`"),
        ("[run]\n\ncondition = 'orca'\n", 3, "run.condition: Invalid enum value 'orca'"),
        ("run = 3\n", 1, "run: Expected `object`, got `int`"),
        ("[schedule]\nepochs = inf\n", 2, "schedule.epochs: inf is not a finite number"),
        ("[schedule]\nepochs = nan\n", 2, "schedule.epochs: nan is not a finite number"),
        ("[weight]\nlearning_rate = -1\n", 2, "weight.learning_rate: Expected `float` > 0.0"),
        ("[rollout]\ntop_p = 1.5\n", 2, "rollout.top_p: Expected `float` <= 1.0"),
        ('[run]\nname = "../elsewhere"\n', 2, "run.name: '../elsewhere' can't be the name of a folder"),
        ("# seed = 1\n[ run ]\n  seed=x\n", None, "not valid TOML"),
    ],
)
def test_one_message_with_the_line_the_key_and_the_mend(write: Any, text: str, line: int | None, words: str) -> None:
    path = write(text)
    message = said(path)
    assert words in message
    assert message.startswith(f"{path}:{line}: " if line else f"{path}: ")


def test_lines_are_found_in_the_right_table(write: Any) -> None:
    text = (
        '[rollout]\nmax_tokens = 8\n[domain]\nname = "d"\n[domain.options]\nseed = 3\n[run]\ncycles = 1\nseed = "x"\n'
    )
    assert said(write(text)).startswith(f"{write(text)}:9: run.seed")
    assert ":1: run.seed" in said(write('run.seed = "x"\n'))


def test_bad_toml_names_the_place(write: Any) -> None:
    message = said(write('[run]\nseed = 1\nname = "open\n'))
    assert "not valid TOML" in message and "line 3" in message


def test_a_missing_file_names_the_nearest(write: Any) -> None:
    path = write("", "quickstart.toml")
    message = said(path.with_name("quikstart.toml"))
    assert "no such file" in message and f"did you mean {path}?" in message
    assert said(path.with_name("zzz.toml")).endswith("zzz.toml: no such file")


def test_a_folder_and_a_file_that_is_no_text(write: Any, tmp_path: Path) -> None:
    assert "can't be read" in said(tmp_path)
    path = tmp_path / "b.toml"
    path.write_bytes(b"\xff\xfe[run]")
    assert "can't be read" in said(path)


# ----------------------------------------------------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("run.seed=7", "run.seed", 7),
        ("run.name=seven", "run.name", "seven"),
        ('run.name="se ven"', "run.name", "se ven"),
        (" weight.learning_rate = 1e-5", "weight.learning_rate", 1e-5),
        ("weight.train_truncated=true", "weight.train_truncated", True),
        ("domain.options.size=12", "domain.options.size", 12),
        ("domain.options.deep.er=[1, 2]", "domain.options.deep.er", [1, 2]),
        ("model.name=/a=b", "model.name", "/a=b"),
        ("run.first_phase=auto", "run.first_phase", "auto"),
    ],
)
def test_set_changes_one_value_and_is_its_origin(write: Any, override: str, key: str, value: Any) -> None:
    resolved = load(write("[run]\nseed = 3\n[weight]\nlearning_rate = 0.5\n"), [override])
    at: Any = msgspec.to_builtins(resolved.config)
    for part in key.split("."):
        at = at[part]
    assert at == value
    assert resolved.origins[key] == "--set"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.sede=1", "--set run.sede: unknown key; did you mean run.seed?"),
        ("run.seed=x", "--set run.seed: Expected `int`, got `str`"),
        ("run.seed", "write it as table.key=value"),
        ("seed=1", "write it as table.key=value"),
        ("=1", "write it as table.key=value"),
        ("run.seed.deep=1", "seed is a value, not a table"),
        ("schedule.epochs=inf", "--set schedule.epochs: inf is not a finite number"),
        ("run.name=a/b", "--set run.name: 'a/b' can't be the name of a folder"),
    ],
)
def test_bad_overrides(write: Any, override: str, words: str) -> None:
    assert words in said(write("[run]\nseed = 3\n"), override)


def test_the_last_override_counts(write: Any) -> None:
    assert load(write(""), ["run.seed=1", "run.seed=2"]).config.run.seed == 2


def test_origins_name_file_override_and_default(write: Any) -> None:
    resolved = load(write("[run]\nseed = 3\n", "mine.toml"), ["run.cycles=2"])
    assert resolved.origins["run.seed"] == "mine.toml"
    assert resolved.origins["run.cycles"] == "--set"
    assert resolved.origins["weight.minibatch"] == "default"
    assert resolved.origins["run.name"] == "file name" and resolved.config.run.name == "mine"


# ---------------------------------------------------------------------------------------------------------- round trip


def test_a_dump_is_a_config_that_loads_to_the_same(write: Any) -> None:
    text = (
        '[run]\nseed = 3\n[weight]\nlearning_rate = 1e-7\n[domain]\nname = "a \\"b\\" # c"\n'
        '[domain.options]\nsize = 4\nwords = ["x", "y"]\n[domain.options.deep]\n"odd key" = 1\n'
        "[domain.options.deep.er]\nz = 1\n"
    )
    resolved = load(write(text), ["run.cycles=2"])
    out = dump(resolved)
    again = load(write(out, "config.toml"))
    assert again.config == resolved.config and again.config.hash == resolved.config.hash
    for line in ("seed = 3  # a.toml", "cycles = 2  # --set", "minibatch = 64  # default", "size = 4  # a.toml"):
        assert line in out.splitlines()


@limits(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12),
    rate=st.floats(1e-12, 10), options=st.dictionaries(st.text(max_size=5).filter(lambda s: s.isprintable()),
    st.one_of(st.integers(-9, 9), st.text(max_size=5).filter(lambda s: s.isprintable()), st.booleans(),
    st.dictionaries(st.sampled_from("ab"), st.integers(0, 9), min_size=1)), max_size=4),
)  # fmt: skip
def test_any_config_survives_being_written_down(write: Any, name: str, rate: float, options: dict[str, Any]) -> None:
    if name in (".", ".."):
        return
    config = msgspec.convert(
        {"run": {"name": name}, "weight": {"learning_rate": rate}, "domain": {"options": options}}, Config
    )
    origins = {"run.name": "odd\nname.toml"}
    again = load(write(dump(Resolved(config=config, origins=origins, folder=Path())), "c.toml"))
    assert again.config == config


# ------------------------------------------------------------------------------------------------------------ document


def leaves(value: Any, prefix: str = "") -> set[str]:
    if isinstance(value, dict) and value:
        return {leaf for key, inner in value.items() for leaf in leaves(inner, f"{prefix}.{key}" if prefix else key)}
    return {prefix}


def test_every_key_is_documented_where_it_is_defined() -> None:
    keys = {key: (default, text) for key, default, text in document()}
    config = Config()
    assert set(keys) == leaves(msgspec.to_builtins(config))
    for key, (default, text) in keys.items():
        table, name = key.split(".")
        assert default == msgspec.to_builtins(getattr(getattr(config, table), name))
        assert len(text.strip()) > 8, key


@pytest.mark.parametrize("path", SAMPLES, ids=lambda p: p.name)
def test_every_sample_config_loads(path: Path) -> None:
    resolved = load(path)
    assert resolved.config.run.name == path.stem
    assert resolved.config.settings(100).budget_episodes == resolved.config.run.budget_episodes
    tables = set(re.findall(r"^\[(\w+)", path.read_text(), re.MULTILINE))
    assert tables <= set(msgspec.to_builtins(Config()))


def test_there_is_a_quickstart() -> None:
    assert "quickstart.toml" in [path.name for path in SAMPLES]


def test_settings_turn_epochs_into_steps() -> None:
    config = msgspec.convert({"schedule": {"weight_min": 0.2, "weight_window": 0.001, "weight_patience": 0.29}}, Config)
    settings = config.settings(100)
    assert (settings.weight_min, settings.weight_window, settings.weight_patience) == (20, 1, 29)
    assert settings.rule == "fixed"
    config.run.condition = "adaptive"
    assert config.settings(100).rule == "patience"


def test_the_papers_defaults() -> None:
    config = Config()
    assert (config.schedule.epochs, config.schedule.iterations, config.harness.candidates) == (0.6, 6, 3)
    assert (config.weight.prompts_per_step, config.weight.samples_per_task, config.weight.minibatch) == (256, 8, 64)
    assert (config.rollout.temperature, config.rollout.top_k, config.test.samples) == (1.0, 20, 8)
    assert (config.schedule.harness_min, config.schedule.harness_patience, config.schedule.harness_cap) == (6, 2, 15)
    assert (config.weight.max_accepted_per_task, config.harness.confirm, config.run.first_phase) == (0, 0, "weight")
