"""What a message tells somebody to type can be typed: options are those of every command that the message can come
from, or that it names; settings, packages, variables, names and parameters are there."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pytest
import torch
import transformers
import yaml
from pydantic import BaseModel, TypeAdapter
from typer.main import get_command

import slipstream
from slipstream.cli import app
from slipstream.errors import SlipstreamError
from slipstream.option_errors import records_in
from slipstream.train.config import Config
from slipstream.train.config.overrides import check_names, set_override
from slipstream.train.config.sections import MESH_SETTINGS
from slipstream.train.metrics.records import NAMES
from support.forked import slipstream_command
from support.paths import ROOT

SOURCES = ROOT / "src" / "slipstream"
_GROUP: Any = get_command(app)
COMMANDS = {
    name: {option for parameter in command.params for option in parameter.opts}
    for name, command in _GROUP.commands.items()
}
# The commands whose messages come from a module, or from a function or class of one (module.py::name), by how the place
# begins; the longest beginning counts.
SAID_BY = {
    "": ["train"],
    "checkpoint/": ["train", "export", "eval", "generate"],
    "checkpoint/checkpoints.py": ["train"],
    "cli/check.py": ["check"],
    "cli/doctor.py": ["doctor"],
    "cli/models.py": ["export", "eval", "generate"],
    "cli/models.py::_settings": ["eval"],
    "cli/models.py::evaluate": ["eval"],
    "cli/models.py::generate": ["generate"],
    "cli/options.py": [*COMMANDS],
    "cli/options.py::check_new_file": ["plan", "timeline", "init"],
    "cli/plan.py": ["plan"],
    "cli/profile.py": ["profile"],
    "cli/timeline.py": ["timeline"],
    "cli/train.py": ["train"],
    "cli/train.py::init": ["init"],
    "cost/": ["plan", "timeline"],
    "cost/fit.py": ["profile"],
    "cost/profile.py": ["profile", "plan"],
    "extras/doctor/": ["doctor"],
    "extras/first_config/": ["init"],
    "extras/run_page/": ["runs"],
    "launch/profile_ranks.py": ["profile"],
    "model/": ["train", "check", "plan", "profile"],
    "planner/": ["plan"],
    "cluster_plans/": ["plan", "train"],
    "profile/": ["profile", "train"],
    "timeline/": ["timeline"],
    "train/evaluation.py": ["eval"],
    "train/export.py": ["export", "eval", "generate"],
    "train/export.py::_parse": ["export"],
    "train/export.py::check_export_folder": ["export"],
    "train/export.py::choose_checkpoint": ["export"],  # where a step is given
    "train/export.py::TextWriter": ["generate"],
    "train/data/": ["train", "eval"],
}
TAKE_SETTINGS = {"train", "init", "eval"}
_OF_OTHER_PROGRAMS = re.compile(r"torchrun|srun|\bpip\b|docker|nvidia-smi|kubectl|axolotl|rdzv|^--query|^--format")
_OPTION = re.compile(r'(?<![\w-])--([a-zA-Z][\w.-]*\w|[a-z])(=(?:\[[^\]{}]*\]|[^\s,;:)`"{}\x27]+))?')
_SETTING = re.compile(
    rf"(?<![\w.-])((?:{'|'.join(Config.model_fields)})\.\w+)"
    r'(?:=|: (?=true|false|\d))(\[[^\]{}]*\]|[^\s,;:)`"{}\x27]*)'
)
_DECLARED = re.compile(r"--[\w-]+(/--[\w-]+)?")
# Commands that a text names: "`slipstream plan`", or "--option to check, init or eval".
_NAMED_COMMAND = re.compile(r"slipstream ([a-z]\w*)(?![\w.])|\bto ((?:\w+, )*\w+ or \w+)|^(\w+)(?= .*--)")
_SAYS_OF_ITSELF = {"reads"}  # "slipstream reads format 2"
_VARIABLE = re.compile(r"\bSLIPSTREAM_\w+")
_EXTRA = re.compile(r"slipstream\[([\w{},]+)\]")
_CALL = re.compile(r"(?<![\w.])(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*\(")
_KEYWORD = re.compile(r"(?<![\w.\-\[(])([a-z_]\w*)=(?!=)")
# What messages name of other libraries' objects, and of those of Slipstream that `slipstream.NAME` doesn't have.
_OF_OTHER_LIBRARIES = {
    "transformers.TrainingArguments": "average_tokens_across_devices dataloader_drop_last ddp_backend ddp_timeout "
    "gradient_accumulation_steps label_names load_best_model_at_end optim per_device_eval_batch_size "
    "per_device_train_batch_size save_only_model train_sampling_strategy",
    "transformers.Trainer": "compute_metrics optimizers",
    "transformers.Trainer.train": "resume_from_checkpoint",
    "transformers.LlamaConfig": "max_position_embeddings num_hidden_layers tie_word_embeddings",
    "transformers.DataCollatorWithPadding": "return_tensors",
    "transformers.MixtralConfig": "output_router_logits",
    "transformers.RwkvConfig": "rescale_every",
    "transformers.BertConfig": "is_decoder",
    "peft.LoraConfig": "init_lora_weights lora_bias",
    "torch.nn.BatchNorm1d": "track_running_stats",
    "torch.nn.Embedding": "scale_grad_by_freq",
    "torch.nn.ReLU": "inplace",
    "torch.distributed.checkpoint.load": "checkpoint_id",
    "torch.utils.data.DistributedSampler": "num_replicas rank",
    "slipstream.planner.cuts.Cuts": "longest_slice shortest_slice",
    "slipstream.planner.joint.JointProblem": "given",
    "slipstream.planner.slicing.equal_stage_slicing.equal_time_cuts": "attention_share",
    "slipstream.profile.ProfileSettings": "budget longest_slice repeats",
}
_TAKEN_BY_ANY_MODEL = {"attn_implementation", "model_type"}  # by from_pretrained's **kwargs, and by config.json
_IN_FILES = {"format"}  # of a profile


class Text(NamedTuple):
    """A text of a module, with {} for what is filled in; constants of the module are."""

    module: str
    scope: str  # the function or class around it, and those around that: "Class.method"
    line: int
    text: str

    @property
    def commands(self) -> list[str]:
        place = f"{self.module}::{self.scope}"
        return SAID_BY[max((begin for begin in SAID_BY if place.startswith(begin)), key=len)]

    @property
    def named_commands(self) -> set[str]:
        named = {name for found in _NAMED_COMMAND.findall(self.text) for name in re.split(r", | or ", "".join(found))}
        return named & COMMANDS.keys()

    @property
    def place(self) -> str:
        return f"{self.module}:{self.line}"


@cache
def texts() -> list[Text]:
    """Returns the texts of all modules but docstrings."""
    found = []
    for file in sorted(SOURCES.rglob("*.py")):
        tree, module = ast.parse(file.read_text(encoding="utf-8")), str(file.relative_to(SOURCES))
        constants = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        }
        found += [Text(module, *each) for each in _texts_in(tree, constants)]
    return found


def _texts_in(node: ast.AST, constants: dict[str, str], scope: str = "") -> Iterator[tuple[str, int, str]]:
    """Yields scope, line and text of each string below a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):  # a docstring
            continue
        if isinstance(child, ast.JoinedStr):
            yield scope, child.lineno, "".join(_part(part, constants) for part in child.values)
            for part in child.values:
                if isinstance(part, ast.FormattedValue):
                    yield from _texts_in(part, constants, scope)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield scope, child.lineno, child.value
        else:
            inner = getattr(child, "name", "") if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else ""
            yield from _texts_in(child, constants, ".".join(filter(None, (scope, inner))))


