"""The results of a run: the last step's timeline, the exported model, and text that the model writes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import GENERATION_CONFIG_NAME

from slipstream.checkpoint import describe_non_finite, is_finite
from slipstream.errors import NonFiniteError
from slipstream.keyed_draws import keyed_seed
from slipstream.model import read_generation, write_generation
from slipstream.pipeline import Pipeline
from slipstream.timeline import Timeline, draw_timelines, save_trace
from slipstream.train.data import load_tokenizer
from slipstream.train.export import OpenedModel, TextWriter
from slipstream.train.metrics import SampleRecord
from slipstream.train.run_context import RunContext
from slipstream.train.run_folder import RunFolder
from slipstream.train.training_step import autocast
from slipstream.units import bytes_text
from slipstream.watchdog import watchdog_paused


def draw_last_step(run: RunContext, pipe: Pipeline, timeline: Timeline | None) -> None:
    """Writes the measured timeline of all ranks as text, picture and trace; nothing where the run took no step."""
    folder = run.folder
    if pipe.leads and timeline is not None:
        folder.listed.add(folder.timeline, folder.perfetto, folder.schedule)
        with folder.replaced(folder.timeline) as part:
            draw_timelines(part, timeline)
        with folder.replaced(folder.perfetto) as part:
            save_trace(part, timeline)
        with folder.replaced(folder.schedule) as part:
            part.write_text(f"{pipe.last_step.layout.training}\n", encoding="utf-8")
        run.progress.say(f"\nthe last step, measured ({folder.timeline}):\n{timeline.to_text()}")


def export_model(run: RunContext, pipe: Pipeline, folder: Path) -> None:
    """Exports to `folder`, and of an adapter to the folder next to it as configured. Collective. Raises as `export`."""
    for place, merged in run.config.exports(folder).items():
        with watchdog_paused("exporting", uses_disk=True):
            export(run, pipe, place, merged)
        run.progress.say_result(f"exported to {place}")


def has_room(run: RunContext, folder: Path, needed: int) -> bool:
    """Returns whether rank 0's disk has as many bytes left; says that `folder` is left out where not. Collective."""
    # The folder may have been removed.
    path = run.folder.path
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    free = int(run.world.gather(shutil.disk_usage(there).free)[0])
    if free < needed:
        need = bytes_text(needed)
        have = bytes_text(free)
        run.progress.warn(f"{folder.name} is left out: checkpoints and it may need {need}, and the disk has {have}")
    return free >= needed


def export(run: RunContext, pipe: Pipeline, folder: Path, merged: bool = True) -> None:
    """Writes the whole model and its tokenizer to `folder` inside of the run's, as
    `AutoModelForCausalLM.from_pretrained` loads them; of an adapter, unless `merged`, that alone. Collective.

    The folder gets its name when all of it is there. An older one of that name, from before the run was
    resumed, is then removed.

    Raises:
        NonFiniteError: on all ranks, where a weight isn't finite.
        OSError: on all ranks, where it can't be written; the former one stays.
    """
    poisoned = next((shard.name for shard in pipe.parameter_shards() if not is_finite(shard.parameter.detach())), None)
    if name := next(filter(None, run.world.gather(poisoned)), None):
        raise NonFiniteError(f"the model is not exported: {describe_non_finite(name)}")
    part, before = (run.folder.work / f"{folder.name}{end}" for end in (".part", ".before.part"))
    try:
        run.world.run_on_leader(lambda: _clear(run.folder, part, before))
        pipe.save_pretrained(part, merged)
        trusts_code = run.config.model.trust_remote_code
        run.world.run_on_leader(lambda: _complete(run.folder, part, before, folder, trusts_code))
    except OSError:
        if pipe.leads:
            _clear(run.folder, part)
        raise


def _clear(run: RunFolder, *folders: Path) -> None:
    """Removes a failed export's files."""
    for folder in folders:
        run.own.remove(folder, ignore_errors=True)


def _complete(run: RunFolder, part: Path, before: Path, folder: Path, trusts_code: bool) -> None:
    """Adds the tokenizer, and gives the folder its name; the former one is `before` until then."""
    # Otherwise somebody has removed the folder while the run was at work.
    if run.inputs.exists():
        load_tokenizer(str(run.inputs), trusts_code).save_pretrained(part)
        generation = read_generation(run.inputs)
        # An adapter alone has no such file.
        if generation is not None and (part / GENERATION_CONFIG_NAME).exists():
            write_generation(part, generation)
    for file in filter(Path.is_file, part.rglob("*")):
        with file.open("rb") as written:
            os.fsync(written.fileno())
    run.listed.add_folder(folder)
    if os.path.lexists(folder):
        run.own.move(folder, before)
    run.own.move(part, folder)
    _clear(run, before)
    run.listed.itemise(folder)


def sample_in_training(run: RunContext, pipe: Pipeline, step: int) -> SampleRecord:
    """Returns how the model as it is now continues the prompt. Collective.

    Each token is drawn from the logits of a forward of all before it; `training.seed` and the step decide the draws.
    """
    sample = run.config.sample
    tokenizer = load_tokenizer(str(run.folder.inputs), run.config.model.trust_remote_code)
    prompt_tokens: list[int] = tokenizer(sample.prompt, verbose=False)["input_ids"]
    tokens = list(prompt_tokens)
    generator = torch.Generator().manual_seed(keyed_seed(run.config.training.seed, step))
    # Each microbatch needs a sequence.
    copies = max(1, run.config.pipeline.num_microbatches)
    while len(tokens) - len(prompt_tokens) < sample.max_new_tokens:
        with autocast(run.config, run.device):
            logits = pipe.logits([torch.tensor(tokens)] * copies)
        chosen = None if logits is None else _draw(logits[0][-1].double().cpu(), sample.temperature, generator)
        tokens.append(next(token for token in run.world.gather(chosen) if token is not None))
        if tokens[-1] == tokenizer.eos_token_id:
            break
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    run.progress.say(f"step {step}: the model continues {sample.prompt!r}:\n{text}")
    return SampleRecord(step, text)


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if not temperature:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))


def write_sample(run: RunContext, pipe: Pipeline) -> None:
    """Lets rank 0 load the export and continue the prompt, if there is one."""
    sample = run.config.sample
    model = run.folder.model
    trusts_code = run.config.model.trust_remote_code
    if pipe.leads and sample.prompt is not None and (model / "tokenizer_config.json").exists():
        opened = OpenedModel(str(model), load_tokenizer(str(model), trusts_code), trusts_code)
        text = TextWriter.load(opened).write(
            sample.prompt, sample.max_new_tokens, sample.temperature, run.config.training.seed
        )
        run.progress.say_result(f"\nthe exported model continues {sample.prompt!r}:\n{text}\n")
