"""Settings: precedence, types, messages."""

from typing import Annotated

import pytest
import yaml

from headrace.bus import Meta, Settings, SettingsError


class Own(Settings):
    max_num_seqs: Annotated[int, Meta(ge=1, description="sequences in one step")] = 64
    tokenizer: str = "t.json"
    warm: Annotated[bool, Meta(description="warm up first")] = True


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    import os

    for name in [n for n in os.environ if n.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)


def load(*argv):
    return Own.load(list(argv), "decode", "tests")


def test_file_then_variable_then_flag(tmp_path, monkeypatch):
    path = tmp_path / "c.yaml"
    path.write_text("max_num_seqs: 1\nname: shared\nlog_level: debug\ndecode:\n  max_num_seqs: 2\ngateway: {port: 1}\n")
    assert (load().max_num_seqs, load("--config", str(path)).max_num_seqs) == (64, 2)
    monkeypatch.setenv("HEADRACE_CONFIG", str(path))
    monkeypatch.setenv("HEADRACE_MAX_NUM_SEQS", "3")
    assert load().max_num_seqs == 3
    settings = load("--max-num-seqs", "4", "--no-warm", "--transports", "tcp")
    assert (settings.max_num_seqs, settings.warm, settings.transports) == (4, False, ["tcp"])
    assert (settings.name, settings.log_level) == ("shared", "debug")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("--max-num-seqs", "many"), "--max-num-seqs: max_num_seqs = 'many'"),
        (("--max-num-seqs", "0"), "--max-num-seqs: max_num_seqs = '0': Expected `int` >= 1"),
        (("--max-num-seqs", "9" * 23), "Expected `int` <= 9007199254740992"),
        (("--log-level", "loud"), "--log-level: log_level = 'loud'"),
        (("--transports", "shm,pigeon"), "--transports"),
        (("--config", "/nowhere.yaml"), "can't read the configuration file /nowhere.yaml"),
    ],
)
def test_what_is_wrong_is_named_with_its_source(argv, text):
    with pytest.raises(SettingsError) as caught:
        load(*argv)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"a: " + b"[" * 5000 + b"]" * 5000, "is nested too deeply"),
        (b"log_format: off", "log_format = 'off': Invalid enum value 'off'; one of auto, console, json"),
    ],
)
def test_a_file_that_cannot_be_read_or_meant_is_one_clear_error(tmp_path, data, text):
    path = tmp_path / "c.yaml"
    path.write_bytes(data)
    with pytest.raises(SettingsError) as caught:
        load("--config", str(path))
    assert str(path) in str(caught.value) and text in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seqs: 3\nname: a\nmax_num_seqs: 4\n", "`max_num_seqs` stands twice in one mapping, in lines 1 and 3"),
        ("name: a\ndecode:\n  warm: no\n  'warm': yes\n", "`warm` stands twice in one mapping, in lines 3 and 4"),
        ("decode: {}\nprefill: {}\ndecode: {}\n", "`decode` stands twice in one mapping, in lines 1 and 3"),
    ],
)
def test_a_key_that_stands_twice_is_refused_by_name_and_line(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load("--config", str(path))
    assert f"{path}: {message}" in str(caught.value)


def test_the_same_name_in_two_mappings_and_over_a_merged_one_is_no_key_twice(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("max_num_seqs: 3\nprefill: &p {max_num_seqs: 4, name: p}\ndecode:\n  <<: *p\n  max_num_seqs: 5\n")
    settings = load("--config", str(path))
    assert (settings.max_num_seqs, settings.name) == (5, "p")


@pytest.mark.parametrize("text", ["decode: {max_num_seqs: 0}", "max_num_seqs: 0\ndecode: {max_num_seqs: 5}"])
def test_a_wrong_value_is_refused_also_where_another_source_replaces_it(tmp_path, monkeypatch, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=f"{path}: max_num_seqs = 0: Expected `int` >= 1"):
        load("--config", str(path), "--max-num-seqs", "4")
    monkeypatch.setenv("HEADRACE_MAX_NUM_SEQS", "few")
    with pytest.raises(SettingsError, match="HEADRACE_MAX_NUM_SEQS: max_num_seqs = 'few'"):
        load("--max-num-seqs", "4")


def test_an_unknown_name_in_the_own_section_is_refused_with_a_hint(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("decode: {max_num_sqs: 1}")
    with pytest.raises(SettingsError, match="unknown setting `max_num_sqs` under `decode`; did you mean `max_num_seqs`"):
        load("--config", str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_nun_seqs: 7", "unknown setting `max_nun_seqs` at the top; did you mean `max_num_seqs`"),
        ("decod: {port: 1}", "unknown setting `decod` at the top; did you mean `decode`"),
        ("decode: 7", "`decode` must hold a mapping of settings, not int"),
    ],
)
def test_a_word_that_no_service_knows_is_refused(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=message):
        load("--config", str(path))


def test_a_variable_that_no_service_knows_is_told_and_changes_nothing(monkeypatch, capsys):
    monkeypatch.setenv("HEADRACE_MAX_NUM_SEQ", "3")
    monkeypatch.setenv("HEADRACE_NUM_BLOCKS", "3")
    assert load().max_num_seqs == 64
    told = capsys.readouterr().err
    assert "HEADRACE_MAX_NUM_SEQ, it changes nothing; did you mean `HEADRACE_MAX_NUM_SEQS`?" in told
    assert "HEADRACE_NUM_BLOCKS" not in told


def test_print_config_is_yaml_with_sources_and_without_secrets(capsys, monkeypatch):
    monkeypatch.setenv("HEADRACE_NATS_PASSWORD", "secret!")
    monkeypatch.setenv("HEADRACE_NATS_URL", "nats://u:secret!@bus.example:4222")
    with pytest.raises(SystemExit) as stop:
        load("--max-num-seqs", "5", "--print-config")
    text = capsys.readouterr().out
    assert stop.value.code == 0 and "secret!" not in text and "nats://bus.example:4222" in text
    assert "tokenizer: t.json" in text
    assert "max_num_seqs: 5  # --max-num-seqs" in text and "HEADRACE_NATS_PASSWORD" in text
    assert yaml.safe_load(text)["log_level"] == "info"


def test_print_config_shows_settings_that_are_refused(capsys):
    class Needy(Own):
        def __post_init__(self):
            if not self.name:
                raise ValueError("a name is needed")

    with pytest.raises(SettingsError, match="a name is needed"):
        Needy.load(["--max-num-seqs", "5", "--print-config"], "decode")
    assert yaml.safe_load(capsys.readouterr().out)["max_num_seqs"] == 5


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        load("--help")
    text = capsys.readouterr().out
    assert "sequences in one step (default: 64)" in text and "HEADRACE_" in text and "--nats-url" in text