def _part(part: ast.expr, constants: dict[str, str]) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    name = part.value.id if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name) else ""
    return constants.get(name, "{}")


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


def problem_of_option(name: str, value: str, command: str) -> str:
    """Why an option, with its value or without, can't be given to a command; "" if it can."""
    if f"--{name}" in COMMANDS[command]:
        return ""
    return is_possible(name + value) if command in TAKE_SETTINGS else f"no option of {command}"


def test_every_option_that_a_message_names_is_one_of_its_commands() -> None:
    wrong, num_typed = [], 0
    for text in texts():
        if _OF_OTHER_PROGRAMS.search(text.text) or _DECLARED.fullmatch(text.text):
            continue
        for found in _OPTION.finditer(text.text):
            rest, name, value = text.text[found.end() :], found[1], (found[2] or "").rstrip(".")
            if name in ("help", "version") or (rest.startswith(".") and not value):  # a section, or a prefix
                continue
            if rest.startswith("{") or value.count("[") != value.count("]"):  # a value that is filled in
                value = ""
            num_typed += 1
            named = text.named_commands
            problems = {command: problem_of_option(name, value, command) for command in named | {*text.commands}}
            if named and not all(problems[command] for command in named):
                continue
            wrong += [f"{text.place}: {found[0]}: {problem}" for problem in problems.values() if problem]
    assert num_typed > 140
    assert wrong == []


