"""A real GRPOTrainer of TRL on one thread: a tokenizer of bytes and a model of a few thousand numbers, from no hub.

Such a model says nothing, so its turns are laid into its mouth; everything else is TRL's own way: the schemas in the
prompt, the tool calls read from the text, the tools, the rewards, the loss and the step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_WORDS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and Qwen's own words, in whose chat template tools have a place."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, *_SPECIAL, *_WORDS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in _WORDS])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    templates = Path(trl.__file__).parent / "chat_templates"
    made.chat_template = (templates / "qwen3.jinja").read_text()
    return made


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """One layer, 16 wide."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 16, "max_position_embeddings": 8192}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads))


def tool_call(name: str, **arguments: object) -> str:
    """A turn that asks for a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Trainer(trl.GRPOTrainer):
    """TRL's, with turns that are given: in each rollout they are said one after the other."""

    turns: Sequence[str]

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], *_: Any, **__: Any
    ) -> tuple[list[list[int]], None]:
        said = [self._turn(self.processing_class.decode(ids)) for ids in prompt_ids]
        return [self.processing_class(f"{turn}<|im_end|>")["input_ids"] for turn in said], None

    def _turn(self, text: str) -> str:
        return self.turns[text.count("</tool_response>")]


def train(
    turns: Sequence[str],
    folder: Path,
    rewards: Sequence[Callable[..., Any]],
    **options: Any,
) -> Trainer:
    """One step on two rollouts of one prompt; the trainer, with what it has logged."""
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    arguments = trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        num_generations=2,
        max_steps=1,
        max_completion_length=2048,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    row = {"prompt": [{"role": "user", "content": "What is 6 * 7?"}], "answer": "42"}
    trainer = Trainer(
        model=make_model(tokenizer),
        processing_class=tokenizer,
        reward_funcs=list(rewards),
        args=arguments,
        train_dataset=Dataset.from_list([row] * 2),
        **options,
    )
    trainer.turns = turns
    trainer.train()
    return trainer
