"""The verl tool in verl's own agent loop: real tool parser, real tokens, real chat template; the model is a script."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.tools.tool_registry import initialize_tools_from_config
from verl.trainer.ppo.reward import load_reward_manager
from verl.workers.rollout.replica import TokenOutput

from sandbox import ConfigError, Unavailable
from sandbox.integrations import clients
from sandbox.integrations.verl import CALLS, FAULT, Unscored
from sandbox.tools import schemas

TEMPLATE = """
{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Each byte is a token, and so are the marks of turns."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    made.chat_template = TEMPLATE
    return made


TOKENIZER = make_tokenizer()


class Script:
    """A model that says what it is told to, turn by turn, in place of an inference server."""

    def __init__(self, *turns: str) -> None:
        self.turns = list(turns)
        self.seen: list[str] = []  # what it was shown last in each turn

    async def generate(self, *, prompt_ids: list[int], **_: object) -> TokenOutput:
        self.seen.append(TOKENIZER.decode(prompt_ids))
        ids = TOKENIZER.encode(self.turns.pop(0) + "<|im_end|>", add_special_tokens=False)
        return TokenOutput(token_ids=ids, log_probs=[0.0] * len(ids))


def asked(code: object, name: str = "python", **more: object) -> str:
    """A turn with a tool call, as Hermes models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'code': code, **more}})}\n</tool_call>"


def make_tools(folder: Path, **config: Any) -> list[Any]:
    """The tool from a YAML file, as verl loads it."""
    path = folder / "tools.yaml"
    tool = {"class_name": "sandbox.integrations.verl.SandboxTool", "config": {"type": "native", **config}}
    path.write_text(yaml.safe_dump({"tools": [tool]}))
    return initialize_tools_from_config(str(path))


async def roll_out(tools: list[Any], model: Script, **multi_turn: Any) -> AgentLoopOutput:
    """One rollout by verl's loop."""
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {
                "rollout": {
                    "prompt_length": 4096,
                    "response_length": 65536,
                    "full_determinism": False,
                    "multi_turn": {
                        "max_user_turns": None,
                        "max_assistant_turns": None,
                        "max_parallel_calls": 1,
                        "max_tool_response_length": 32768,
                        "tool_response_truncate_side": "middle",
                        "format": "hermes",
                        **multi_turn,
                    },
                }
            }
        }
    )
    loop = ToolAgentLoop(
        trainer_config=DictConfigWrap(config),
        server_manager=model,
        tokenizer=TOKENIZER,
        processor=None,
        dataset_cls=object,
        data_config=DictConfigWrap(OmegaConf.create({})),
        tools=ToolListWrap(tools),
    )
    return await loop.run({}, raw_prompt=[{"role": "user", "content": "What is 6 * 7?"}])


async def test_a_rollout_sees_what_its_program_printed(url: str, tmp_path: Path) -> None:
    """The answer is a tool's message of which no token is trained on, and its status is in the extra fields."""
    model = Script(asked("print(6 * 7)"), "It is 42.")
    output = await roll_out(make_tools(tmp_path, client={"url": url}), model)
    assert "<|im_start|>tool\nTool call success\nstdout: 42\nexecution time: " in model.seen[1]
    [call] = output.extra_fields[CALLS]
    assert (call["tool"], call["status"]) == ("python", "ok")
    pairs = zip(output.response_ids, output.response_mask, strict=True)
    trained = TOKENIZER.decode([token for token, mask in pairs if mask])
    assert "stdout" not in trained
    assert "It is 42." in trained


async def test_the_model_is_told_of_the_tool_in_its_prompt(url: str, tmp_path: Path) -> None:
    """What verl puts into the chat template is what `sandbox.tools` says of the tool."""
    model = Script("42")
    await roll_out(make_tools(tmp_path, tool="python_code_with_standard_io", client={"url": url}), model)
    [told] = json.loads(model.seen[0].split("system\n")[1].split("<|im_end|>")[0])
    [schema] = schemas("python_code_with_standard_io")
    assert told["function"]["name"] == "python_code_with_standard_io"
    assert told["function"]["parameters"]["properties"] == schema["function"]["parameters"]["properties"]


async def test_mistakes_of_the_model_are_told_and_recorded(url: str, tmp_path: Path) -> None:
    """A failing program, arguments that are none and a limit each have their own status."""
    turns = asked("1 / 0"), asked(7), asked("x = 1", speed=9), asked("while True: pass")
    model = Script(*turns, "I give up.")
    tools = make_tools(tmp_path, client={"url": url}, limits={"wall_s": 0.5, "cpu_s": 0.5})
    output = await roll_out(tools, model)
    assert [call["status"] for call in output.extra_fields[CALLS]] == [
        "error",
        "bad_call",
        "bad_call",
        "timeout",
    ]
    assert FAULT not in output.extra_fields
    told = [seen.rpartition("<|im_start|>tool\n")[2] for seen in model.seen[1:]]
    assert "ZeroDivisionError" in told[0]
    assert "must be a text" in told[1]
    assert "has no argument 'speed'" in told[2]
    assert "timeout" in told[3]


