"""Options from a configuration file, the environment and the command line: their rank, their types, what is refused, and what is shown."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tinyvllm import cli
from tinyvllm.cli.arguments import COMMANDS, PARSERS, configured, parse
from tinyvllm.cli.batch import model_specs as specs_of_batch
from tinyvllm.cli.config_file import MAX_CONFIG_BYTES, PRESETS
from tinyvllm.cli.config_schema import config_schema
from tinyvllm.cli.definitions import Definition, definitions, is_configurable, switch_of
from tinyvllm.cli.options import engine_options
from tinyvllm.cli.serve import model_specs
from tinyvllm.config.switches import SWITCHES, environment
from tinyvllm.errors import ArgumentError, TinyvllmError

CONFIGURABLE = [command for command in COMMANDS if is_configurable(PARSERS[command]())]
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write conf.yaml into the current folder and return its name."""
    monkeypatch.chdir(tmp_path)

    def file(text: str) -> str:
        Path("conf.yaml").write_text(text, encoding="utf-8")
        return "conf.yaml"

    return file


def values_of(command: str, *arguments: str) -> dict[str, Any]:
    """Value and origin of every option that is not the default."""
    shown = configured(command, arguments)
    return {key: (value.value, str(value.origin)) for key, value in shown.values.items() if value.origin.kind != "default"}


# --- rank

RANKED = """
max-model-len: 1
max_num_seqs: 1
dtype: bfloat16
serve:
  max-num-seqs: 2
  port: 2
presets:
  big:
    port: 3
    unload-idle: 3
    serve: {unload-idle: 4.5}
  other:
    port: 99
"""


