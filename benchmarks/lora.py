"""LoRA on two ranks against full training on two ranks, and against PEFT and full training in one process.

    python -m benchmarks.lora                       # prints a table, writes results/lora.json

A step is forward, backward and AdamW's update of one sequence. The contenders take turns in processes of their own;
memory is the most that a process had in the steps, above what it had before it built its model.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.harness import interleaved, medians, restart_in_environment, setting, write
from benchmarks.isolated import Contender, build_all
from slipstream import Pipeline, Runtime

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Task:
    """A model, a sequence, and what of the model is trained."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    length: int
    slices: int
    lora: bool
    upper: bool = False  # adapters in the upper half of the layers alone
    seed: int = 0

    def model(self) -> nn.Module:
        """Returns the model with random weights, and its adapter."""
        torch.manual_seed(self.seed)
        sizes = {"hidden_size": self.hidden_size, "intermediate_size": 3 * self.hidden_size}
        config = LlamaConfig(
            **sizes,
            num_hidden_layers=self.num_layers,
            num_attention_heads=8,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.length,
        )
        model: nn.Module = AutoModelForCausalLM.from_config(config)
        if not self.lora:
            return model
        import peft

        layers = list(range(self.num_layers // 2, self.num_layers)) if self.upper else None
        adapter = peft.LoraConfig(r=8, target_modules=TARGETS, layers_to_transform=layers, task_type="CAUSAL_LM")
        return peft.get_peft_model(model, adapter)

    def tokens(self) -> torch.Tensor:
        """Returns one sequence."""
        return torch.randint(self.vocab_size, (1, self.length), generator=torch.Generator().manual_seed(1))


class Piped:
    """A pipeline over all processes of the group."""

    def __init__(self, task: Task) -> None:
        self._before = _status("VmRSS")
        runtime = Runtime(self_check=False)
        self._pipe = Pipeline(task.model(), "zb-h1", slices=task.slices, seq_len=task.length, runtime=runtime)
        self._tokens = task.tokens()
        self._optimizer = torch.optim.AdamW(self._pipe.parameters())
        _restart_peak()

    def parameters(self) -> Iterable[nn.Parameter]:
        return self._pipe.parameters()

    def step(self) -> float:
        loss = float(self._pipe.step(self._tokens, self._tokens))
        self._optimizer.step()
        return loss

    def report(self) -> list[int]:
        """Returns the bytes of every rank."""
        return _gathered(_status("VmHWM") - self._before)


class Alone:
    """The whole model in one process."""

    def __init__(self, task: Task) -> None:
        self._before = _status("VmRSS")
        self._model, self._tokens = task.model(), task.tokens()
        self._optimizer = torch.optim.AdamW([each for each in self._model.parameters() if each.requires_grad])
        _restart_peak()

    def parameters(self) -> Iterable[nn.Parameter]:
        return self._model.parameters()

    def step(self) -> float:
        loss = self._model(input_ids=self._tokens, labels=self._tokens, use_cache=False).loss
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())

    def report(self) -> list[int]:
        """Returns the bytes of the process."""
        return [_status("VmHWM") - self._before]


def _status(name: str) -> int:
    """Returns one of Linux's figures about this process's memory, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def _restart_peak() -> None:
    """Lets VmHWM begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def _gathered(number: int) -> list[int]:
    found: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(found, number)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--slices", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    restart_in_environment()
    sizes = options.hidden_size, options.layers, 8192, options.length, options.slices
    full, lora, upper = Task(*sizes, lora=False), Task(*sizes, lora=True), Task(*sizes, lora=True, upper=True)
    contenders = [
        Contender("LoRA, two ranks", Piped, lora),
        Contender("LoRA of the upper half, two ranks", Piped, upper),
        Contender("full training, two ranks", Piped, full),
        Contender("PEFT, one process", Alone, lora, num_processes=1),
        Contender("full training, one process", Alone, full, num_processes=1),
    ]
    build_all(contenders)
    seconds = interleaved({each.name: each.run for each in contenders}, options.repeats, warmups=1)
    memory = {each.name: each.report() for each in contenders}
    losses = {each.name: each.losses for each in contenders}
    for each in contenders:
        each.close()
    for name, median in medians(seconds).items():
        print(f"{name:36} {median:7.2f} s   {max(memory[name]) / 2**20:7.0f} MiB a process at most")
    report = {"setting": setting(**vars(options)), "seconds": seconds, "bytes": memory, "last_losses": losses}
    print(write("lora", report))


if __name__ == "__main__":
    main()