def test_every_command_that_a_message_names_is_there_and_takes_as_many_arguments() -> None:
    wrong, num_typed = [], 0
    for text in texts():
        flat = " ".join(text.text.split())
        for found in re.finditer(r"slipstream ([a-z]\w*)(?![\w.])([^`;,)]*)(`?)", flat):
            name, typed, is_whole = found[1], found[2].split(), bool(found[3])
            if name in _SAYS_OF_ITSELF:
                continue
            num_typed += 1
            given = [word for word in typed if not word.startswith(("-", "{}-")) and word != "..."]
            room = (
                sum(each.param_type_name == "argument" for each in _GROUP.commands[name].params)
                if name in COMMANDS
                else -1
            )
            if room < 0 or (is_whole and len(given) > room):
                wrong.append(f"{text.place}: {found[0]}")
    assert num_typed > 20
    assert wrong == []


def test_messages_on_code_of_a_model_name_the_commands_that_can_be_told_to_run_it() -> None:
    can_be_told = {name for name, options in COMMANDS.items() if "--trust-remote-code" in options}
    said = re.compile(r"--trust-remote-code to ([\w, ]+?) or (\w+)")
    found = [match for text in texts() for match in said.finditer(" ".join(text.text.split()))]
    assert len(found) == 2
    assert [{*match[1].split(", "), match[2]} for match in found] == [can_be_told] * 2


def test_every_setting_that_a_message_names_is_there_and_takes_the_value() -> None:
    wrong, num_typed = [], 0
    for text in texts():
        for found in _SETTING.finditer(text.text):
            is_filled_in = text.text[found.end() :].startswith("{")
            value = "" if is_filled_in else found[2].rstrip(".")
            num_typed += 1
            if problem := is_possible(f"{found[1]}={value}"):
                wrong.append(f"{text.place}: {found[0]}: {problem}")
    assert num_typed > 100
    assert wrong == []


def test_every_variable_of_ours_that_a_message_names_is_read() -> None:
    whole = {text.text for text in texts() if _VARIABLE.fullmatch(text.text)}
    named = {(name, text.place) for text in texts() for name in _VARIABLE.findall(text.text)}
    assert {"SLIPSTREAM_SHARED_CORES", "SLIPSTREAM_STALL_LIMIT"} <= {name for name, _ in named}
    assert [f"{place}: {name}" for name, place in sorted(named) if name not in whole] == []


def test_every_package_that_a_message_has_installed_is_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    named = {name for text in texts() for found in _EXTRA.findall(text.text) for name in found.split(",")}
    assert named >= {"trainer", "qlora", "peft", "{}"}  # {} is a tracker
    assert named - {"{}"} | {*NAMES} <= extras


def public(path: str) -> Any:
    """The object that a dotted name stands for: of Slipstream, of a Pipeline `pipe`, or of a library."""
    first, *names = path.removeprefix("pipe.").split(".")
    homes = [
        home for home in (slipstream, slipstream.Pipeline, transformers, torch.nn.functional) if hasattr(home, first)
    ]
    found = getattr(homes[0], first) if homes else importlib.import_module(first)
    for name in names:
        if inspect.ismodule(found) and not hasattr(found, name):
            importlib.import_module(f"{found.__name__}.{name}")
        found = getattr(found, name)
    return found


def problem_of_call(call: ast.Call) -> str:
    """Why a call of something public can't be typed so; "" if it can. Values that are `...` may be any."""
    path = ast.unparse(call.func)
    try:
        called = public(path)
    except ModuleNotFoundError as error:
        return "" if error.name in ("trl", "huggingface_hub", "peft") else f"no {path}"
    except AttributeError:
        return f"no {path}"
    parameters = inspect.signature(called).parameters
    takes_more = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    for keyword in call.keywords:
        if keyword.arg not in parameters and not takes_more:
            return f"{path} takes no {keyword.arg}"
    for value in (*call.args, *(keyword.value for keyword in call.keywords)):
        if isinstance(value, ast.Call) and (problem := problem_of_call(value)):
            return problem
    if isinstance(called, type) and issubclass(called, BaseModel):
        try:
            called(**{str(each.arg): ast.literal_eval(each.value) for each in call.keywords})
        except ValueError as error:  # also of a value that is no literal
            return "" if "malformed node" in str(error) or "..." in ast.unparse(call) else str(error)
    return ""


