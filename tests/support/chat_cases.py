"""Small chat templates shaped like those of thirteen published families, with hand-marked tokens that count.

In a template ¶ is a line break, and « » enclose what a tagged version has in {% generation %}. In an expected text ⟦ ⟧
enclose the tokens that the model writes, as a person would mark them. A chat has one expected text, or several if the
template renders earlier turns differently.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megatron_mtp.data.chat import Chat

TAGS = {"«": "{% generation %}", "»": "{% endgeneration %}"}


@dataclass(frozen=True)
class Shape:
    """A template, its special tokens, and those of them that end a text according to generation_config.json."""

    special: str
    ends: str
    template: str

    def tokenizer(self, folder: Path, tagged: bool) -> PreTrainedTokenizerBase:
        """Create a tokenizer whose tokens are bytes, two line breaks, and the special tokens."""
        characters = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = Tokenizer(models.BPE({one: id for id, one in enumerate([*characters, "ĊĊ"])}, [("Ċ", "Ċ")]))
        words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        words.decoder = decoders.ByteLevel()
        made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=self.ends.split()[0])
        made.add_special_tokens({"additional_special_tokens": self.special.split()})
        template = self.template.replace("¶", "{{ '\\n' }}")
        for mark, tag in TAGS.items():
            template = template.replace(mark, tag if tagged else "")
        made.chat_template = template
        made.save_pretrained(folder)
        ids = [made.convert_tokens_to_ids(token) for token in self.ends.split()]
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": {ids}}}')
        return PreTrainedTokenizerFast.from_pretrained(folder)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, thought: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | ({} if thought is None else {"reasoning_content": thought})


def call(thought: str | None = None) -> dict[str, Any]:
    function = {"name": "add", "arguments": '{"a": 2}'}
    return said("", thought) | {"tool_calls": [{"type": "function", "function": function}]}


SYSTEM = {"role": "system", "content": "S"}
ONE, TWO = Chat([user("q"), said("a")]), Chat([user("q"), said("a"), user("r"), said("b")])
WITH_SYSTEM = Chat([SYSTEM, *TWO.messages])
THOUGHT = Chat([user("q"), said("a", "t"), user("r"), said("b", "u")])
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
]
CALL = Chat([user("q"), call(), {"role": "tool", "content": "4"}, said("b")], TOOLS)
THOUGHT_CALL = Chat([user("q"), call("t"), {"role": "tool", "content": "4"}, said("b", "u")], TOOLS)

LAST = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
"""Template code for the index of the user's last message."""
NO_THINKING = "{% if enable_thinking is defined and not enable_thinking %}"