def test_rank(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """All commands < the command < preset < the preset's command < environment < arguments."""
    file = write(RANKED)
    base = {"max-model-len": (1, "conf.yaml:2"), "dtype": ("bfloat16", "conf.yaml:4"), "max-num-seqs": (2, "conf.yaml:6")}
    assert values_of("serve", "--config", file) == {**base, "port": (2, "conf.yaml:7")}
    preset = {"port": (3, "conf.yaml:10 (preset big)"), "unload-idle": (4.5, "conf.yaml:12 (preset big)")}
    assert values_of("serve", "--config", file, "--preset", "big") == {**base, **preset}
    monkeypatch.setenv("TINYVLLM_ARG_PORT", "5")
    monkeypatch.setenv("TINYVLLM_ARG_DTYPE", "float16")
    variables = {"port": (5, "environment TINYVLLM_ARG_PORT"), "dtype": ("float16", "environment TINYVLLM_ARG_DTYPE")}
    assert values_of("serve", "--config", file, "--preset", "big") == {**base, **preset, **variables}
    line = {"port": (6, "command line")}
    assert values_of("serve", "--config", file, "--preset", "big", "--port", "6") == {**base, **preset, **variables, **line}
    assert parse(["serve", "--config", file, "--port", "6"])[1].port == 6


def test_file_and_preset_from_the_environment(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYVLLM_ARG_CONFIG", write(RANKED))
    monkeypatch.setenv("TINYVLLM_ARG_PRESET", "other")
    assert values_of("serve")["port"] == (99, "conf.yaml:14 (preset other)")
    assert values_of("serve", "--preset", "big")["port"] == (3, "conf.yaml:10 (preset big)")


def test_arguments_replace_lists_and_turn_switches_off(write: Write) -> None:
    file = write("stop: [a, b]\nignore-eos: true\nquiet: yes\n")
    _, options = parse(["--config", file])
    assert (options.stop, options.ignore_eos, options.quiet) == (["a", "b"], True, True)
    _, options = parse(["--config", file, "--stop", "c", "--no-ignore-eos", "--no-quiet"])
    assert (options.stop, options.ignore_eos, options.quiet) == (["c"], False, False)


def test_null_is_the_default_again(write: Write) -> None:
    file = write("top-k: 3\nquality: {windows: 9}\npresets:\n  p: {top-k: null, quality: {windows: ~}}\n")
    assert parse(["--config", file])[1].top_k == 3
    assert not hasattr(parse(["--config", file, "--preset", "p"])[1], "top_k")
    assert parse(["quality", "--config", file, "--preset", "p"])[1].windows == 32


def test_defaults_are_as_without_files() -> None:
    """What argparse itself makes of no arguments, for every command."""
    for command in CONFIGURABLE:
        parser = PARSERS[command]()
        needed = [action.option_strings[-1] for action in parser._actions if action.required and action.option_strings]
        positional = [action.dest for action in parser._actions if action.required and not action.option_strings]
        words = [*("x" for _ in positional), *(word for option in needed for word in (option, "y"))]
        assert vars(parse([command, *words])[1]) == vars(parser.parse_args(words)), command


@pytest.mark.parametrize("command", CONFIGURABLE)
def test_help_shows_what_is_required_and_no_negation(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    assert capsys.readouterr().out == PARSERS[command]().format_help()


def test_arguments_without_dashes_and_required_options_may_be_in_the_file(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    file = write("batch: {input: in.jsonl, output: out.jsonl}\nquality: {models: [a, b]}\nverify: {model: 7}\n")
    _, options = parse(["batch", "--config", file, "-o", "other.jsonl"])
    assert (options.input, options.output) == ("in.jsonl", "other.jsonl")
    assert parse(["quality", "--config", file])[1].models == ["a", "b"] and parse(["quality"])[1].models == []
    assert parse(["verify", "--config", file])[1].model == "7"
    with pytest.raises(ArgumentError, match=re.escape("required: IN.jsonl, -o/--output")):
        parse(["batch"])


# --- types


@pytest.mark.parametrize(
    ("command", "text", "name", "value"),
    [
        ("generate", "speculative-config: off", "speculative_config", "off"),  # YAML's boolean is our text
        ("generate", "revision: 1.10", "revision", "1.10"),
        ("generate", "kv-memory: 1048576", "kv_memory", "1048576"),
        ("generate", "temperature: 1e-3", "temperature", 0.001),  # no number to PyYAML
        ("generate", "temperature: 1", "temperature", 1.0),
        ("generate", "stop-token-id: 7", "stop_token_ids", [7]),
        ("generate", "stop: ['', 3, no]", "stop", ["", "3", "no"]),
        ("generate", "speculative-config: {method: ngram, num_speculative_tokens: 3}", "speculative_config", None),
        ("generate", "enable-prefix-caching: off", "enable_prefix_caching", False),
        ("generate", "json_schema: '{}'", "json", "{}"),
        ("lab", "lab: {k: [2, 4], policies: [exact, 'confidence:tau=0.3']}", "k", "2,4"),
        ("lab", "lab: {k: [2, 4], policies: [exact, 'confidence:tau=0.3']}", "policies", "exact;confidence:tau=0.3"),
    ],
)
def test_values_of_a_file(write: Write, command: str, text: str, name: str, value: Any) -> None:
    expected = value if value is not None else json.dumps({"method": "ngram", "num_speculative_tokens": 3})
    read = getattr(parse([command, "--config", write(text)])[1], name)
    assert read == expected and type(read) is type(expected)


@pytest.mark.parametrize(
    ("name", "text", "command", "field", "value"),
    [
        ("TINYVLLM_ARG_QUIET", "1", "generate", "quiet", True),
        ("TINYVLLM_ARG_WARM_UP", "false", "serve", "warm_up", False),
        ("TINYVLLM_ARG_STOP", "one", "generate", "stop", ["one"]),
        ("TINYVLLM_ARG_STOP", '["a", "b"]', "generate", "stop", ["a", "b"]),
        ("TINYVLLM_ARG_STOP_TOKEN_ID", "[3, 4]", "generate", "stop_token_ids", [3, 4]),
        ("TINYVLLM_ARG_MODEL", "a=x", "serve", "model", ["a=x"]),
        ("TINYVLLM_ARG_TOP_P", "0.5", "chat", "top_p", 0.5),
    ],
)
def test_values_of_variables(monkeypatch: pytest.MonkeyPatch, name: str, text: str, command: str, field: str, value: Any) -> None:
    monkeypatch.setenv(name, text)
    assert getattr(parse([command])[1], field) == value


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("TINYVLLM_ARG_TOP_K", "many", "TINYVLLM_ARG_TOP_K must be an integer, got 'many'"),
        ("TINYVLLM_ARG_QUIET", "2", "TINYVLLM_ARG_QUIET must be true or false, or 1 or 0, got '2'"),
        ("TINYVLLM_ARG_STOP_TOKEN_ID", "[1, x]", "must be an integer or a JSON list"),
        ("TINYVLLM_ARG_STOP", "[{}]", "must be a text or a JSON list of texts, got '[{}]'"),
        ("TINYVLLM_ARG_STOP", "[" * 5000 + "]" * 5000, "must be a text or a JSON list"),
        ("TINYVLLM_ARG_TOPK", "3", "TINYVLLM_ARG_TOPK is not known, did you mean 'TINYVLLM_ARG_TOP_K'?"),
        ("TINYVLLM_ARG_top_k", "3", "TINYVLLM_ARG_top_k is not known"),
        ("TINYVLLM_ARG_DEVICE", "CPU", "TINYVLLM_ARG_DEVICE is not known: the name is TINYVLLM_DEVICE"),
        ("TINYVLLM_ARG_PRESET", "p", "--preset p names a part of a configuration file: give --config FILE.yaml, too"),
    ],
)
def test_variables_that_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ArgumentError) as failure:
        parse(["--prompt", "x"])
    assert message in str(failure.value)


# --- what is refused in files

WRONG = [
    ("top_k: 3\ntemprature: 1\n", "conf.yaml:2: unknown key 'temprature', did you mean 'temperature'?"),
    ("serve:\n  prot: 1\n", "conf.yaml:2: unknown key 'prot' of serve, did you mean 'port'?"),
    ("serve: {prompt: x}\n", "conf.yaml:1: unknown key 'prompt' of serve"),
    ("serv:\n  port: 1\n", "conf.yaml:1: unknown key 'serv', did you mean 'serve'?"),
    ("expert_parallel_size: 2\n", "conf.yaml:1: unknown key 'expert_parallel_size'"),
    ("gpu-memory-utilization: 0.9\n", "nearest: kv-memory, num-blocks"),
    ("ctx-size: 9\n", "unknown key 'ctx-size': its name here is max-model-len"),
    ("config: other.yaml\n", "unknown key 'config'"),
    ("\ntop-k: many\n", "conf.yaml:2: top-k must be an integer, got many"),
    ("top-k: '3'\n", "conf.yaml:1: top-k must be an integer, got the text '3'"),
    ("top-k: 3.0\n", "top-k must be an integer, got 3.0"),
    ("top-k: [3]\n", "conf.yaml:1: top-k must be an integer, got a list"),
    ("temperature: warm\n", "temperature must be a number, got warm"),
    ("quiet: 1\n", "quiet must be true or false, got 1"),
    ("quiet: 'yes'\n", "quiet must be true or false, got the text 'yes'"),
    ("stop-token-id:\n  - 1\n  - x\n", "conf.yaml:3: stop-token-id must be an integer or a list, each an integer, got x"),
    ("stop: {a: b}\n", "stop must be a text or a list, each a text, got a mapping"),
    ("stop: [[a]]\n", "stop must be a text or a list, each a text, got a list"),
    ("tokenizer:\n", "tokenizer must be a text, got no value; write null for its default"),
    ("stop: [~]\n", "got null"),
    ("speculative-config: [ngram]\n", "speculative-config must be a text or a mapping, got a list"),
    ("speculative-config: {tau: .nan}\n", "speculative-config must be JSON"),
    ("lab: {k: ['2,4']}\n", "an entry of k must be without ',', got '2,4'"),
    ("top-k: 3\ntop_k: 4\n", "conf.yaml:2: the key 'top-k' is there twice, once with dashes and once with underscores"),
    ("port: 3\nunload-idle: 1\nport: 4\n", "conf.yaml:3: this is not YAML that can be read: the key 'port' is there twice"),
    ("quality: true\n", "quality is a command: expected a mapping of its options, got true; the option --quality of lab belongs"),
    ("presets: [a]\n", "presets must be a mapping of names to options, got a list"),
    ("presets: {a: 3}\n", "preset 'a' must be a mapping of options, got 3"),
    ("presets:\n  a: {topk: 3}\n", "conf.yaml:2: unknown key 'topk', did you mean 'top-k'?"),
    ("presets:\n  a:\n    presets: {}\n", "conf.yaml:3: unknown key 'presets'"),
    ("- top-k\n", "the file must be a mapping of options, got a list"),
    ("serve:\n  model:\n    a: {port: 1}\n", "conf.yaml:3: unknown key 'port' of model 'a'"),
    ("serve:\n  model:\n    a: [x]\n", "conf.yaml:3: model must be a text, got a list"),
    ("serve: {model: {'': x}}\n", "a model must have a name, got an empty one"),
    ("model: {a: x}\n", "model must be a text, got a mapping"),
    ("top-k: [1\n", "conf.yaml:2: this is not YAML that can be read: while parsing a flow sequence"),
    ("a: &a [*a]\n", "an alias is inside of what it repeats"),
    ("#" * MAX_CONFIG_BYTES + "#", f"at most {MAX_CONFIG_BYTES} are read"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_files_that_are_refused(write: Write, text: str, message: str) -> None:
    with pytest.raises(TinyvllmError) as failure:
        parse(["--prompt", "x", "--config", write(text)])
    assert message in str(failure.value) and "\n" not in str(failure.value) and failure.value.exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "no.yaml"], "--config: cannot read no.yaml: No such file"),
        (["--config", "conf.json"], "--config must end in .yaml or .yml, got 'conf.json'"),
        (
            ["--config", "conf.yaml", "--preset", "fats"],
            "--preset: conf.yaml has no preset 'fats', did you mean 'fast'?; it has fast, slow",
        ),
        (["--preset", "fast"], "give --config FILE.yaml, too"),
    ],
)
def test_files_that_are_not_there(write: Write, arguments: list[str], message: str) -> None:
    write("presets: {fast: {}, slow: {}}\n")
    with pytest.raises(ArgumentError) as failure:
        parse(arguments)
    assert message in str(failure.value)