def calls_in(text: str) -> Iterator[ast.Call | str]:
    """Yields the calls with keywords that a text names; one that is no Python as it stands."""
    for found in _CALL.finditer(text):
        depth, end = 0, found.end() - 1
        while end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
            if not depth:
                break
        typed = text[found.start() : end]
        if not _KEYWORD.search(typed, len(found[0])) and not re.search(r"\(\w+=", typed):
            continue
        try:
            call = ast.parse(typed.replace("{}", "..."), mode="eval").body
        except SyntaxError:
            yield typed
            continue
        if isinstance(call, ast.Call):
            yield call


def test_every_call_that_a_message_names_can_be_made() -> None:
    wrong, num_typed = [], 0
    for text in texts():
        for call in calls_in(" ".join(text.text.split())):
            num_typed += 1
            problem = "no Python" if isinstance(call, str) else problem_of_call(call)
            if problem:
                wrong.append(f"{text.place}: {call if isinstance(call, str) else ast.unparse(call)}: {problem}")
    assert num_typed > 40
    assert wrong == []


def test_every_public_name_that_a_message_names_is_there() -> None:
    wrong, num_typed = [], 0
    for text in texts():
        for found in re.finditer(r"(?<![\w./-])(?:slipstream|pipe)(?:\.[A-Za-z_]\w*)+(?![\w.-]*[/-])", text.text):
            num_typed += 1
            try:
                public(found[0].removesuffix(".txt"))
            except (AttributeError, ModuleNotFoundError) as error:
                wrong.append(f"{text.place}: {found[0]}: {error}")
    assert num_typed > 50
    assert wrong == []


@cache
def parameters() -> set[str]:
    """The names of the parameters of all that is public, and of the libraries' objects that messages are on."""
    named = {*MESH_SETTINGS, *_TAKEN_BY_ANY_MODEL, *_IN_FILES}
    named |= {
        name
        for field in Config.model_fields.values()
        for kind in records_in(field.annotation)
        for name in kind.model_fields
    }
    for public_name in slipstream.__all__:
        found = getattr(slipstream, public_name)
        members = (
            [member for name, member in inspect.getmembers(found) if not name.startswith("_")]
            if inspect.isclass(found)
            else []
        )
        for each in filter(callable, (found, *members)):
            try:
                named |= inspect.signature(each).parameters.keys()
            except (TypeError, ValueError):
                continue  # no signature, as of a class in C
    return named


def test_what_messages_name_of_other_libraries_is_there() -> None:
    for path, names in _OF_OTHER_LIBRARIES.items():
        taken = inspect.signature(public(path)).parameters
        assert [name for name in names.split() if name not in taken] == [], path


def test_every_parameter_that_a_message_names_is_there() -> None:
    of_others = {name for names in _OF_OTHER_LIBRARIES.values() for name in names.split()}
    wrong, num_typed = [], 0
    for text in texts():
        flat = re.sub(r"<[^>]*>", "", " ".join(text.text.split()))
        if " " not in flat or text.module.startswith("html_parts/") or text.scope.endswith("__repr__"):
            continue
        for call in calls_in(flat):  # its keywords are judged by what is called
            flat = flat.replace(call if isinstance(call, str) else ast.unparse(call), "")
        for found in _KEYWORD.finditer(flat):
            num_typed += 1
            if found[1] not in parameters() | of_others:
                wrong.append(f"{text.place}: {flat[max(0, found.start() - 30) : found.end() + 30]}")
    assert num_typed > 100
    assert wrong == []


@pytest.mark.parametrize("advice", ["--training.stpes=3", "--training.steps=ten", "--chat"])
def test_wrong_advice_would_be_found(advice: str) -> None:
    assert is_possible(advice.removeprefix("--"))


@pytest.mark.parametrize(
    "advice",
    [
        "Memory(recompute='ful')",
        "slipstream.Memory(recompte='full')",
        "Pipeline(memory=Memory(recompute='ful'))",
        "Pipe(a=1)",
    ],
)
def test_wrong_calls_would_be_found(advice: str) -> None:
    call, *_ = calls_in(f"give {advice} for that")
    assert isinstance(call, ast.Call)
    assert problem_of_call(call)


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
