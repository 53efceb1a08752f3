"""All checks of a run in their order, the cheapest first."""

from __future__ import annotations

from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.model import dropout_rates
from slipstream.train.config import Config
from slipstream.train.folder_lock import FolderLock
from slipstream.train.metrics import check_trackers
from slipstream.train.model_files import ModelFiles
from slipstream.train.preflight.folder_check import check_place, check_run_folder
from slipstream.train.preflight.host_check import check_hosts
from slipstream.train.preflight.memory_check import check_memory
from slipstream.train.preflight.model_checks import check_model
from slipstream.train.preflight.optimizer_check import check_optimizer
from slipstream.train.preflight.placed_context import placed_context
from slipstream.train.preflight.possible_meshes import first_mesh
from slipstream.train.preflight.resumed_run import check_resume, find_saved
from slipstream.train.preflight.run_inputs import RunInputs
from slipstream.train.preflight.smaller_meshes import check_smaller_meshes
from slipstream.train.preflight.text_preparation import add_vocabulary, check_amount, check_sample, prepare_text
from slipstream.train.recorded_plan import fused_advice_of, plan_obstacle
from slipstream.train.reference import check_reference


def preflight(config: Config, progress: Progress) -> RunInputs:
    """Checks the run folder, the model and how it is split, and tokenises the text. Writes nothing.

    Raises:
        SlipstreamError: with the given value, the allowed ones and the setting to type.
    """
    check_trackers(config.tracking.to)
    try:
        check_place(config.training.output)
        FolderLock(config.training.output, progress.warn).check_free()
        check_run_folder(config)
    except OSError as error:
        raise SlipstreamError(
            f"training.output={config.training.output} can't be read: {error.strerror}; name a folder of your own"
        ) from error
    files = ModelFiles(config)
    model_config = files.config
    new_tokens = add_vocabulary(config, files, progress)
    config = placed_context(first_mesh(config, model_config), model_config, progress)
    check_model(config, files, progress)
    check_optimizer(config, model_config)
    check_memory(config, model_config)
    check_hosts(config, model_config)
    check_smaller_meshes(config, model_config)
    text = prepare_text(config, files, progress)
    check_sample(config.sample, text.tokenizer, model_config, progress)
    check_amount(config, text, progress)
    is_finished = check_resume(config, model_config, text.sequences, progress)
    has_reference = config.preference is not None and config.preference.has_reference
    if has_reference and not is_finished and find_saved(config) is not None:
        check_reference(config, {"train": text.train, "validation": text.validation})
    # Nothing is refused any more, so that these notes are read as such.
    if rates := _rates_without_effect(config, model_config):
        progress.say(f"dropout ({rates}) is off under preferences; --preference.dropout=true turns it on")
    if not is_finished and (reason := plan_obstacle(config)):
        progress.say(reason)
    if not is_finished and (advice := fused_advice_of(config)):
        progress.say(advice)
    return RunInputs(config, files, text, is_finished, new_tokens)


def _rates_without_effect(config: Config, model_config: Any) -> str:
    """Returns the rates of dropout that the model and its adapter have and the training hasn't; "" for none."""
    if not config.drops_nothing:
        return ""
    rates = dropout_rates(model_config.get_text_config())
    if config.lora is not None:
        rates |= dropout_rates(config.lora.peft_config(str(config.model.path)))
    return ", ".join(f"{name}={rate}" for name, rate in rates.items())
