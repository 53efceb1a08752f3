"""Every option and setting that a message names can be typed: it is one of a command that the message can come from."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pytest
import yaml
from pydantic import TypeAdapter
from typer.main import get_command

from slipstream.cli import app
from slipstream.errors import SlipstreamError
from slipstream.option_problems import records_in
from slipstream.train.config import Config
from slipstream.train.config.run_config import MESH_SETTINGS, check_names, set_override
from support.forked import slipstream_command
from support.paths import ROOT

SOURCES = ROOT / "src" / "slipstream"
COMMANDS = {
    name: {option for parameter in command.params for option in parameter.opts}
    for name, command in get_command(app).commands.items()  # type: ignore[attr-defined]
}
# The commands whose messages come from a module, by how its path begins; the longest beginning counts.
SAID_BY = {
    "": ["train"],
    "checkpoint/": ["train", "export", "eval", "generate"],
    "cli/check.py": ["check"],
    "cli/doctor.py": ["doctor"],
    "cli/models.py": ["export", "eval", "generate"],
    "cli/options.py": [*COMMANDS],
    "cli/plan.py": ["plan", "train"],  # it says how to train by the plan
    "cli/profile.py": ["profile"],
    "cli/timeline.py": ["timeline"],
    "cli/train.py": ["train", "init"],
    "cost/": ["plan", "timeline"],
    "cost/fit.py": ["profile"],
    "cost/profile.py": ["profile", "plan"],
    "extras/doctor/": ["doctor"],
    "extras/init/": ["init", "train"],
    "extras/run_page/": ["runs"],
    "launch/profile_ranks.py": ["profile"],
    "model/": ["train", "check", "plan", "profile"],
    "planner/": ["plan"],
    "planning/": ["plan", "train"],
    "profile/": ["profile", "train"],
    "timeline/": ["timeline"],
    "train/evaluation.py": ["eval"],
    "train/export.py": ["export", "eval", "generate"],
    "train/data/": ["train", "eval"],
}
TAKE_SETTINGS = {"train", "init", "eval"}
_OF_OTHER_PROGRAMS = re.compile(r"torchrun|srun|\bpip\b|docker|nvidia-smi|kubectl|axolotl|rdzv|^--query|^--format")
_OPTION = re.compile(r'(?<![\w-])--([a-zA-Z][\w.-]*\w|[a-z])(=(?:\[[^\]{}]*\]|[^\s,;:)`"{}\x27]+))?')
_SETTING = re.compile(rf"(?<![\w.-])((?:{'|'.join(Config.model_fields)})\.\w+)=")


class Text(NamedTuple):
    """A text of a module, with {} for what is filled in."""

    module: str
    line: int
    text: str

    @property
    def commands(self) -> list[str]:
        return SAID_BY[max((begin for begin in SAID_BY if self.module.startswith(begin)), key=len)]

    @property
    def place(self) -> str:
        return f"{self.module}:{self.line}"


def texts() -> Iterator[Text]:
    """Yields the texts of all modules but docstrings."""
    for file in sorted(SOURCES.rglob("*.py")):
        tree, module = ast.parse(file.read_text(encoding="utf-8")), str(file.relative_to(SOURCES))
        left_out = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
        left_out |= {id(part) for node in joined for part in node.values}
        for node in ast.walk(tree):
            if id(node) in left_out:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = (str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
                yield Text(module, node.lineno, "".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield Text(module, node.lineno, node.value)


def is_possible(setting: str) -> str:
    """Why a setting, with its value or without, can't be typed; "" if it can."""
    name, _, value = setting.partition("=")
    if name not in MESH_SETTINGS and "." not in name:
        return "no setting"
    read: dict[str, Any] = {}
    try:
        set_override(read, f"{name}=null")
        check_names(read)
    except SlipstreamError as error:
        return str(error)
    (section, values), *_ = read.items()
    if not value or "..." in value:
        return ""
    field = records_in(Config.model_fields[section].annotation)[0].model_fields[next(iter(values))]
    allowed: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation  # type: ignore[misc]
    try:
        TypeAdapter(allowed).validate_python(yaml.safe_load(value))
    except (ValueError, yaml.YAMLError) as error:
        return str(error)
    return ""


def test_every_option_that_a_message_names_is_one_of_its_command() -> None:
    wrong, num_typed = [], 0
    for text in texts():
        if _OF_OTHER_PROGRAMS.search(text.text):
            continue
        for found in _OPTION.finditer(text.text):
            rest, name, value = text.text[found.end() :], found[1], (found[2] or "").rstrip(".")
            if name in ("help", "version") or (rest.startswith(".") and not value):  # a section, or a prefix
                continue
            if rest.startswith("{") or value.count("[") != value.count("]"):  # a value that is filled in
                value = ""
            num_typed += 1
            if any(f"--{name}" in COMMANDS[command] for command in text.commands):
                continue
            takes_settings = not TAKE_SETTINGS.isdisjoint(text.commands)
            problem = is_possible(name + value) if takes_settings else f"no option of {text.commands}"
            if problem:
                wrong.append(f"{text.place}: {found[0]}: {problem}")
    assert num_typed > 150
    assert wrong == []


def test_messages_on_code_of_a_model_name_the_commands_that_can_be_told_to_run_it() -> None:
    can_be_told = {name for name, options in COMMANDS.items() if "--trust-remote-code" in options}
    said = re.compile(r"--trust-remote-code to ([\w, ]+?) or (\w+)")
    found = [match for text in texts() for match in said.finditer(" ".join(text.text.split()))]
    assert len(found) == 2
    assert [{*match[1].split(", "), match[2]} for match in found] == [can_be_told] * 2


def test_every_setting_that_a_message_names_is_there() -> None:
    named = {(found[1], text.place) for text in texts() for found in _SETTING.finditer(text.text)}
    assert len(named) > 100
    assert [f"{place}: {problem}" for name, place in sorted(named) if (problem := is_possible(name))] == []


@pytest.mark.parametrize("advice", ["--training.stpes=3", "--training.steps=ten", "--chat"])
def test_wrong_advice_would_be_found(advice: str) -> None:
    assert is_possible(advice.removeprefix("--"))


def test_a_chat_without_a_template_is_told_an_option_that_it_has(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    from slipstream.launch import Progress
    from slipstream.train.data import train_tokenizer
    from support.tiny_training import TEXT, tiny_llama

    config = LlamaConfig(**{name: value for name, value in tiny_llama().items() if name != "model_type"})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    train_tokenizer([TEXT], 300, Progress(None)).save_pretrained(tmp_path)
    asked = ("generate", tmp_path, "3 is", "--chat", "--max-new-tokens=2")
    ended = slipstream_command(*asked)
    assert ended.returncode == 2
    (advice,) = re.findall(r"--chat-template=\w+(?= )", ended.stderr)
    answered = slipstream_command(*asked, advice)
    assert answered.returncode == 0, answered.stderr
    unknown = slipstream_command(*asked, "--chat-template=chatlm")
    assert unknown.returncode == 2
    assert "chat-template=chatlm is neither a file here nor one of" in " ".join(unknown.stderr.split())