def test_the_parts_of_other_commands_are_checked_and_not_used(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYVLLM_ARG_PORT", "1")
    shown = configured("generate", ["--config", write("model: m\nport: 8000\nserve: {model: {a: x}}\npresets: {p: {host: h}}\n")])
    assert [(key, str(origin)) for key, origin in shown.unused] == [("port", "conf.yaml:2"), ("port", "environment TINYVLLM_ARG_PORT")]
    with pytest.raises(ArgumentError, match="conf.yaml:1: port must be an integer, got x"):
        configured("generate", ["--config", write("port: x\n")])
    with pytest.raises(ArgumentError, match="conf.yaml:2: port must be an integer, got x"):
        configured("generate", ["--config", write("serve:\n  port: x\n")])


def test_an_empty_file_sets_nothing(write: Write) -> None:
    assert values_of("generate", "--config", write("# nothing\n")) == {}


def test_a_file_can_ask_for_tracebacks(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--config", write("debug: true\n")]) == 2
    assert "Traceback" in capsys.readouterr().err
    assert cli.main(["--config", "conf.yaml", "--no-debug"]) == 2
    assert "Traceback" not in capsys.readouterr().err


# --- several models

MODELS = """
max-num-seqs: 4
block-size: 32
serve:
  model:
    small: ./s
    big:
      model: ./b
      max_num_seqs: 2
      max-model-len: 512
      enable-prefix-caching: false
      speculative-config: {method: ngram}
"""


def test_models_with_options_of_their_own(write: Write) -> None:
    _, options = parse(["serve", "--config", write(MODELS)])
    common = {"max_num_seqs": 4, "block_size": 32, "warm_up": True}
    big = {"model": "./b", "max_num_seqs": 2, "max_model_len": 512, "enable_prefix_caching": False}
    expected = {"small": {**common, "model": "./s"}, "big": {**common, **big, "speculative_config": '{"method": "ngram"}'}}
    assert model_specs is specs_of_batch and model_specs(options.model, None, engine_options(options)) == expected


def test_arguments_and_variables_outrank_a_models_own_options(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYVLLM_ARG_MAX_MODEL_LEN", "64")
    _, options = parse(["serve", "--config", write(MODELS), "--max-num-seqs", "9"])
    big = model_specs(options.model, None, engine_options(options))["big"]
    assert big["max_num_seqs"] == 9 and big["max_model_len"] == 64 and big["enable_prefix_caching"] is False
    _, options = parse(["serve", "--config", "conf.yaml", "--model", "only"])
    assert options.model == ["only"]


def test_events_are_of_one_model(write: Write, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = f"{{model: {tiny_model}, kv-events-config: {{enable_kv_cache_events: true}}}}"
    file = write(f"serve:\n  model:\n    a: {model}\n    b: {model}\n")
    assert cli.main(["serve", "--config", file]) == 2
    assert "2 would share its endpoint" in capsys.readouterr().err


# --- variables that are no options


def test_switches_keep_their_meaning(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three that are also options are their variables, and do nothing to commands without a file that they did not do before."""
    keys = {key for command in CONFIGURABLE for key in definitions(PARSERS[command]())}
    assert {key for key in keys if switch_of(key)} == {"device", "api-key", "threads"}, (
        "a new option has the name of a switch: see docs/configuration.md"
    )
    variables = [{d.variable for d in definitions(PARSERS[command]()).values()} for command in CONFIGURABLE]
    assert set().union(*variables) & {switch.name for switch in SWITCHES} == {"TINYVLLM_DEVICE", "TINYVLLM_API_KEY", "TINYVLLM_THREADS"}
    monkeypatch.setenv("TINYVLLM_DEVICE", "CPU")
    monkeypatch.setenv("TINYVLLM_API_KEY", "from-environment")
    assert not hasattr(parse(["--prompt", "x"])[1], "device") and parse(["chat"])[1].api_key is None
    file = write("device: METAL\napi-key: from-file\n")
    assert values_of("chat", "--config", file)["device"] == ("CPU", "environment TINYVLLM_DEVICE")
    assert parse(["chat", "--config", file])[1].api_key == "from-environment"
    assert parse(["serve", "--config", file])[1].api_key == ["from-file"]  # the server adds the variable's key


def test_the_engine_ignores_variables_of_options() -> None:
    assert environment({"TINYVLLM_ARG_MAX_NUM_SEQS": "3", "TINYVLLM_THREADS": "2"}) == {"TINYVLLM_THREADS": 2}


def test_captured_steps_do_not_depend_on_how_options_are_given(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    from tinyvllm.runner.kept import switches_of_launches

    monkeypatch.setenv("TINYVLLM_ARG_PORT", "1")
    monkeypatch.setenv("TINYVLLM_KERNELS", "all=ref")
    assert "TINYVLLM_KERNELS" in switches_of_launches() and "TINYVLLM_ARG_PORT" not in switches_of_launches()


# --- definitions


@pytest.mark.parametrize("command", CONFIGURABLE)
def test_every_option_has_a_type_that_files_can_have(command: str) -> None:
    """A new kind of action or type needs a reader in cli/definitions.py and a form in cli/config_schema.py."""
    for key, definition in definitions(PARSERS[command]()).items():
        action = definition.action
        store = type(action).__name__ == "_StoreAction" and action.nargs in (None, "?", "*")
        assert store or definition.is_boolean or definition.is_list, (key, action)
        assert definition.is_boolean or action.type in (None, int, float), (key, action.type)
    assert PRESETS not in definitions(PARSERS[command]()), "the file's presets have this key"


def sample_of(definition: Definition) -> Any:
    """A value of the option's type that is not its default."""
    if definition.is_boolean:
        return definition.default is not True
    if definition.action.choices is not None:
        return [*definition.action.choices][-1]
    one = {int: 7, float: 0.625}.get(definition.action.type, '{"a": 1}' if definition.is_json else "some text")  # type: ignore[call-overload]
    return [one] if definition.is_list else one


def words_of(definition: Definition, value: Any) -> list[str]:
    """The same on the command line."""
    option = f"--{definition.key}"
    if definition.is_boolean:
        return [option if value else f"--no-{definition.key}"]
    values = [str(each) for each in (value if isinstance(value, list) else [value])]
    return values if not definition.action.option_strings else [word for each in values for word in (option, each)]


@pytest.mark.parametrize("command", CONFIGURABLE)
def test_every_option_is_the_same_in_a_file_and_on_the_command_line(
    write: Write, monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any], command: str
) -> None:
    """Options of lately too, without a word here: all of a parser at once, with a value of their type each."""
    for switch in SWITCHES:
        monkeypatch.delenv(switch.name, raising=False)
    known = definitions(PARSERS[command]())
    wanted = {key: sample_of(each) for key, each in known.items()}
    content = {command: wanted}
    jsonschema.Draft202012Validator(schema).validate(content)
    file = write(yaml.safe_dump(content))
    given = [word for key, value in wanted.items() for word in words_of(known[key], value)]
    expected = vars(parse([*command.split(), *given])[1])
    assert vars(parse([*command.split(), "--config", file])[1]) == expected | {"config": file}
    assert set(values_of(command, "--config", file)) == set(known)


def test_secrets_are_known() -> None:
    every: dict[str, Definition] = {}
    for command in CONFIGURABLE:
        every |= definitions(PARSERS[command]())
    secret = re.compile(r"key|token$|password|secret")
    assert {key for key in every if secret.search(key)} - {"api-key-file", "ssl-keyfile"} == {k for k, d in every.items() if d.is_secret}


def test_secrets_are_in_no_error(write: Write) -> None:
    for text in (
        "serve: {api-key: {sk-secret: 1}}",
        "serve: {api-key: [[sk-secret]]}",
        "chat: {api-key: [sk-secret]}",
        "api-key: [sk-secret\n",
    ):
        with pytest.raises(ArgumentError) as failure:
            parse(["serve", "--config", write(text)])
        assert "sk-secret" not in str(failure.value)


# --- the documentation


def test_the_documentations_files_are_read(write: Write, schema: dict[str, Any]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    for text in blocks:
        configured("serve", ["--config", write(text)])
        jsonschema.Draft202012Validator(schema).validate(yaml.safe_load(text) or {})
    write(blocks[0])
    assert values_of("serve", "--config", "conf.yaml", "--preset", "small")["port"] == (8002, "conf.yaml:18 (preset small)")
    assert "port: 8002                 # conf.yaml:18 (preset small)" in blocks[2]


# --- the schema


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    schema = config_schema(PARSERS)
    jsonschema.Draft202012Validator.check_schema(schema)
    return schema


@pytest.mark.parametrize(
    "text", [RANKED, MODELS, "stop: [a, 3]\nspeculative-config: off\nlab: {k: [2], quality: true}\nquality: {models: a}\ntop_k: null\n"]
)
def test_the_schema_accepts_what_the_reader_accepts(write: Write, schema: dict[str, Any], text: str) -> None:
    jsonschema.Draft202012Validator(schema).validate(yaml.safe_load(text))
    parse(["serve", "--config", write(text)])


@pytest.mark.parametrize(
    "text",
    ["temprature: 1", "serve: {prompt: x}", "top-k: many", "top-k: [3]", "quality: true", "presets: {a: 3}", "presets: {a: {topk: 3}}"]
    + ["stop: {a: b}", "serve: {model: {a: {port: 1}}}", "config: x", "presets: {a: {presets: {}}}", "lab: {quality: maybe}"],
)  # fmt: skip
def test_the_schema_refuses_what_the_reader_refuses(write: Write, schema: dict[str, Any], text: str) -> None:
    assert not jsonschema.Draft202012Validator(schema).is_valid(yaml.safe_load(text))
    with pytest.raises(ArgumentError):
        parse(["serve", "--config", write(text)])


def test_the_schema_describes_each_option(schema: dict[str, Any]) -> None:
    for command in CONFIGURABLE:
        known = definitions(PARSERS[command]())
        properties = schema["$defs"][command]["properties"]
        assert {key: d.action.help or key for key, d in known.items()} == {key: form["description"] for key, form in properties.items()}


# --- show-config

SECRETS = "serve: {api-key: [sk-one, sk-two]}\nchat: {api-key: sk-three, url: 'http://user:sk-four@host/v1'}\n"


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["show-config", *arguments]) == 0
    return capsys.readouterr().out


def test_show_config_names_origins(write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYVLLM_ARG_DTYPE", "float16")
    monkeypatch.setenv("TINYVLLM_KERNELS", "all=ref")
    monkeypatch.setenv("TINYVLLM_DEVICE", "CPU")
    text = shown(capsys, "serve", "--config", write(RANKED + "top-k: 3\n"), "--preset", "big", "--max-model-len", "9")
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert lines >= {
        "serve:",
        "port: 3 # conf.yaml:10 (preset big)",
        'dtype: "float16" # environment TINYVLLM_ARG_DTYPE',
        "max-model-len: 9 # command line",
        '# host: "127.0.0.1" # default',
        "# block-size: 16 # default",
        "# warm-up: true # default",
        'device: "CPU" # environment TINYVLLM_DEVICE',
        '# TINYVLLM_KERNELS="all=ref" # environment',
        "# no option of serve: top-k # conf.yaml:15",
    }


def test_show_config_as_json(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    value = json.loads(shown(capsys, "--json", "serve", "--config", write(MODELS), "--port", "1"))
    assert value["command"] == "serve" and value["config"] == "conf.yaml" and value["preset"] is None
    assert value["options"]["port"] == {"value": 1, "origin": {"kind": "command line"}}
    assert value["options"]["block-size"] == {"value": 32, "origin": {"kind": "file", "file": "conf.yaml", "line": 3}}
    assert value["options"]["max-body"] == {"value": 4 << 20, "origin": {"kind": "default"}}
    big = value["options"]["model"]["value"]["big"]
    assert big["max-num-seqs"] == {"value": 2, "origin": {"kind": "file", "file": "conf.yaml", "line": 9}}


def test_what_show_config_prints_is_a_configuration_file(
    write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINYVLLM_THREADS", raising=False)  # of these tests: it would be an option of the file
    arguments = ["--config", write(MODELS), "--cors-origin", "a: #b", "--unload-idle", "0.5"]
    options = parse(["serve", *arguments])[1]
    again = parse(["serve", "--config", write(shown(capsys, "serve", *arguments))])[1]
    fields = [[(model.name, model.fields()) for model in each.model] for each in (options, again)]
    assert fields[0] == fields[1] and {**vars(options), "model": 0} == {**vars(again), "model": 0}
    assert values_of("serve", "--config", write(shown(capsys, "serve"))) == {}


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_show_config_hides_secrets(
    write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, form: list[str]
) -> None:
    monkeypatch.setenv("TINYVLLM_API_KEY", "sk-five")
    file = write(SECRETS)
    text = shown(capsys, *form, "serve", "--config", file, "--api-key", "sk-six") + shown(capsys, *form, "serve", "--config", file)
    text += shown(capsys, *form, "chat", "--config", file) + shown(
        capsys, *form, "lab", "--api-key", "sk-seven", "--url", "http://sk-eight@h"
    )
    assert "sk-" not in text and '"***"' in text and "http://***@host/v1" in text


def test_show_config_reads_aliases_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert '  model: "PATH"' in shown(capsys, "generate", "-m", "PATH")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "show-config needs a command"),
        (["sreve"], "unknown command 'sreve', did you mean 'serve'?"),
        (["completion"], "completion has no options in configuration files"),
        (["serve", "--json"], "--json belongs before the command: tinyvllm show-config --json serve"),
        (["serve", "--prot", "1"], "did you mean '--port'?"),
        (["--schema", "serve"], "give no command"),
    ],
)
def test_show_config_refuses(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert cli.main(["show-config", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_show_config_prints_the_schema(capsys: pytest.CaptureFixture[str], schema: dict[str, Any]) -> None:
    assert json.loads(shown(capsys, "--schema")) == schema


def test_yaml_is_not_imported_without_a_file() -> None:
    code = "import sys; from tinyvllm.cli.arguments import parse; parse(['--prompt', 'x']); sys.exit('yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
