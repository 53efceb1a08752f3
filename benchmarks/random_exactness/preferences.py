"""Trainings on preferences at random, against the losses as their papers write them, of the unsplit model."""

from __future__ import annotations

import copy
import importlib
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.random_exactness import cuts
from benchmarks.random_exactness.causal import adapted, changes
from benchmarks.random_exactness.comparison import BOUND, LORA_PREFIX
from benchmarks.random_exactness.cuts import Dice, Place, grouped, happens
from slipstream import Pipeline
from slipstream.model import switch_off_dropout
from slipstream.train.config import PreferenceSection
from slipstream.train.data import TokenisedText, sequences_of
from slipstream.train.preferences import preference_loss, with_lengths, with_reference_point
from slipstream.train.training_step import Evaluator

_SEQ_LEN = 40
_FIRST_WORD = 2  # of the tests' words, after the end of text and padding


class PreferenceCase:
    """A case; `axes` say what was drawn, as the record has it."""

    def __init__(self, seed: str, place: Place) -> None:
        changes()  # makes the tests' support importable
        self.models = importlib.import_module("support.architectures")
        self.reading = importlib.import_module("support.preference_pairs")
        dice, self.place = Dice(f"{seed} preferences"), place
        self.section = _section(dice)
        self.architecture = dice.choice(["gpt2", "llama", "llama, tied", "qwen3", "mistral, window of 7", "gemma2"])
        self.dropout = dice.choice([0.0, 0.1, 0.5])
        self.adapter_seed = dice.randrange(99) if happens(dice, 0.3) else None
        self.rows = self._rows(dice)
        settings: dict[str, Any] = cuts.order(dice, place) | {"num_ranks": place.pp}
        settings |= {"num_microbatches": dice.randint(1, len(self.rows)), "slices": dice.randint(1, 5)}
        settings["memory"] = {
            name: value for name, value in cuts.memory(dice, True).items() if name in ("recompute", "offload")
        }
        self.settings = settings | {"runtime": {"self_check": False, "stall_limit": "off"}}
        self.axes: dict[str, Any] = {"architecture": self.architecture, "ranks": place.pp, **self.settings}
        self.axes |= {
            "preference": self.section.loss,
            "dropout": self.dropout,
            "adapter": self.adapter_seed is not None,
        }
        self.axes |= {"rows": len(self.rows), "prompts": len({row["prompt"] for row in self.rows})}

    def _rows(self, dice: Dice) -> list[dict[str, Any]]:
        """Returns pairs of answers, or rated ones, several to a prompt and in any order."""
        words = self.reading.WORDS[_FIRST_WORD:]

        def text(fewest: int, most: int) -> str:
            return "".join(f" {dice.choice(words)}" for _ in range(dice.randint(fewest, most)))

        are_rated = self.section.is_rated and happens(dice, 0.6)
        rows: list[dict[str, Any]] = []
        for number in range(dice.randint(2, 4)):
            prompt = f"say {words[number]}{text(0, 4)}"
            for _ in range(dice.choice([1, 1, 2, 3])):
                if are_rated:
                    rows.append({"prompt": prompt, "completion": text(1, 9), "label": happens(dice, 0.5)})
                else:
                    rows.append({"prompt": prompt, "chosen": text(1, 9) + " yes", "rejected": text(1, 9) + " no"})
        dice.shuffle(rows)
        return rows

    def compare(self) -> tuple[float, str]:
        """Returns the largest relative error of loss and gradients, and where it is; infinite for a row whose other
        answer is to its own prompt."""
        text, _ = self.reading.read(self.rows, self.section.answers, _SEQ_LEN)
        if self.section.is_rated and (number := _own_answer(text)) is not None:
            return float("inf"), f"row {number + 1} is followed by its prompt with an answer to it"
        model, before = self._model(0), self._model(1).eval()
        text = self._with_reference(text, before) if self.section.has_reference else with_lengths(text, self.section)
        given = copy.deepcopy(model)
        switch_off_dropout(given)
        pipe = Pipeline(given, loss_fn=preference_loss(self.section), **grouped(self.settings))
        batch = sequences_of([text], "none", _SEQ_LEN, None).batch(0, text.num_documents // 2)
        if self.section.is_rated:
            batch = with_reference_point(Evaluator(pipe, None), batch)
        found = float(pipe.step(batch.input_ids, batch.labels, sequence_values=batch.sequence_values))
        expected = self._loss(model.eval(), text)
        expected.backward()
        error = abs(found - expected.item()) / max(1e-3, abs(expected.item()))
        if error > BOUND:
            return error, f"loss: {found} and {expected.item()}"
        wanted = {name.removeprefix(LORA_PREFIX): each for name, each in self.models.gradients(model).items()}
        return self.models.gradient_error(wanted, self.models.gradients(pipe)), "gradients"

    def _model(self, seed: int) -> nn.Module:
        config = self.models.with_dropout(self.architecture, self.dropout)
        model: nn.Module = self.models.build(config, seed).train()
        return model if self.adapter_seed is None else adapted(model, self.adapter_seed, self.dropout)

    def _with_reference(self, text: TokenisedText, before: nn.Module) -> TokenisedText:
        with torch.no_grad():
            values = torch.stack([self._sums(before, text, number)[1] for number in range(text.num_documents)]).numpy()
        if text.ratings is not None:
            values = np.stack([values, np.repeat(np.where(text.ratings, 1.0, -1.0), 2)], axis=1)
        return replace(text, values=values)

    def _sums(self, model: nn.Module, text: TokenisedText, number: int) -> tuple[Tensor, Tensor]:
        """Returns the log-probabilities of a document's prompt and of its answer."""
        tokens = torch.from_numpy(text.document(number).astype(np.int64))
        logs = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        each = logs.gather(-1, tokens[1:, None])[:, 0]
        counts = torch.from_numpy(text.labels_of(number)[1:] != -100)
        return each[~counts].sum(), each[counts].sum()

    def _loss(self, model: nn.Module, text: TokenisedText) -> Tensor:
        """Returns the loss of all rows, as the papers write it."""
        section, losses = self.section, list[Tensor]()
        sums = [self._sums(model, text, number) for number in range(text.num_documents)]
        assert text.values is not None
        if section.is_rated:
            assert text.ratings is not None
            ratios = torch.stack([answer for _, answer in sums]) - torch.from_numpy(text.values[:, 0])
            point = section.beta * ratios[1::2].detach().mean().clamp(min=0)
            for reward, is_wanted in zip(section.beta * ratios[::2], text.ratings, strict=True):
                weight = section.desirable_weight if is_wanted else section.undesirable_weight
                losses.append(weight * (1 - torch.sigmoid(reward - point if is_wanted else point - reward)))
            return torch.stack(losses).mean()
        for chosen in range(0, text.num_documents, 2):
            (prompt, wanted), (_, other) = sums[chosen], sums[chosen + 1]
            lengths = [int((text.labels_of(each)[1:] != -100).sum()) for each in (chosen, chosen + 1)]
            if section.loss == "dpo":
                margin = section.beta * (wanted - text.values[chosen] - other + text.values[chosen + 1])
            elif section.loss == "simpo":
                margin = section.beta * (wanted / lengths[0] - other / lengths[1]) - section.gamma
            else:
                odds = [torch.exp(each / length) for each, length in zip((wanted, other), lengths, strict=True)]
                margin = torch.log(odds[0] / (1 - odds[0])) - torch.log(odds[1] / (1 - odds[1]))
                nats = -(prompt + wanted) / (len(text.document(chosen)) - 1)
                losses.append(nats - section.beta * torch.log(torch.sigmoid(margin)))
                continue
            smoothing, sure = section.label_smoothing, torch.sigmoid(margin)
            losses.append(-(1 - smoothing) * torch.log(sure) - smoothing * torch.log(1 - sure))
        return torch.stack(losses).mean()


def _section(dice: Dice) -> PreferenceSection:
    loss: Any = dice.choice(["dpo", "kto", "kto", "simpo", "orpo"])
    more: dict[str, Any] = {"beta": dice.choice([0.1, 0.4, 2.0])}
    if loss in ("dpo", "simpo"):
        more["label_smoothing"] = dice.choice([0.0, 0.2])
    if loss == "simpo":
        more["gamma"] = dice.choice([0.0, 0.5])
    if loss == "kto":
        more |= {"desirable_weight": dice.choice([1.0, 1.5]), "undesirable_weight": dice.choice([1.0, 0.6])}
    return PreferenceSection(loss=loss, **more)


def _own_answer(text: TokenisedText) -> int | None:
    """Returns the first row whose prompt is followed by an answer to it in the place of another prompt's."""
    answers: dict[bytes, set[bytes]] = {}
    halves = [_halves(text, number) for number in range(text.num_documents)]
    for prompt, answer in halves[::2]:
        answers.setdefault(prompt, set()).add(answer)
    for number, (prompt, answer) in enumerate(halves[1::2]):
        elsewhere = {each for asked, given in answers.items() if asked != prompt for each in given}
        if answer not in elsewhere:
            return number
    return None


def _halves(text: TokenisedText, number: int) -> tuple[bytes, bytes]:
    tokens, begin = text.document(number), int(np.argmax(text.labels_of(number) != -100))
    return tokens[:begin].tobytes(), tokens[begin:].tobytes()