SHAPES = {
    "Llama-3": Shape(
        "<|begin|> <|head|> <|body|> <|eot|>",
        "<|eot|>",
        "<|begin|>{% if tools %}<|head|>system<|body|>¶¶{{ tools[0].function.name }}<|eot|>{% endif %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}<|head|>assistant<|body|>¶¶«{% if m.tool_calls %}"
        "{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|eot|>»"
        "{% else %}<|head|>{{ 'ipython' if m.role == 'tool' else m.role }}<|body|>¶¶{{ m.content | trim }}<|eot|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|body|>¶¶{% endif %}",
    ),
    "Qwen2.5": Shape(
        "<|im_start|> <|im_end|>",
        "<|im_end|>",
        "{% if messages[0].role != 'system' %}<|im_start|>system¶H"
        "{% if tools %}¶{{ tools[0].function.name }}{% endif %}<|im_end|>¶{% endif %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}<|im_start|>assistant¶"
        "«{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>¶{{ c.function | tojson }}¶</tool_call>"
        "{% endfor %}<|im_end|>»¶{% elif m.role == 'tool' %}"
        "<|im_start|>user¶<tool_response>{{ m.content }}</tool_response>"
        "<|im_end|>¶{% else %}<|im_start|>{{ m.role }}¶{{ m.content }}<|im_end|>¶{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant¶{% endif %}",
    ),
    "Qwen3": Shape(
        "<|im_start|> <|im_end|> <think> </think>",
        "<|im_end|>",
        LAST + "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant¶«"
        "{% if loop.index0 > ns.last %}<think>¶{{ m.reasoning_content or '' }}¶</think>¶¶{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>»¶"
        "{% else %}<|im_start|>{{ m.role }}¶{{ m.content }}<|im_end|>¶{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant¶"
        + NO_THINKING
        + "<think>¶¶</think>¶¶{% endif %}{% endif %}",
    ),
    "GLM-4.5": Shape(
        "[gMASK] <sop> <|user|> <|system|> <|assistant|> <|observation|> <|endoftext|> <think> </think>",
        "<|endoftext|> <|user|> <|observation|>",
        LAST + "[gMASK]<sop>{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>«¶"
        "{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>"
        "{% else %}<think></think>{% endif %}{% if m.content %}¶{{ m.content }}{% endif %}"
        "{% for c in m.tool_calls or [] %}¶<tool_call>{{ c.function.name }}</tool_call>{% endfor %}»"
        "{% elif m.role == 'tool' %}<|observation|>¶{{ m.content }}{% else %}<|{{ m.role }}|>¶{{ m.content }}"
        + NO_THINKING
        + "/nothink{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
        + NO_THINKING
        + "¶<think></think>{% endif %}{% endif %}",
    ),
    "DeepSeek-V3.1": Shape(
        "<|begin|> <|end|> <|User|> <|Assistant|> <|call|> <|/call|> <|out|> <think> </think>",
        "<|end|>",
        "<|begin|>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
        "<|User|>{{ m.content }}{% elif m.role == 'tool' %}<|out|>{{ m.content }}{% else %}"
        "{% if messages[loop.index0 - 1].role == 'user' %}<|Assistant|></think>{% endif %}«{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<|call|>{{ c.function.name + ' ' + c.function.arguments }}<|/call|>"
        "{% endfor %}<|end|>»{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role == 'user' %}<|Assistant|>"
        "{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}",
    ),
    "Nemotron": Shape(
        "<|im_start|> <|im_end|> <think> </think>",
        "<|im_end|>",
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant¶«"
        "{% if m.reasoning_content %}<think>¶"
        "{{ m.reasoning_content }}¶</think>¶{% else %}<think></think>{% endif %}{{ m.content }}<|im_end|>»¶"
        "{% else %}<|im_start|>{{ m.role }}¶{{ m.content }}<|im_end|>¶{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant¶"
        + NO_THINKING
        + "<think></think>{% else %}<think>¶{% endif %}"
        "{% endif %}",
    ),
    "Gemma": Shape(
        "<bos> <eos> <turn> </turn>",
        "<eos> </turn>",
        "<bos>{% set first = messages[0].content if messages[0].role == 'system' else '' %}"
        "{% for m in (messages[1:] if first else messages) %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('turns must alternate') }}{% endif %}{% if m.role == 'assistant' %}<turn>model¶"
        "«{{ m.content | trim }}</turn>»¶{% else %}<turn>user¶{% if first and loop.first %}{{ first }}¶¶{% endif %}"
        "{{ m.content | trim }}</turn>¶{% endif %}{% endfor %}{% if add_generation_prompt %}<turn>model¶{% endif %}",
    ),
    "Mistral": Shape(
        "<s> </s> [INST] [/INST]",
        "</s>",
        "<s>{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
        "{% for m in messages %}{% if m.role == 'user' %}[INST] "
        "{% if m == asked[-1] and messages[0].role == 'system' %}"
        "{{ messages[0].content }}¶¶{% endif %}{{ m.content }}[/INST]"
        "{% elif m.role == 'assistant' %}« {{ m.content }}</s>»"
        "{% endif %}{% endfor %}",
    ),
    "Phi": Shape(
        "<|system|> <|user|> <|assistant|> <|end|> <|endoftext|>",
        "<|endoftext|> <|end|>",
        "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>¶«{{ m.content }}<|end|>¶»{% else %}"
        "<|{{ m.role }}|>¶{{ m.content }}<|end|>¶{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>¶{% else %}<|endoftext|>{% endif %}",
    ),
    "gpt-oss": Shape(
        "<|start|> <|channel|> <|message|> <|end|> <|return|> <|call|>",
        "<|return|> <|call|>",
        "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant«"
        "{% if m.reasoning_content and (loop.last or m.tool_calls) %}<|channel|>analysis<|message|>"
        "{{ m.reasoning_content }}<|end|><|start|>assistant{% endif %}{% if m.tool_calls %}"
        "<|channel|>commentary to=add<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}"
        "<|channel|>final<|message|>{{ m.content }}"
        "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}{% endif %}»"
        "{% elif m.role == 'tool' %}<|start|>add<|message|>{{ m.content }}<|end|>{% else %}<|start|>{{ m.role }}"
        "<|message|>"
        "{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    ),
    "Kimi": Shape(
        "<|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> <|im_end|> <|calls|> <|args|> [EOS]",
        "[EOS] <|im_end|>",
        "{% if tools %}<|im_system|>tools<|im_middle|>{{ tools[0].function.name }}<|im_end|>{% endif %}"
        "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_system|>system<|im_middle|>H<|im_end|>"
        "{% endif %}{% if m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>«{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<|calls|>{{ c.function.name }}:{{ loop.index0 }}<|args|>"
        "{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>»{% elif m.role == 'user' %}<|im_user|>user"
        "<|im_middle|>"
        "{{ m.content }}<|im_end|>{% else %}<|im_system|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}",
    ),
    "MiniMax": Shape(
        "]~!b[ ]~b] [e~[ <think> </think>",
        "[e~[",
        LAST + "]~!b[{% for m in messages %}{% if m.role == 'assistant' %}]~b]ai¶«"
        "{% if m.reasoning_content and loop.index0 > ns.last %}<think>¶{{ m.reasoning_content }}¶</think>¶¶{% endif %}"
        "{{ m.content }}[e~[»¶{% else %}]~b]{{ m.role }}¶{{ m.content }}[e~[¶{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}]~b]ai¶<think>¶{% endif %}",
    ),
    "R1-Distill": Shape(
        "<|User|> <|Assistant|> <|end|>",
        "<|end|>",
        "{% for m in messages %}{% if m.role == 'assistant' %}<|Assistant|>«{{ m.content.split('</think>')[-1] }}"
        "<|end|>»{% else %}<|User|>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|><think>¶{% endif %}",
    ),
}

QWEN = "<|im_start|>user\nq<|im_end|>\n"
GLM = "[gMASK]<sop><|user|>\nq"
OSS = "<|start|>user<|message|>q<|end|>"
Expected = tuple[str, Chat, list[str], list[str] | None]

CASES: list[Expected] = [
    (
        "Llama-3",
        WITH_SYSTEM,
        [
            "<|begin|><|head|>system<|body|>\n\nS<|eot|><|head|>user<|body|>\n\nq<|eot|><|head|>assistant<|body|>\n\n"
            "⟦a<|eot|>⟧<|head|>user<|body|>\n\nr<|eot|><|head|>assistant<|body|>\n\n⟦b<|eot|>⟧"
        ],
        None,
    ),
    (
        "Llama-3",
        CALL,
        [
            "<|begin|><|head|>system<|body|>\n\nadd<|eot|><|head|>user<|body|>\n\nq<|eot|><|head|>assistant<|body|>\n\n"
            '⟦{"name": "add", "arguments": {"a": 2}}<|eot|>⟧<|head|>ipython<|body|>\n\n4<|eot|>'
            "<|head|>assistant<|body|>\n\n⟦b<|eot|>⟧"
        ],
        None,
    ),
    (
        "Qwen2.5",
        TWO,
        [
            "<|im_start|>system\nH<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n⟦a<|im_end|>⟧\n"
            "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧"
        ],
        None,
    ),
    (
        "Qwen2.5",
        CALL,
        [
            "<|im_start|>system\nH\nadd<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
            '⟦<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>⟧\n'
            "<|im_start|>user\n<tool_response>4</tool_response><|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧"
        ],
        None,
    ),
    ("Qwen3", ONE, [QWEN + "<|im_start|>assistant\n<think>\n\n</think>\n\n⟦a<|im_end|>⟧"], None),
    (
        "Qwen3",
        THOUGHT,
        [
            QWEN + "<|im_start|>assistant\n⟦<think>\nt\n</think>\n\na<|im_end|>⟧",
            QWEN + "<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\nr<|im_end|>\n"
            "<|im_start|>assistant\n⟦<think>\nu\n</think>\n\nb<|im_end|>⟧",
        ],
        [
            QWEN + "<|im_start|>assistant\n⟦a<|im_end|>⟧\n<|im_start|>user\nr<|im_end|>\n"
            "<|im_start|>assistant\n⟦<think>\nu\n</think>\n\nb<|im_end|>⟧"
        ],
    ),
    (
        "Qwen3",
        THOUGHT_CALL,
        [
            QWEN + '<|im_start|>assistant\n⟦<think>\nt\n</think>\n\n{"name": "add", "arguments": {"a": 2}}<|im_end|>⟧\n'
            "<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n⟦<think>\nu\n</think>\n\nb<|im_end|>⟧"
        ],
        None,
    ),
    (
        "GLM-4.5",
        TWO,
        [GLM + "<|assistant|>\n<think></think>⟦\na<|user|>⟧\nr<|assistant|>\n<think></think>⟦\nb<|user|>⟧"],
        None,
    ),
    (
        "GLM-4.5",
        THOUGHT,
        [
            GLM + "<|assistant|>⟦\n<think>t</think>\na<|user|>⟧",
            GLM + "<|assistant|>\n<think></think>\na<|user|>\nr<|assistant|>⟦\n<think>u</think>\nb<|user|>⟧",
        ],
        [GLM + "<|assistant|>\n<think></think>⟦\na<|user|>⟧\nr<|assistant|>⟦\n<think>u</think>\nb<|user|>⟧"],
    ),
    (
        "GLM-4.5",
        CALL,
        [
            GLM + "<|assistant|>\n<think></think>⟦\n<tool_call>add</tool_call><|observation|>⟧\n4"
            "<|assistant|>\n<think></think>⟦\nb<|user|>⟧"
        ],
        None,
    ),
    (
        "DeepSeek-V3.1",
        WITH_SYSTEM,
        ["<|begin|>S<|User|>q<|Assistant|></think>⟦a<|end|>⟧<|User|>r<|Assistant|></think>⟦b<|end|>⟧"],
        None,
    ),
    (
        "DeepSeek-V3.1",
        CALL,
        ['<|begin|><|User|>q<|Assistant|></think>⟦<|call|>add {"a": 2}<|/call|><|end|>⟧<|out|>4⟦b<|end|>⟧'],
        None,
    ),
    (
        "Nemotron",
        Chat([SYSTEM, user("q"), said("a"), user("r"), said("b", "u")]),
        [
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think></think>"
            "⟦a<|im_end|>⟧\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n<think>\n⟦u\n</think>\nb<|im_end|>⟧"
        ],
        None,
    ),
    (
        "Gemma",
        WITH_SYSTEM,
        ["<bos><turn>user\nS\n\nq</turn>\n<turn>model\n⟦a</turn>⟧\n<turn>user\nr</turn>\n<turn>model\n⟦b</turn>⟧"],
        None,
    ),
    ("Mistral", TWO, ["<s>[INST] q[/INST]⟦ a</s>⟧[INST] r[/INST]⟦ b</s>⟧"], None),
    (
        "Mistral",
        WITH_SYSTEM,
        ["<s>[INST] S\n\nq[/INST]⟦ a</s>⟧", "<s>[INST] q[/INST] a</s>[INST] S\n\nr[/INST]⟦ b</s>⟧"],
        ["<s>[INST] q[/INST]⟦ a</s>⟧[INST] S\n\nr[/INST]⟦ b</s>⟧"],
    ),
    (
        "Phi",
        WITH_SYSTEM,
        [
            "<|system|>\nS<|end|>\n<|user|>\nq<|end|>\n<|assistant|>\n⟦a<|end|>⟧\n<|user|>\nr<|end|>\n<|assistant|>\n"
            "⟦b<|end|>⟧"
        ],
        None,
    ),
    (
        "gpt-oss",
        THOUGHT,
        [
            OSS
            + "<|start|>assistant⟦<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>final<|message|>a"
            "<|return|>⟧",
            OSS
            + "<|start|>assistant<|channel|>final<|message|>a<|end|><|start|>user<|message|>r<|end|><|start|>assistant"
            "⟦<|channel|>analysis<|message|>u<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>⟧",
        ],
        [
            OSS + "<|start|>assistant⟦<|channel|>final<|message|>a<|end|>⟧<|start|>user<|message|>r<|end|>"
            "<|start|>assistant"
            "⟦<|channel|>analysis<|message|>u<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>⟧"
        ],
    ),
    (
        "gpt-oss",
        THOUGHT_CALL,
        [
            OSS
            + "<|start|>assistant⟦<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>commentary to=add"
            '<|message|>{"a": 2}<|call|>⟧<|start|>add<|message|>4<|end|><|start|>assistant'
            "⟦<|channel|>analysis<|message|>u<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>⟧"
        ],
        None,
    ),
    (
        "Kimi",
        TWO,
        [
            "<|im_system|>system<|im_middle|>H<|im_end|><|im_user|>user<|im_middle|>q<|im_end|>"
            "<|im_assistant|>assistant"
            "<|im_middle|>⟦a<|im_end|>⟧<|im_user|>user<|im_middle|>r<|im_end|><|im_assistant|>assistant<|im_middle|>"
            "⟦b<|im_end|>⟧"
        ],
        None,
    ),
    (
        "Kimi",
        Chat([SYSTEM, *CALL.messages], TOOLS),
        [
            "<|im_system|>tools<|im_middle|>add<|im_end|><|im_system|>system<|im_middle|>S<|im_end|><|im_user|>user"
            "<|im_middle|>q<|im_end|><|im_assistant|>assistant<|im_middle|>⟦<|calls|>add:0<|args|>"
            '{"a": 2}<|im_end|>⟧<|im_system|>tool<|im_middle|>4<|im_end|><|im_assistant|>assistant<|im_middle|>⟦b'
            "<|im_end|>⟧"
        ],
        None,
    ),
    (
        "MiniMax",
        THOUGHT,
        [
            "]~!b[]~b]user\nq[e~[\n]~b]ai\n<think>\n⟦t\n</think>\n\na[e~[⟧",
            "]~!b[]~b]user\nq[e~[\n]~b]ai\na[e~[\n]~b]user\nr[e~[\n]~b]ai\n<think>\n⟦u\n</think>\n\nb[e~[⟧",
        ],
        ["]~!b[]~b]user\nq[e~[\n]~b]ai\n⟦a[e~[⟧\n]~b]user\nr[e~[\n]~b]ai\n<think>\n⟦u\n</think>\n\nb[e~[⟧"],
    ),
    ("MiniMax", ONE, ["]~!b[]~b]user\nq[e~[\n]~b]ai\n⟦a[e~[⟧"], None),
    ("R1-Distill", THOUGHT, ["<|User|>q<|Assistant|>⟦a<|end|>⟧<|User|>r<|Assistant|>⟦b<|end|>⟧"], None),
    ("R1-Distill", Chat([user("q"), said("<b>")]), ["<|User|>q<|Assistant|>⟦<b><|end|>⟧"], None),
]
"""Shape, chat, its documents with the plain template, and those with the tagged one if they differ."""
