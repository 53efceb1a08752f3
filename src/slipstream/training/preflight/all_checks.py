"""All checks of a run in their order, the cheapest first."""

from __future__ import annotations

from slipstream.launch import Progress
from slipstream.training.config import Config
from slipstream.training.metrics import check_trackers
from slipstream.training.preflight.model_checks import check_model, load_model_config
from slipstream.training.preflight.run_inputs import RunInputs, check_run_folder
from slipstream.training.preflight.text_preparation import check_vocabulary, prepare_text, split_text


def preflight(config: Config, progress: Progress) -> RunInputs:
    """Checks the run folder, the model and how it is split, and tokenises the text. Writes nothing.

    Raises:
        SlipstreamError: with what was given, what is allowed and what to type.
    """
    check_trackers(config.tracking.to)
    check_run_folder(config)
    model_config = load_model_config(config.model)
    check_model(config, model_config, progress)
    tokenizer, text = prepare_text(config, model_config, progress)
    check_vocabulary(int(text.tokens.max()), model_config)
    train, validation = split_text(config, text)
    return RunInputs(config, model_config, tokenizer, train, validation)