async def test_a_notebook_belongs_to_its_rollout(url: str, tmp_path: Path) -> None:
    """What a cell defined is there in the next cell of the same rollout, and in no other; a cell that hung is not."""
    tools = make_tools(tmp_path, tool="jupyter_code", client={"url": url}, limits={"wall_s": 2, "cpu_s": 1})
    cells = "x = {}", "while True: pass", "1 / 0", "x * 2"
    models = [Script(*(asked(cell.format(n), "jupyter_code") for cell in cells), "Done.") for n in range(3)]
    outputs = await asyncio.gather(*(roll_out(tools, model) for model in models))
    for n, (model, output) in enumerate(zip(models, outputs, strict=True)):
        assert [call["status"] for call in output.extra_fields[CALLS]] == ["ok", "timeout", "error", "ok"]
        assert f"Tool call success\nstdout: {2 * n}\n" in model.seen[-1]


async def test_many_rollouts_share_one_client(url: str, tmp_path: Path) -> None:
    """A hundred rollouts at once are each answered with their own output, over one client."""
    tools = make_tools(tmp_path, client={"url": url})
    models = [Script(asked(f"print({n})"), "Done.") for n in range(100)]
    await asyncio.gather(*(roll_out(tools, model) for model in models))
    assert all(f"stdout: {n}\n" in model.seen[1] for n, model in enumerate(models))
    assert len(clients._of_loops) == 1


async def test_a_rollout_that_met_a_fault_is_marked(nobody: str, tmp_path: Path) -> None:
    """It comes to its end without asking again, and its model is told of no failure."""
    tools = make_tools(tmp_path, client={"url": nobody, "patience_s": 0.01})
    model = Script(asked("1"), asked("2"), "Done.")
    output = await roll_out(tools, model)
    assert output.extra_fields[FAULT].startswith("Unavailable: ")
    assert CALLS not in output.extra_fields
    assert model.seen[-1].count("<|im_start|>tool\nThe tool is not available.<|im_end|>") == 2


def make_reward_manager(**client: Any) -> RewardManagerBase:
    """The reward function as verl loads it from the trainer's settings."""
    function = {"path": "pkg://sandbox.integrations.verl", "name": "compute_score", "reward_kwargs": client}
    manager = {"source": "register", "name": "naive"}
    config = OmegaConf.create({"reward": {"custom_reward_function": function, "reward_manager": manager}})
    return load_reward_manager(config, TOKENIZER)


async def score(manager: RewardManagerBase, reply: str, gold: str, **extra_fields: Any) -> dict[str, Any]:
    """What verl's reward manager makes of a rollout."""
    ids = torch.tensor([TOKENIZER.encode(reply, add_special_tokens=False)])
    others = {
        "data_source": "math",
        "reward_model": {"ground_truth": gold},
        "extra_info": {},
        "tool_extra_fields": extra_fields,
    }
    data = DataProto.from_dict(
        tensors={"responses": ids, "attention_mask": torch.ones_like(ids)},
        non_tensors={name: np.array([value], dtype=object) for name, value in others.items()},
    )
    return await manager.run_single(data)


async def test_answers_are_graded(url: str) -> None:
    """A right one is 1 and a wrong one 0, with what the rollout's calls were."""
    manager = make_reward_manager(url=url)
    calls = [{"status": status} for status in ("ok", "error", "timeout", "bad_call")]
    right = await score(manager, r"So it is \boxed{\frac{1}{2}}.", "0.5", **{CALLS: calls})
    assert right["reward_score"] == 1.0
    assert right["reward_extra_info"] == {"score": 1.0, "acc": 1.0, "tool_calls": 4, "tool_calls_failed": 3}
    wrong = await score(manager, r"So it is \boxed{3}.", "4")
    assert (wrong["reward_score"], wrong["reward_extra_info"]["tool_calls"]) == (0.0, 0)


async def test_what_was_lost_or_cannot_be_graded_has_no_score(url: str, nobody: str) -> None:
    """The reward function raises, so that verl drops the rollout.

    That is where a tool met a fault, where the reference cannot be read, and where no service is.
    """
    manager = make_reward_manager(url=url)
    with pytest.raises(Unscored, match="Unavailable: away"):
        await score(manager, r"\boxed{4}", "4", **{FAULT: "Unavailable: away"})
    with pytest.raises(Unscored, match="gold_unparsable"):
        await score(manager, r"\boxed{4}", r"\frac{")
    with pytest.raises(Unavailable):
        await score(make_reward_manager(url=nobody, patience_s=0.01), r"\boxed{x + 1}", "1 + x")


def test_the_yaml_of_the_page_is_right(tmp_path: Path) -> None:
    """It loads, and it lifts verl's bound of 256 characters above all that the tool shows."""
    text = Path("sandbox/integrations/verl.md").read_text(encoding="utf-8")
    tools, settings = (block.split("```")[0] for block in text.split("```yaml\n")[1:])
    path = tmp_path / "tools.yaml"
    path.write_text(tools)
    [tool] = initialize_tools_from_config(str(path))
    bound = yaml.safe_load(settings)["actor_rollout_ref"]["rollout"]["multi_turn"]["max_tool_response_length"]
    assert bound > 2 * tool._config.shown_bytes + 1000


@pytest.mark.parametrize("config", [{"tool": "shell"}, {"limit": {"wall_s": 1}}, {"client": {"url": 1}}])
def test_a_wrong_config_stops_the_start(tmp_path: Path, config: dict[str, Any]) -> None:
    """A misspelt key is no default."""
    with pytest.raises(ConfigError, match="config of SandboxTool"):
        make_tools(tmp_path, **config)
