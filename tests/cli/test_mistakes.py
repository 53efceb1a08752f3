"""What users type by mistake, and what they read then: the value that was given, what is allowed, and what to type.

Each ends with exit code 2 and without a traceback, and nothing is started or written.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, GemmaConfig, LlamaConfig

from slipstream.cli import main
from slipstream.cli.options import with_output_options
from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.train.config import Config
from slipstream.train.data.tokenised_text import train_tokenizer
from support.forked import slipstream_command
from support.timeouts import LIMIT
from support.tiny_training import tiny_llama

Typed = Callable[..., str]
LLAMA = tiny_llama(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
CONFIG = {
    "model": {"config": LLAMA},
    "data": {"files": ["books"]},
    "pipeline": {"slices": 2},
    "runtime": {"self_check": False},
    "training": {"output": "out", "steps": 2, "seq_len": 32},
}

# What is typed after `slipstream train config.yaml`, and words of the message.
SETTINGS: list[tuple[str, list[str]]] = [
    ("--training.stpes=3", ["unknown key training.stpes", "'training.steps'"]),
    ("--steps=3", ["unknown key steps", "'training.steps'"]),
    ("--lr=1e-3", ["unknown key lr", "'optimizer.lr'"]),
    ("--optimizer.learning_rate=1e-3", ["optimizer.learning_rate", "'optimizer.lr'"]),
    ("--batch_size=4", ["unknown key batch_size", "'training.batch_size'"]),
    ("--deepspeed", ["unknown key deepspeed; here it is 'parallel.shard': optimizer shares its state"]),
    ("--deepspeed=ds.json", ["unknown key deepspeed; here it is 'parallel.shard'", "no file of theirs"]),
    ("--fsdp=full_shard", ["unknown key fsdp; here it is 'parallel.shard'", "parameters shares weights and gradients"]),
    ("--use_fsdp", ["unknown key use_fsdp; here it is 'parallel.shard'"]),
    ("--data.train_on_inputs=true", ["unknown key data.train_on_inputs; here it is 'data.loss': all counts"]),
    ("--data.max_samples", ["'--data.max_samples' isn't a setting with a value"]),
    ("--preference.loss=grpo", ["'orpo' or 'kto'; GRPO isn't among them", "a reward judges while it trains"]),
    ("--preference.loss=ipo", ["IPO isn't among them"]),
    ("--preference.loss=opro", ["did you mean preference.loss=orpo?"]),
    ("--gpus=4", ["unknown key gpus; here it is 'pipeline.num_ranks': processes over which"]),
    ("--world_size=4", ["unknown key world_size; here it is 'pipeline.num_ranks'"]),
    ("--data.path=books", ["unknown key data.path; here it is 'data.files': a list of texts"]),
    ("--model.freeze=[*]", ["model.freeze='[*]' isn't valid YAML", "put quotes around what begins with a *"]),
    ("--model.freeze=[nope*]", ["'nope*' matches no parameter", "model.embed_tokens.weight"]),
    ("--model.config.num_key_value_heads=3", ["num_key_value_heads=3: 2 attention heads", "a divisor of 2"]),
    ("--optimizer.name=adam2", ["optimizer.name=adam2", "did you mean 'adam'?"]),
    ("--optimizer.schedule=cosin", ["optimizer.schedule=cosin is not known", "did you mean 'cosine'?"]),
    ("--training.device=cuda", ["needs a CUDA device, but there is none", "--training.device=cpu"]),
    ("--tracking.to=[wandbb]", ["'wandbb' isn't known", "did you mean 'wandb'?"]),
    ("--training.batch_size=3 --dp=2", ["training.batch_size=3 doesn't divide", "=2 or 4, or parallel.data=1"]),
    ("--training.batch_size=2 --parallel.data=3", ["choose training.batch_size=3, or parallel.data=2"]),
    ("--training.batch_size=1 --pipeline.num_microbatches=2", ["num_microbatches=1, or training.batch_size=2"]),
    ("--training.batch_size=2 --dp=2 --pipeline.num_microbatches=2", ["=1, or training.batch_size=4"]),
    ("--memory.recompute=3000", ["memory.recompute=3000", "1 to 2 here"]),
    ("--runtime.transport=nccl", ["2 ranks compute on CPUs", "give gloo"]),
    ("--preference.beta=0.1", ["preference needs pairs", "give data.dataset"]),
    ("--lora.rank=4", ["lora.rank", "'lora.r'"]),
    ("--training.logging_steps=1", ["unknown key training.logging_steps; there is no such", "metrics.jsonl"]),
    ("--gradient_accumulation_steps=4", ["'training.batch_size': multiply it", "cuts the same batch"]),
    ("--per_device_train_batch_size=2", ["'training.batch_size': sequences of a step on all devices together"]),
    ("--save_total_limit=2", ["did you mean 'checkpoint.keep'?"]),
    ("--max_samples=100", ["unknown key max_samples", "'data.max_samples': the first rows of a source"]),
    ("--data.max_samples=0", ["data.max_samples=0", "a whole number from 1"]),
    ("--lora.load_in_4bit=true", ["'lora.base_precision': nf4: 4 bits by bitsandbytes"]),
    ("--adapter=lora", ["unknown key adapter; here it is 'lora': a section"]),
    ("--training.unlike_anything=1", ["unknown key training.unlike_anything; training has: bad_numbers"]),
    ("--optim.lr=1", ["unknown key optim", "'optimizer'"]),
    ("--training.steps=ten", ["training.steps='ten'", "a whole number from 1"]),
    ("--training.steps=1.5", ["training.steps=1.5", "a whole number from 1"]),
    ("--training.steps=true", ["training.steps=True", "a whole number from 1", "yes, no, on and off"]),
    ("--training.seq_len=4k", ["training.seq_len='4k'", "a whole number from 1"]),
    ("--training.seq_len=128k", ["did you mean training.seq_len=128000 or training.seq_len=131072?"]),
    ("--training.steps=1,000", ["training.steps='1,000'", "did you mean training.steps=1000?"]),
    ("--memory.limit=80GB", ["memory.limit='80GB'", "did you mean memory.limit=80e9?"]),
    ("--memory.limit=80GiB", ["did you mean memory.limit=85899345920?"]),
    ("--data.validation_fraction=5%", ["did you mean data.validation_fraction=0.05?"]),
    ("--pipeline.slices=128,256", ["did you mean pipeline.slices=[128,256]?"]),
    ("--training.overwrite=maybe", ["training.overwrite='maybe'", "true or false"]),
    ("--optimizer.lr=0", ["optimizer.lr=0", "a number above 0"]),
    ("--optimizer.betas=[0.9]", ["optimizer.betas=[0.9]", "a list of 2 numbers"]),
    ("--training.precision=bfloat16", ["'bfloat16'", "'bf16-weights' or 'fp16'", "training.precision=bf16?"]),
    ("--training.precision=fp32", ["'fp32'", "'bf16-weights' or 'fp16'", "training.precision=float32?"]),
    ("--training.device=gpu", ["training.device='gpu'", "'cpu' or 'cuda'", "training.device=cuda?"]),
    ("--pipeline.schedule=1f1p", ["pipeline.schedule='1f1p'", "did you mean '1f1b'"]),
    ("--pipeline.schedule=zero-bubble", ["did you mean 'zb-h1', or 'zb-v' with 2 stages per rank?"]),
    ("--pipeline.schedule=ZBVZeroBubble", ["did you mean 'zb-v'?"]),
    ("--pipeline.schedule=Interleaved1F1B", ["did you mean 'interleaved-1f1b'?"]),
    ("--pipeline.slices=0", ["pipeline.slices=0", "'auto', a whole number from 1 or a list of whole numbers"]),
    ("--pipeline.slices=16,16", ["pipeline.slices='16,16'", "did you mean pipeline.slices=[16,16]?"]),
    ("--pipeline.slices=[16,17]", ["add up to 33", "training.seq_len=32", "pipeline.slices=2"]),
    ("--pipeline.slices=[16,x]", ["pipeline.slices=[16, 'x']", "a list of whole numbers"]),
    ("--pipeline.slices=65", ["pipeline.slices=65", "takes 1 to 32 slices"]),
    ("--pipeline.partition=even", ["pipeline.partition='even'", "give 'auto' or a list of numbers"]),
    ("--pipeline.partition=[3,1]", ["[3, 1]", "the model has 2", "--pipeline.partition=auto"]),
    ("--pipeline.num_ranks=4", ["pipeline.num_ranks=4", "2 layers", "choose 1 to 2"]),
    ("--pp=auto", ["--pp=auto", "--pp=2"]),
    ("--tp=3", ["2 attention heads", "3 tensor ranks"]),
    ("--memory.recompute=yes", ["memory.recompute=True", "'selective', 'full'", "memory.recompute=full?"]),
    ("--memory.offload=50", ["memory.offload=50", "a number from 0 to 1"]),
    ("--checkpoint.resume=true", ["checkpoint.resume=True", "'no', 'latest', 'last-good'", "resume=latest?"]),
    ("--checkpoint.resume=5", ["resume=5: there is no checkpoint at all in out/checkpoints; leave", "step 1"]),
    ("--checkpoint.every=-1", ["checkpoint.every=-1", "'auto' or a whole number from 0"]),
    ("--tracking.to=wandb", ["tracking.to='wandb'", "did you mean tracking.to=[wandb]?"]),
    ("--data.files=books", ["data.files='books'", "a list of paths", "did you mean data.files=[books]?"]),
    ("--memory.limit=16", ["memory.limit=16", "bytes", "--memory.limit=16e9"]),
    ("--model.config.model_type=lama", ["model_type='lama'", "'llama'"]),
    ("--data=books", ["data='books'", "data is a section", "files"]),
    ("--lora=true", ["lora=True", "lora is a section", "target_modules"]),
    ("--data.packing=yes", ["data.packing=True", "'fixed' or 'none'", "data.packing=fixed?"]),
    ("--data.validation_fraction=5", ["data.validation_fraction=5", "from 0 to just below 1"]),
    ("--training.seq_len=128", ["training.seq_len=128", "64 positions", "at most 64"]),
    ("--training.epochs=1", ["training.steps=2 and training.epochs=1 both say", "--training.steps=null"]),
    ("--training.steps=null", ["neither training.steps nor training.epochs", "--training.epochs=1"]),
    ("--training.bad_numbers=rollback", ["training.bad_numbers=rollback", "--checkpoint.every=100"]),
    ("--training.output=note.txt", ["training.output=note.txt is a file", "name a folder"]),
    ("--sample.temperature=-1", ["sample.temperature=-1", "a number from 0"]),
    ("--model.config.num_attention_heads=3", ["hidden size (16)", "attention heads (3)"]),
    ("--memory.limit=20e3", ["memory.limit=20000 (20.0 kB)", "weights, gradients and AdamW's state", "num_ranks="]),
    ("--sample.prompt=hello", ["sample.max_new_tokens=64", "64 positions", "--sample.max_new_tokens=59"]),
    ("--data.tokenizer=nope", ["no tokenizer at 'nope'", "no such folder here", "--data.tokenizer=..."]),
    ("--data.tokenizer=model", ["no tokenizer in 'model'", "no tokenizer.json", "--data.tokenizer=..."]),
    ("--model={path: bare, init: random}", ["no tokenizer in 'bare'", "no tokenizer.json", "--data.tokenizer=..."]),
    ("--model={path: hollow, init: random}", ["no tokenizer in 'hollow'", "special tokens", "--data.tokenizer=..."]),
    ("--data.files=[~/books]", ["there is no file or folder /home/typist/books"]),
    ("--data.tokenizer=~/tok", ["no tokenizer at '/home/typist/tok'"]),
    ("--data.suffixes=[txt]", ["'txt' lacks its dot", "give [.txt]"]),
    ("--model.config.num_layers=3", ["unknown key model.config.num_layers", "'model.config.num_hidden_layers'"]),
    ("--model.config.model_type=bert", ["'bert'", "a mask that is not causal", "slices=1"]),
    ("--training.steps=1.5e0", ["training.steps='1.5e0'", "a whole number from 1"]),
    (
        "--data.sources=[{files: [books], wieght: 2}]",
        ["unknown key data.sources[0].wieght", "did you mean 'data.sources[0].weight'?"],
    ),
]

# Configurations of other tools, and how they are recognised.
FOREIGN = {
    "axolotl": "base_model: m\nload_in_4bit: true\nadapter: qlora\nmicro_batch_size: 2\nlearning_rate: 0.0002\n",
    "LLaMA-Factory": "model_name_or_path: m\nstage: sft\ndo_train: true\nfinetuning_type: lora\noutput_dir: o\n",
    "TRL": "model_name_or_path: m\ndataset_name: d\nlearning_rate: 2.0e-4\noutput_dir: o\n",
    "torchtitan": '[job]\ndump_folder = "o"\n[model]\nname = "llama3"\n[training]\nsteps = 10\n[parallelism]\n',
    "DeepSpeed": '{"train_batch_size": 8, "zero_optimization": {"stage": 2}}',
    "accelerate": "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config: {}\n",
}

# Whole commands
COMMANDS: list[tuple[str, list[str]]] = [
    ("train nope.yaml", ["nope.yaml", "No such file"]),
    ("train books", ["books is a folder, and a configuration is a YAML file", "slipstream init MODEL DATA writes one"]),
    ("train model", ["to train the model in it, type slipstream init model DATA, which writes one"]),
    ("train a-run", ["the one of the run in it is a-run/config.yaml"]),
    ("train model/config.json", ["is a model's configuration", "`slipstream init model DATA`"]),
    ("train glued.yaml", ["model='path:tiny'", "put a blank after the colon: path: tiny"]),
    ("train glued-above.yaml", ["line 3", "in '  init: random'; put a blank after the colon: path: tiny"]),
    ("train glued-inside.yaml", ["unknown key model.path:tiny; put a blank after the colon: path: tiny"]),
    (
        "train indent.yaml",
        ["line 3", "in '   init: random'; it is indented by 3, and the line before, 'path: m', by 2"],
    ),
    (
        "train outdent.yaml",
        ["line 3", "in '  init: random'; it is indented by 2, and the line before, 'path: m', by 4"],
    ),
    ("train no-indent.yaml", ["data is an empty section: indent its settings below data:", "'data.files'"]),
    (
        "train inside.yaml",
        ["unknown key model.data; data is a section of its own, and not one in model: indent it less"],
    ),
    ("train titan.toml", ["a configuration of torchtitan (model.flavor, training.local_batch_size)"]),
    ("timeline zero-bubble", ["did you mean 'zb-h1', or 'zb-v' with 2 stages per rank?"]),
    ("plan model h100-dgx --seq-len=32 --global-batch=8 --schedule=zerobubble", ["did you mean 'zb-h1'"]),
    ("plan model h100-dgx --seq-len=128k --global-batch=8", ["a whole number from 1; did you mean 128000 or 131072?"]),
    ("plan model h100-dgx --seq-len=1,000 --global-batch=8", ["did you mean 1000?"]),
    ("plan model h100-dgx --seq-len=32 --global-batch=8 --output=~/no/x", ["--output=/home/typist/no/x"]),
    ("train note.txt", ["note.txt holds no settings", "model, data, training"]),
    ("train config.yaml --training.overwrite", ["'--training.overwrite' isn't a setting with a value", "=100"]),
    ("train config.yaml --training.steps ten", ["training.steps='ten'", "a whole number from 1"]),
    ("train --training.steps 3 config.yaml --lr 1e-3", ["unknown key lr", "'optimizer.lr'"]),
    ("train --quite config.yaml", ["--quite", "--quiet"]),
    ("train config.yaml other.yaml", ["'other.yaml' isn't a setting with a value"]),
    ("init model note.txt --output=x --training.stpes=3", ["unknown key training.stpes", "'training.steps'"]),
    ("init whole note.txt --output=x --training.seq_len=4k", ["did you mean training.seq_len=4000 or", "=4096?"]),
    ("init whole ids.jsonl --output=x", ["ids.jsonl, row 3: number 2 of input_ids is the token 300"]),
    ("init modle note.txt --output=x", ["no such file or folder here (did you mean 'model'?)"]),
    ("init whole not.txt --output=x", ["no file not.txt (did you mean 'note.txt'?)"]),
    ("eval model note.txt --data.los all", ["unknown key data.los", "'data.loss'"]),
    ("eval model --training.seq_len 16", ["`slipstream eval` doesn't take --training.seq_len=16"]),
    ("train broken.yaml", ["broken.jsonl, line 2", "isn't JSON", "Fix the line"]),
    ("train broken.yaml --data.streaming=true --training.steps=1 --data.tokenizer=tok", ["broken.jsonl, line 2"]),
    ("train broken.yaml --data.dataset=empty.jsonl", ["empty.jsonl is empty", "at least one row"]),
    ("train broken.yaml --data.dataset=list.jsonl", ["list.jsonl, line 1", "isn't a row", '{"text": ...}']),
    ("train broken.yaml --data.dataset=table.tsv", ["table.tsv ends in .tsv", ".jsonl, .csv, .parquet"]),
    ("train broken.yaml --data.dataset=gone.jsonl", ["there is no file gone.jsonl"]),
    ("train broken.yaml --data.dataset=wikitex", ["data.dataset=wikitex", "no such file or folder here"]),
    ("train tokens.yaml", ["data.dataset=ids.jsonl, row 3: number 2 of input_ids is the token 300", "(0 to 299)"]),
    ("train tokens.yaml --data.dataset=labels.jsonl", ["labels.jsonl, row 2: number 3 of labels is the token 999"]),
    ("train tokens.yaml --data.validation=labels.jsonl --data.dataset=few.jsonl", ["labels.jsonl, row 2: number 3"]),
    ("eval whole ids.jsonl --data.form=tokens", ["ids.jsonl, row 3: number 2 of input_ids is the token 300"]),
    ("train tokens.yaml --data.streaming=true --training.steps=1", ["rows 1 to 3, row 3: number 2 of input_ids"]),
    (
        "train config.yaml --data.tokenizer=large",
        ["the tokenizer large has 900 tokens, and the model's vocabulary 300"],
    ),
    ("train tokens.yaml --data.tokenizer=large", ["it is another model's; name the model's own"]),
    ("train tokens.yaml --data.tokenizer=large --model.path=whole", ["leave data.tokenizer out for the model's own"]),
    ("train chat.yaml --data.dataset=assistant.jsonl", ["row 1: the conversation begins with the turn that counts"]),
    ("train chat.yaml --data.dataset=assistant.jsonl --data.loss=completion", ["begin with a turn of the user"]),
    (
        "train chat.yaml --data.dataset=roles.jsonl",
        ["roles are User, Assistant", "User to user, Assistant to assistant"],
    ),
    ("train chat.yaml --data.dataset=gpt.jsonl", ["roles are human, gpt", "rename human to user, gpt to assistant"]),
    (
        "train chat.yaml --data.chat_template=llama-3",
        ["neither a file here nor one of chatml", "did you mean 'llama3'?"],
    ),
    ("train config.yaml --data.chat_template=vicuna", ["data.chat_template=vicuna is neither a file", "chat.jinja"]),
    ("train config.yaml --data.files=[binary.txt]", ["binary.txt is a binary file and no text (byte 3 is 0)"]),
    ("train config.yaml --data.files=[utf16.txt]", ["utf16.txt is text in UTF-16", "iconv -f UTF-16 -t UTF-8"]),
    ("train broken.yaml --data.dataset=binary.txt", ["binary.txt is a binary file", "unpacked where it is compressed"]),
    ("train broken.yaml --data.dataset=packed.jsonl", ["packed.jsonl is a binary file", "unpacked"]),
    ("train config.yaml --data.files=[boks/0.txt]", ["no file or folder boks/0.txt (did you mean 'books/0.txt'?)"]),
    ("train broken.yaml --data.dataset=pars.jsonl", ["no file pars.jsonl (did you mean 'pairs.jsonl'?)"]),
    ("train broken.yaml --data.dataset=boks", ["no such file or folder here (did you mean 'books'?)", "OWNER/boks"]),
    ("train tokens.yaml --data.tokenizer=tko", ["no such file or folder here (did you mean 'tok'?)", "OWNER/tko"]),
    (
        "train tokens.yaml --model.path=./modle",
        ["no model at './modle': there is no such file or folder (did you mean"],
    ),
    ("export a-rnu --output=x", ["there is no folder a-rnu (did you mean 'a-run'?)"]),
    ("eval whole not.txt", ["there is no file not.txt (did you mean 'note.txt'?)"]),
    ("check modle", ["no model at 'modle'", "no such file or folder here (did you mean 'model'?)", "OWNER/modle"]),
    ("timeline 1f1b --output=no/x.png", ["no/x.png", "create it first"]),
    ("plan model h100-dgx --seq-len=32 --global-batch=8 --memory-limit=80", ["80", "bytes", "type 80e9"]),
    ("plan model h100-dgx --seq-len=32 --global-batch=8 --schedule=1f1p", ["'1f1p'", "did you mean '1f1b'"]),
    ("plan model h100-dgx --seq-len=128 --global-batch=8", ["seq_len=128", "at most 64"]),
    ("plan model h100-dgx --seq-len=32 --global-batch=8 --output=no/plan.yaml", ["no/plan.yaml", "create it first"]),
    ("plan model h100-dgx --seqlen=32", ["--seqlen", "--seq-len"]),
    ("check books", ["no model at 'books'", "config.json"]),
    ("eval model nope.txt", ["no tokenizer", "tokenizer.json"]),
    ("eval bare note.txt", ["no tokenizer in 'bare'", "no tokenizer.json", "Copy the files"]),
    ("generate bare hello", ["no tokenizer in 'bare'", "no tokenizer.json", "Copy the files"]),
    ("generate hollow hello", ["no tokenizer in 'hollow'", "special tokens", "Copy the files"]),
    ("generate ./modle hello", ["no folder ./modle", "a run's output folder"]),
    ("export books --output=x", ["no checkpoints in books", "runs/a"]),
    ("timeline 1f1p", ["'1f1p'", "did you mean '1f1b'"]),
    ("timeline 1f1b --output=x.jpg", ["x.jpg", ".png, .svg, .pdf or .json"]),
    ("timeline 1f1b --stages-per-rank=2", ["stages_per_rank=2", "Give stages_per_rank=1"]),
    ("profile model", ["--seq-len=4096"]),
    ("profile model --seq-len=4k", ["--seq-len", "'4k': give a whole number from 1"]),
    ("timeline 1f1b --forward=-1", ["--forward", "'-1': give a number from 0"]),
    ("timeline 1f1b --slices=2.5", ["--slices", "'2.5': give a whole number from 1"]),
    ("profile model --seq-len=0", ["--seq-len", "'0': give a whole number from 1"]),
    ("profile model --seq-len=32 --longest-slice=64", ["longest_slice=64", "Give 1 to 32"]),
    ("profile model --seq-len=32 --budget=0", ["--budget", "'0': give a number of seconds above 0, such as 60"]),
    (
        "plan model h100-dgx --seq-len=32 --global-batch=8 --memory-limit=80GB",
        ["'80GB'", "bytes above 0", "70e9; did you mean 80e9?"],
    ),
    *(
        (f"train {tool}.{'toml' if tool == 'torchtitan' else 'yaml'}", [f"a configuration of {tool} ("])
        for tool in FOREIGN
    ),
    (
        "train open.yaml",
        ["open.yaml isn't valid YAML: line 2, column 9: expected ',' or '}', but got ':', in 'training: {steps: 3}'\n"],
    ),
    (
        "train tabs.yaml",
        ["tabs.yaml isn't valid YAML: line 2, column 1: found character '\\t'", "; indent with spaces"],
    ),
    ("train bare.toml", ["bare.toml isn't valid TOML: Invalid value (at line 2, column 8)"]),
    ("train config.yaml --training.steps=[3", ["training.steps='[3' isn't valid YAML: line 1, column 3: expected"]),
    ("plan open.yaml h100-dgx --seq-len=32 --global-batch=8", ["open.yaml isn't valid YAML: line 2, column 9"]),
    ("train broken.yaml --data.dataset=pairs.jsonl", ["pairs of answers", "give --preference.loss=dpo"]),
    ("train broken.yaml --data.dataset=utf16.jsonl", ["utf16.jsonl, line 1 isn't UTF-8 text; convert the file"]),
    ("train broken.yaml --data.dataset=num.jsonl", ["holds no text, but values such as 5 in the column 'text'"]),
    ("check nameless", ["no model at 'nameless': its config.json is empty"]),
    ("trian config.yaml", ["No such command 'trian'", "'train'"]),
    ("runs nope", ["there is no folder nope"]),
    ("plan model h100 --seq-len=32 --global-batch=8", ["cluster='h100'", "did you mean 'h100-dgx'?"]),
    (
        "plan model h100-dgx --seq-len=32 --global-batch=8 --tokens=15B",
        ["'15B': give a number of tokens", "15e9; did you mean 15e9?"],
    ),
    ("train twice.yaml", ["twice.yaml", "steps is given in line 3 and again in line 4"]),
    ("train broken.yaml --data.dataset=sharegpt.jsonl", ["no chat template", "--data.chat_template=chatml"]),
    ("profile model --seq-len=32 --device=gpu", ["'gpu'", "auto, cpu or cuda"]),
    ("profile model --seq-len=32 --output=no/x.json", ["no/x.json", "make it first"]),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration, text, tables and models."""
    place = tmp_path_factory.mktemp("mistakes")
    (place / "books").mkdir()
    for number in range(4):
        (place / "books" / f"{number}.txt").write_text(f"document {number}: " + "some words to learn from. " * 40)
    (place / "note.txt").write_text("a note")
    (place / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (place / "broken.yaml").write_text(yaml.safe_dump(CONFIG | {"data": {"dataset": "broken.jsonl"}}))
    (place / "broken.jsonl").write_text('{"text": "a row"}\n{"text": "cut\n')
    (place / "twice.yaml").write_text("model: {path: model}\ntraining:\n  steps: 2\n  steps: 3\n")
    (place / "utf16.jsonl").write_text('{"text": "a"}\n', encoding="utf-16")
    (place / "num.jsonl").write_text('{"text": 5}\n{"text": 6}\n')
    (place / "nameless").mkdir()
    (place / "nameless" / "config.json").write_text("{}")
    rows = [{"input_ids": [1, 2, 3, 4]}, {"input_ids": [4, 5, 6, 7], "labels": [4, 5, 999, -100]}]
    (place / "labels.jsonl").write_text("\n".join(json.dumps({"labels": [1, 2, 3, 4]} | row) for row in rows))
    rows = [{"input_ids": [1, 2, 3, 4]}, {"input_ids": [4, 5, 6, 7]}, {"input_ids": [8, 300]}]
    (place / "ids.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (place / "few.jsonl").write_text("\n".join(map(json.dumps, rows[:2])))
    data = {"dataset": "ids.jsonl", "form": "tokens", "tokenizer": "tok"}
    (place / "tokens.yaml").write_text(yaml.safe_dump(CONFIG | {"model": {"path": "model"}, "data": data}))
    for name, roles in {"assistant": ["assistant"], "roles": ["User", "Assistant"], "gpt": ["human", "gpt"]}.items():
        row = {"messages": [{"role": role, "content": "hello"} for role in roles]}
        (place / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    data = {"dataset": "roles.jsonl", "chat_template": "chatml"}
    (place / "chat.yaml").write_text(yaml.safe_dump(CONFIG | {"data": data}))
    (place / "binary.txt").write_bytes(b"\x7fEL\0\1\2" * 20)
    (place / "packed.jsonl").write_bytes(gzip.compress(b'{"text": "a row"}\n' * 9))
    (place / "utf16.txt").write_text("a text", encoding="utf-16")
    (place / "glued.yaml").write_text("model:\n  path:tiny\ndata: {files: [books]}\n")
    (place / "glued-above.yaml").write_text("model:\n  path:tiny\n  init: random\n")
    (place / "glued-inside.yaml").write_text("model: {path:tiny}\n")
    (place / "indent.yaml").write_text("model:\n  path: m\n   init: random\n")
    (place / "outdent.yaml").write_text("model:\n    path: m\n  init: random\n")
    (place / "no-indent.yaml").write_text("model: {path: m}\ndata:\nfiles: [books]\n")
    (place / "inside.yaml").write_text("model:\n  path: m\n  data:\n    files: [books]\n")
    (place / "titan.toml").write_text('[model]\nflavor = "8B"\n[training]\nlocal_batch_size = 8\n')
    (place / "a-run").mkdir()
    (place / "a-run" / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (place / "open.yaml").write_text("model: {path: m\ntraining: {steps: 3}\n")
    (place / "tabs.yaml").write_text("model:\n\tpath: m\n")
    (place / "bare.toml").write_text("[model]\npath = m\n")
    (place / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    for tool, text in FOREIGN.items():
        (place / f"{tool}.{'toml' if tool == 'torchtitan' else 'yaml'}").write_text(text)
    (place / "sharegpt.jsonl").write_text('{"conversations": [{"from": "human", "value": "hello"}]}\n')
    (place / "empty.jsonl").write_text("\n\n")
    (place / "list.jsonl").write_text('["a"]\n["b"]\n')
    (place / "table.tsv").write_text("text\nhello\n")
    train_tokenizer(["a few words"], 300, Progress(None)).save_pretrained(place / "tok")
    words = [f"{number} words {number * 7} more {number * 13}" for number in range(999)]
    train_tokenizer(words, 900, Progress(None)).save_pretrained(place / "large")
    settings = {key: value for key, value in LLAMA.items() if key != "model_type"}
    AutoModelForCausalLM.from_config(LlamaConfig(**settings)).save_pretrained(place / "model")
    shutil.copytree(place / "model", place / "whole")
    shutil.copytree(place / "tok", place / "whole", dirs_exist_ok=True)
    small = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    for folder in ("bare", "hollow"):
        GemmaConfig(**small, num_key_value_heads=1, vocab_size=300).save_pretrained(place / folder)
    AutoTokenizer.from_pretrained(place / "bare").save_pretrained(place / "hollow")  # with nothing but <pad> and such
    return place


@pytest.fixture
def typed(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """Types a command in that folder, in this process; returns what it says on standard error, with exit code 2."""

    def run(*words: str) -> str:
        monkeypatch.chdir(place)
        monkeypatch.setenv("HOME", "/home/typist")
        monkeypatch.setattr("sys.argv", ["slipstream", *words])
        monkeypatch.setattr(
            "slipstream.train.start_training.launch_with_restarts", lambda *_: pytest.fail("ranks were started")
        )
        before = {*place.rglob("*")}
        with pytest.raises(SystemExit) as ending:
            main()
        assert ending.value.code == 2
        assert {*place.rglob("*")} == before
        printed, said = capsys.readouterr()
        assert "so the run plans" not in printed  # a note of a run that begins
        assert "Traceback" not in said
        assert ".." not in said.replace("...", "")
        assert "nput should be" not in said  # pydantic's words
        return said

    return run


# Of these, one of each command, everything is real: the process, its exit code and what it writes. Two are found by the
# command line's parser, two by what it calls.
REALLY_TYPED = [
    "train config.yaml --pipeline.slices=[16,17]",
    "plan model h100-dgx --seqlen=32",
    "profile model --seq-len=4k",
    "timeline 1f1p",
]


def test_there_are_over_two_hundred_mistakes() -> None:
    assert len({*(typed for typed, _ in [*SETTINGS, *COMMANDS])}) >= 200


@pytest.mark.parametrize(
    "words",
    [
        ["train", "config.yaml", "--training.stpes=3"],
        ["train", "nope.yaml"],
        ["init", "model", "note.txt", "--output=x", "--training.stpes=3"],
        ["eval", "model", "note.txt", "--data.los=all"],
    ],
    ids=" ".join,
)
def test_a_misspelt_name_is_answered_before_torch_is_imported(place: Path, words: list[str]) -> None:
    program = (
        "import sys; from slipstream.cli import main\n"
        "try: main()\n"
        "finally: print({'torch', 'transformers', 'numpy', 'numba'} & set(sys.modules))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=place, capture_output=True, text=True, timeout=LIMIT
    )
    assert (answer.returncode, answer.stdout) == (2, "set()\n"), answer.stderr


def test_a_setting_and_its_value_may_be_apart(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    started: list[Config] = []
    monkeypatch.setattr("slipstream.train.start_training.start_training", started.append)
    for words in (
        ["config.yaml", "--training.steps", "7", "--optimizer.lr", "1e-3"],
        ["--training.steps", "7", "config.yaml", "--optimizer.lr=1e-3"],
    ):
        monkeypatch.setattr("sys.argv", ["slipstream", "train", *words])
        with pytest.raises(SystemExit) as ending:
            main()
        assert not ending.value.code
    assert [(each.training.steps, each.optimizer.lr) for each in started] == [(7, 1e-3)] * 2


@pytest.mark.parametrize(("setting", "words"), SETTINGS, ids=[setting for setting, _ in SETTINGS])
def test_a_setting(typed: Typed, setting: str, words: list[str]) -> None:
    said = typed("train", "config.yaml", *([setting] if " --" not in setting else setting.split()))
    assert [word for word in words if word not in said] == [], said


@pytest.mark.parametrize(("command", "words"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_command(typed: Typed, command: str, words: list[str]) -> None:
    said = typed(*command.split())
    assert [word for word in words if word not in said] == [], said


@pytest.mark.more
@pytest.mark.parametrize("command", REALLY_TYPED)
def test_a_command_in_a_process(place: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.chdir(place)
    answer = slipstream_command(*command.split())
    settings = [(f"train config.yaml {setting}", words) for setting, words in SETTINGS]
    words = dict([*settings, *COMMANDS])[command]
    assert answer.returncode == 2
    assert [word for word in words if word not in answer.stderr] == [], answer.stderr
    assert "Traceback" not in answer.stderr
    assert "\x1b" not in answer.stdout + answer.stderr


def test_what_may_not_be_read(tmp_path: Path) -> None:
    (locked := tmp_path / "locked").touch(mode=0o000)

    def command() -> None:
        is_root = os.geteuid() == 0  # who may read anything
        if is_root:
            os.seteuid(65534)
        try:
            locked.read_text()
        finally:
            if is_root:
                os.seteuid(0)

    with pytest.raises(SlipstreamError, match=r"locked: Permission denied; give a path that you may read"):
        with_output_options(command)(quiet=False, log_level=None)
