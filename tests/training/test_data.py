"""Training text from every source: exactly what the assistant says is supervised (A22), and bad input is told of."""

from __future__ import annotations

import builtins
import gzip
import json
import logging
from itertools import pairwise

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from treedec.training.data import FORMATS, read_corpus

SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|head|>", "<|/head|>", "<|eot|>",
    "<|user|>", "<|assistant|>",
]  # fmt: skip
VOCAB = 300


def byte_tokenizer(template=None, merges=(), trim_offsets=False, special=True, lstrip=(), rstrip=()):
    """A token per byte, per special token and per merge, so that pieces of a text have the tokens of the whole."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    backend.decoder = decoders.ByteLevel()
    for token in SPECIAL:
        strips = {"lstrip": token in lstrip, "rstrip": token in rstrip}
        backend.add_tokens([AddedToken(token, special=special, normalized=False, **strips)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# No prompt for an answer, and system turns that are part of the first user turn.
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>' + messages[0].content + '<</SYS>>' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}<s>[INST] {% if loop.first %}{{ system }}{% endif %}{{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}"
)
LLAMA3 = (
    "<s>{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    "<s>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# The prompt is shorter than what stands before an answer, by a line break that the model writes itself.
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# An answer ends where the next user turn begins, the last one with the text.
GLM = (
    "{% for m in messages %}{{ '<|assistant|>' if m.role == 'assistant' else '<|user|>' }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Nothing but words, and no prompt.
ALPACA = "{% for m in messages %}### {{ m.role }}: {{ m.content }}\n\n{% endfor %}"
# Only turns after the last question show their thoughts, which are an empty block where there are none.
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else '' %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The prompt begins a thought, and no turn shows one.
DEEPSEEK = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% elif m.role == 'assistant' %}"
    "<|assistant|>{{ m.content.split('</think>')[-1] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)


def chatml(messages):
    system = [] if messages[0]["role"] == "system" else [("<|im_start|>system\nBe kind.<|im_end|>\n", False)]
    return system + [
        piece
        for m in messages
        for piece in (
            (f"<|im_start|>{m['role']}\n", False),
            (f"{m['content']}<|im_end|>", m["role"] == "assistant"),
            ("\n", False),
        )
    ]


def llama2(messages):
    system = f"<<SYS>>{messages[0]['content']}<</SYS>>" if messages[0]["role"] == "system" else ""
    pieces = []
    for m in messages[bool(system) :]:
        if m["role"] == "user":
            pieces.append((f"<s>[INST] {system}{m['content'].strip()} [/INST]", False))
            system = ""
        else:
            pieces.append((f" {m['content'].strip()} </s>", True))
    return pieces


def llama3(messages):
    pieces = [("<s>", False)]
    for m in messages:
        said = m["role"] == "assistant"
        pieces += [(f"<|head|>{m['role']}<|/head|>\n\n", False), (f"{m['content'].strip()}<|eot|>", said)]
    return pieces


def gemma(messages):
    pieces = [("<s>", False)]
    for m in messages:
        said = m["role"] == "assistant"
        pieces.append((f"<start_of_turn>{'model' if said else 'user'}\n", False))
        pieces += [(f"{m['content'].strip()}<end_of_turn>", said), ("\n", False)]
    return pieces


def zephyr(messages):
    pieces = []
    for m in messages:
        pieces.append((f"<|{m['role']}|>", False))
        pieces += [(f"\n{m['content']}</s>", m["role"] == "assistant"), ("\n", False)]
    return pieces


def glm(messages):
    pieces, after_answer = [], False
    for m in messages:
        said = m["role"] == "assistant"
        pieces.append(("<|assistant|>" if said else "<|user|>", after_answer))
        pieces += [("\n", False), (m["content"], said)]
        after_answer = said
    return pieces


def alpaca(messages):
    pieces = []
    for m in messages:
        said = m["role"] == "assistant"
        # The space after the colon is not a token of its own here, so it is not the assistant's.
        pieces += [(f"### {m['role']}: ", False), (m["content"], said), ("\n\n", False)]
    return pieces


def qwen3(messages):
    pieces = []
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    for i, m in enumerate(messages):
        pieces.append((f"<|im_start|>{m['role']}\n", False))
        said, content = m["role"] == "assistant", m["content"]
        if said:
            thought, _, content = content.rpartition("</think>")
            thought, content = thought.removeprefix("<think>").strip(), content.lstrip("\n")
            content = f"<think>\n{thought}\n</think>\n\n{content}" if i > last else content
        pieces += [(f"{content}<|im_end|>", said), ("\n", False)]
    return pieces


def deepseek(messages):
    pieces = [("<s>", False)]
    for m in messages:
        if m["role"] == "user":
            pieces.append((f"<|user|>{m['content']}", False))
        elif m["role"] == "assistant":
            pieces += [("<|assistant|>", False), (f"{m['content'].rpartition('</think>')[2]}</s>", True)]
    return pieces


FAMILIES = {
    "chatml": (CHATML, chatml), "llama2": (LLAMA2, llama2), "llama3": (LLAMA3, llama3), "gemma": (GEMMA, gemma),
    "zephyr": (ZEPHYR, zephyr), "glm": (GLM, glm), "alpaca": (ALPACA, alpaca), "qwen3": (QWEN3, qwen3),
    "deepseek": (DEEPSEEK, deepseek),
}  # fmt: skip
CHAT = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "It is one."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "It is two."},
]


def lines(path, samples):
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
    return path


def read(path, tokenizer=None, **options):
    return read_corpus(path, tokenizer, **{"vocab_size": VOCAB, **options})


def read_messages(tmp_path, tokenizer, *conversations, **options):
    path = lines(tmp_path / "chat.jsonl", [{"messages": messages} for messages in conversations])
    return read(path, tokenizer, **options)


def said(corpus, tokenizer):
    """What the assistant says in all its turns, as text."""
    return [tokenizer.decode(corpus.conversation(c)[start:end].tolist()) for c, start, end in corpus.responses.tolist()]


def by_hand(tokenizer, pieces):
    """The tokens of pieces of text, and which are the assistant's."""
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text, _ in pieces]
    mask = [one for ids, (_, one) in zip(encoded, pieces, strict=True) for _ in ids]
    return [id_ for ids in encoded for id_ in ids], mask


def mask_of(corpus, conversation):
    mask = np.zeros(corpus.lengths[conversation], dtype=bool)
    for _, start, end in corpus.responses[corpus.responses[:, 0] == conversation].tolist():
        assert not mask[start:end].any()
        mask[start:end] = True
    return mask.tolist()


TEXTS = st.text("ab .\n\té😀<|/", max_size=12)
ANSWERS = st.one_of(TEXTS, st.builds("<think>\n{}\n</think>\n\n{}".format, TEXTS, TEXTS.filter(str.strip))).filter(
    lambda text: text.strip()
)


@st.composite
def conversations(draw):
    """With or without a system turn; ending with an answer or a question."""
    messages = [{"role": "system", "content": "S" + draw(TEXTS)}] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(2, 5))):
        role = "assistant" if turn % 2 else "user"
        messages.append({"role": role, "content": "U" + draw(TEXTS) if role == "user" else draw(ANSWERS)})
    return messages


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(drawn=st.lists(conversations(), min_size=1, max_size=4))
def test_exactly_what_the_assistant_says_is_supervised(tmp_path_factory, family, drawn):
    template, pieces_of = FAMILIES[family]
    tokenizer = byte_tokenizer(template)
    if family == "gemma":
        drawn = [[m for m in messages if m["role"] != "system"] for messages in drawn]
    drawn.append(CHAT)  # so that something is supervised
    corpus = read_messages(tmp_path_factory.mktemp("drawn"), tokenizer, *drawn)
    assert len(corpus) == len(drawn)
    for index, messages in enumerate(drawn):
        ids, mask = by_hand(tokenizer, pieces_of(messages))
        assert tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"] == ids, "the case itself is wrong"
        assert corpus.conversation(index).tolist() == ids
        assert mask_of(corpus, index) == mask


@pytest.mark.parametrize(
    ("family", "answers"),
    [
        ("chatml", ["It is one.<|im_end|>", "It is two.<|im_end|>"]),
        ("llama2", [" It is one. </s>", " It is two. </s>"]),
        ("glm", ["It is one.<|user|>", "It is two."]),
        ("alpaca", ["It is one.", "It is two."]),
        ("qwen3", ["It is one.<|im_end|>", "<think>\n\n</think>\n\nIt is two.<|im_end|>"]),
        ("deepseek", ["It is one.</s>", "It is two.</s>"]),
    ],
)
def test_what_is_supervised_reads_like_this(tmp_path, family, answers):
    tokenizer = byte_tokenizer(FAMILIES[family][0])
    assert said(read_messages(tmp_path, tokenizer, CHAT), tokenizer) == answers


BLOCKS = (
    "{%% for m in messages %%}<|im_start|>{{ m.role }}\n{%% if m.role == 'assistant' %%}%s"
    "{%% else %%}{{ m.content }}<|im_end|>\n{%% endif %%}{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)


@pytest.mark.parametrize(
    "block",
    [
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n",
        "{%- generation -%}{{ m.content }}<|im_end|>\n{% endgeneration %}",
        "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n",
    ],
    ids=["exact", "with-a-line-break", "without-the-end"],
)
def test_generation_blocks_agree_with_what_is_measured(tmp_path, block):
    tokenizer = byte_tokenizer(BLOCKS % block)
    assert said(read_messages(tmp_path, tokenizer, CHAT), tokenizer) == ["It is one.<|im_end|>", "It is two.<|im_end|>"]


def test_a_generation_block_is_believed_where_the_template_rewrites_turns(tmp_path):
    """Nothing can be measured here: a word before the answer depends on the answer."""
    rewriting = "{{ m.content | length }}: %s{{ m.content }}<|im_end|>%s\n"
    messages = [CHAT[0], {"role": "assistant", "content": "Yes."}]
    marked = byte_tokenizer(BLOCKS % (rewriting % ("{% generation %}", "{% endgeneration %}")))
    assert said(read_messages(tmp_path, marked, messages), marked) == ["Yes.<|im_end|>"]
    unmarked = byte_tokenizer((BLOCKS % (rewriting % ("", ""))).replace("{% if add_gen", "{% if false and add_gen"))
    with pytest.raises(ValueError, match=r"line 1: .*changes what stands around messages\[1\].*{% generation %}"):
        read_messages(tmp_path, unmarked, messages)


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("{% if loop.last %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n",
         "1 {% generation %} blocks for the 2 turns"),
        ("{{ m.content }}{% generation %}<|im_end|>{% endgeneration %}\n", r"messages\[1\] is not within the"),
    ],
)  # fmt: skip
def test_a_generation_block_that_is_wrong_is_told_of(tmp_path, block, problem):
    with pytest.raises(ValueError, match=problem):
        read_messages(tmp_path, byte_tokenizer(BLOCKS % block), CHAT)


@pytest.mark.parametrize("blocks", [False, True])
def test_a_role_token_that_takes_in_the_white_space_of_an_answer_is_not_the_assistants(tmp_path, blocks):
    answer = "{% generation %}{{ m.content }}</s>{% endgeneration %}" if blocks else "{{ m.content }}</s>"
    template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}" + answer + "{% else %}{{ m.content }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    tokenizer = byte_tokenizer(template, rstrip=["<|assistant|>"])
    messages = [CHAT[0], {"role": "assistant", "content": "  Yes."}]
    corpus = read_messages(tmp_path, tokenizer, messages)
    assert said(corpus, tokenizer) == ["Yes.</s>"]


def test_an_end_token_that_takes_in_white_space_ends_the_turn(tmp_path):
    tokenizer = byte_tokenizer(ZEPHYR, lstrip=["</s>"])
    messages = [CHAT[0], {"role": "assistant", "content": "Yes. "}, CHAT[1]]
    corpus = read_messages(tmp_path, tokenizer, messages)
    assert said(corpus, tokenizer) == ["\nYes.</s>", "\nIt is one.</s>"]


def test_tokens_that_straddle_an_edge_hold_what_the_assistant_says(tmp_path):
    """ " I" begins within the prompt's last space, and ".\n" ends behind the content; both can only be predicted."""
    tokenizer = byte_tokenizer(ALPACA, merges=[("Ġ", "I"), (".", "Ċ")])
    assert said(read_messages(tmp_path, tokenizer, CHAT), tokenizer) == [" It is one.\n", " It is two.\n"]


def test_white_space_at_the_end_of_an_answer_is_the_assistants(tmp_path):
    """Tokenizers that take white space off the offsets of a token included."""
    messages = [CHAT[0], {"role": "assistant", "content": " Yes. "}]
    for trim_offsets in (False, True):
        tokenizer = byte_tokenizer(ALPACA, trim_offsets=trim_offsets)
        before = tokenizer.backend_tokenizer.to_str()
        assert said(read_messages(tmp_path, tokenizer, messages), tokenizer) == [" Yes. "]
        assert tokenizer.backend_tokenizer.to_str() == before, "the caller's tokenizer was changed"


def test_a_token_that_ends_a_turn_need_not_be_called_special(tmp_path):
    tokenizer = byte_tokenizer(CHATML, special=False)
    assert said(read_messages(tmp_path, tokenizer, CHAT), tokenizer)[0] == "It is one.<|im_end|>"


def test_the_first_token_of_an_answer_is_predicted_from_the_prompt(tmp_path):
    tokenizer = byte_tokenizer(CHATML)
    corpus = read_messages(tmp_path, tokenizer, CHAT[:2])
    (_, begin, end) = corpus.runs[0].tolist()
    ids = corpus.conversation(0).tolist()
    assert tokenizer.decode(ids[: begin + 1]) == tokenizer.apply_chat_template(
        CHAT[:1], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(ids[begin + 1 : end + 1]) == "It is one.<|im_end|>"


def test_turns_in_a_row_and_first_turns_of_the_assistant(tmp_path):
    tokenizer = byte_tokenizer(CHATML)
    messages = [CHAT[1], CHAT[0], CHAT[1], CHAT[3], CHAT[2]]
    assert said(read_messages(tmp_path, tokenizer, messages), tokenizer) == [
        "It is one.<|im_end|>", "It is one.<|im_end|>", "It is two.<|im_end|>"
    ]  # fmt: skip


def test_an_answer_that_holds_the_mark_of_the_measurement(tmp_path):
    tokenizer = byte_tokenizer(CHATML)
    marks = "treedec-answer treedec-answer-x"
    messages = [{"role": "user", "content": marks}, {"role": "assistant", "content": marks}]
    assert said(read_messages(tmp_path, tokenizer, messages), tokenizer) == [f"{marks}<|im_end|>"]


def test_a_template_that_does_not_render_what_precedes_an_answer(tmp_path):
    tokenizer = byte_tokenizer(CHATML + "{% if messages | length < 2 %}{{ raise_exception('short') }}{% endif %}")
    assert said(read_messages(tmp_path, tokenizer, CHAT[:2]), tokenizer) == ["It is one.<|im_end|>"]


def test_turns_that_touch_may_not_share_a_token(tmp_path):
    messages = [CHAT[0], CHAT[1], CHAT[3]]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = byte_tokenizer(template)
    assert said(read_messages(tmp_path, tokenizer, messages), tokenizer) == ["It is one.", "It is two."]
    with pytest.raises(ValueError, match=r"line 1: messages\[2\] shares tokens with the turn before it"):
        read_messages(tmp_path, byte_tokenizer(template, merges=[(".", "I")]), messages)


class Slow(PreTrainedTokenizer):
    """A tokenizer in Python, which tells no offsets. It has a token per letter, or per word with the space before."""

    def __init__(self, words=False, **options):
        self.words, self.known = words, {}
        super().__init__(bos_token="<s>", eos_token="</s>", **options)

    vocab_size = 250

    def get_vocab(self):
        return {**self.known, **self.added_tokens_encoder}

    def _tokenize(self, text):
        return [" " + word for word in text.split(" ")] if self.words else list(text)

    def _convert_token_to_id(self, token):
        return self.known.setdefault(token, len(self.known) + 20)

    def _convert_id_to_token(self, index):
        return next((token for token, id_ in self.known.items() if id_ == index), None)

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


def test_a_tokenizer_without_offsets_reads_pieces(tmp_path):
    tokenizer = Slow()
    tokenizer.chat_template = LLAMA2
    assert not tokenizer.is_fast
    messages = [{"role": "system", "content": "S"}, *CHAT, CHAT[0]]
    corpus = read_messages(tmp_path, tokenizer, messages)
    ids, mask = by_hand(tokenizer, llama2(messages))
    assert (corpus.conversation(0).tolist(), mask_of(corpus, 0)) == (ids, mask)
    assert ids == tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    tokenizer = Slow(words=True)
    tokenizer.chat_template = LLAMA2
    with pytest.raises(ValueError, match="other tokens than as a whole; use a fast tokenizer"):
        read_messages(tmp_path, tokenizer, messages)


# Formats and sources


TOKENS = [
    {"input_ids": [5, 6, 7, 8, 9], "responses": [[1, 4]]},
    {"input_ids": [3, 2, 1, 0], "responses": [[0, 1], [1, 1], [2, 4]], "origin": "elsewhere"},
]


def test_tokens_are_read_as_they_are(tmp_path):
    corpus = read(lines(tmp_path / "a.jsonl", TOKENS))
    assert corpus.tokens.dtype == np.int32 and corpus.tokens.tolist() == [5, 6, 7, 8, 9, 3, 2, 1, 0]
    assert corpus.offsets.dtype == np.int64 and corpus.offsets.tolist() == [0, 5, 9]
    assert corpus.responses.dtype == np.int64
    assert corpus.responses.tolist() == [[0, 1, 4], [1, 0, 1], [1, 2, 4]]  # without the empty one
    assert corpus.skipped == 0


def test_all_ways_of_writing_messages_mean_the_same(tmp_path):
    tokenizer = byte_tokenizer(CHATML)
    expected = read_messages(tmp_path, tokenizer, CHAT).digest
    names = {"user": "human", "assistant": "gpt"}
    same = [
        {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in CHAT]},
        {"conversations": [{"from": m["role"], "value": m["content"], "weight": None} for m in CHAT]},
        {"messages": [{"role": m["role"], "content": m["content"], "tool_calls": []} for m in CHAT], "text": "no"},
        {"messages": [{"role": m["role"], "content": [{"type": "text", "text": m["content"][:3]},
                                                      {"text": m["content"][3:]}]} for m in CHAT]},
    ]  # fmt: skip
    for sample in same:
        for format in ("auto", "messages" if "messages" in sample else "sharegpt"):
            assert read(lines(tmp_path / "same.jsonl", [sample]), tokenizer, format=format).digest == expected


def test_thoughts_beside_the_content_are_the_assistants_where_the_template_shows_them(tmp_path):
    template = CHATML.replace(
        "{{ m.content }}", "{{ m.reasoning_content ~ '|' if m.reasoning_content }}{{ m.content }}"
    )
    tokenizer = byte_tokenizer(template)
    messages = [CHAT[0], {**CHAT[1], "reasoning_content": "Hm."}]
    assert said(read_messages(tmp_path, tokenizer, messages), tokenizer) == ["Hm.|It is one.<|im_end|>"]


def test_text_is_supervised_as_a_whole(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    wanted = ["A first\none.", "A second."]
    plain = tmp_path / "a.txt"
    plain.write_bytes("\ufeffA first\r\none.\r\n\r\n \n\nA second.".encode())
    sources = [
        plain,
        lines(tmp_path / "a.jsonl", [{"text": text} for text in (wanted[0], " \n", wanted[1])]),
    ]
    for source in sources:
        corpus = read(source, tokenizer)
        assert said(corpus, tokenizer) == ["<s>" + text for text in wanted]
        assert corpus.responses[:, 1].tolist() == [0, 0] and corpus.responses[:, 2].tolist() == corpus.lengths.tolist()
    other = tmp_path / "lines.txt"  # the name decides only where nothing is said
    other.write_text(json.dumps(TOKENS[0]))
    assert read(other, format="tokens").tokens.tolist() == TOKENS[0]["input_ids"]


@pytest.fixture
def no_download(monkeypatch, tmp_path):
    """Data sets that are read are converted nowhere but here, and the hub is never asked."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("kind", ["parquet", "array", "csv", "folder", "saved", "saved splits", "jsonl.gz"])
def test_data_sets_are_read_through_datasets(tmp_path, no_download, kind):
    tokenizer = byte_tokenizer(CHATML)
    other = [{"role": "system", "content": "S"}, *CHAT[2:]]
    samples = [{"messages": CHAT}, {"messages": other}]
    expected = read_messages(tmp_path, tokenizer, CHAT, other)
    table = datasets.Dataset.from_list(samples)
    path = tmp_path / "here"
    options = {}
    if kind == "parquet":
        path = tmp_path / "a.parquet"
        table.to_parquet(path)
    elif kind == "array":
        path = tmp_path / "a.json"
        path.write_text("\n " + json.dumps(samples, indent=1))
    elif kind == "csv":
        path = tmp_path / "a.csv"
        path.write_text('text\n"One, two"\nThree\n')
        corpus = read(path, byte_tokenizer())
        assert said(corpus, tokenizer) == ["One, two", "Three"]
        return
    elif kind == "folder":
        path.mkdir()
        lines(path / "test.jsonl", samples)
        options = {"split": "test"}
    elif kind == "saved":
        table.save_to_disk(str(path))
    elif kind == "saved splits":
        datasets.DatasetDict({"held": table}).save_to_disk(str(path))
        options = {"split": "held"}
    else:
        path = tmp_path / "a.jsonl.gz"
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, samples)).encode()))
    assert read(path, tokenizer, **options).digest == expected.digest


def test_tokens_in_a_table_and_where_a_sample_of_it_is(tmp_path, no_download):
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_list([TOKENS[0], {"input_ids": [1, VOCAB], "responses": []}]).to_parquet(path)
    with pytest.raises(ValueError, match=rf"a.parquet, sample 1: token id {VOCAB} is not in"):
        read(path)
    assert read(path, skip_bad=True).tokens.tolist() == TOKENS[0]["input_ids"]


def test_json_lines_need_no_datasets_library(tmp_path, monkeypatch):
    real = builtins.__import__

    def refusing(name, *arguments, **options):
        if name == "datasets":
            raise ImportError("not here")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refusing)
    for name in ("a.jsonl", "a.json", "a"):
        assert len(read(lines(tmp_path / name, TOKENS))) == 2
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"a.parquet: only the `datasets` library.*pip install 'treedec\[train\]'"):
        read(tmp_path / "a.parquet")


def test_names_that_are_not_here_are_looked_up_on_the_hub(tmp_path, monkeypatch):
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return iter(TOKENS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "squad", TOKENS)
    assert len(read("squad")) == 2 and not asked
    assert len(read("owner/name", split="train_sft")) == 2
    assert len(read("owner/name:part")) == 2
    assert asked == [
        (("owner/name", None), {"split": "train_sft", "streaming": True}),
        (("owner/name", "part"), {"split": "train", "streaming": True}),
    ]
    for missing in (tmp_path / "name", "./name", "missing.jsonl", "a/b/c", str(tmp_path / "x")):
        with pytest.raises(FileNotFoundError, match="no such file or folder"):
            read(missing)
    assert len(asked) == 2


def test_a_stream_is_read_no_further_than_needed(monkeypatch):
    taken = []

    def endless():
        while True:
            taken.append(1)
            yield TOKENS[0]

    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments, **options: endless())
    assert len(read("owner/endless", max_tokens=11)) == 3 == len(taken)  # of 5 tokens each


def test_conversations_are_cut(tmp_path):
    path = lines(tmp_path / "a.jsonl", [*TOKENS, {"input_ids": [1] * 9, "responses": [[0, 2], [4, 8]]}])
    corpus = read(path, context_length=4, max_length=3)
    assert corpus.tokens.tolist() == [5, 6, 7, 3, 2, 1, 1, 1, 1]
    assert corpus.responses.tolist() == [[0, 1, 3], [1, 0, 1], [1, 2, 3], [2, 0, 2]]
    with pytest.raises(
        ValueError, match=r"line 1: its 5 tokens are beyond the target's context of 4; `max_length` .* cuts"
    ):
        read(path, context_length=4)
    assert len(read(path, context_length=9)) == 3


# Bad input


BAD_TOKENS = [
    ("{", "not a line of JSON"),
    ("[1]", "must be an object with keys, not list"),
    ("\ud800", "not a line of JSON"),
    ({"input_ids": [1, 2]}, "'responses' is missing"),
    ({"input_ids": None, "responses": []}, "'input_ids' is missing"),
    ({"input_ids": [1, 2.0], "responses": []}, "must be a list of token ids"),
    ({"input_ids": [1, True], "responses": []}, "must be a list of token ids"),
    ({"input_ids": [], "responses": []}, "not an empty one"),
    ({"input_ids": [1, 2], "responses": [[0]]}, r"must be a list of \[start, end\] pairs"),
    ({"input_ids": [1, 2], "responses": [["0", 1]]}, r"must be a list of \[start, end\] pairs"),
    ({"input_ids": [1, 2], "responses": [[0, 3]]}, r"\[0, 3\) does not lie within its 2 tokens"),
    ({"input_ids": [1, 2], "responses": [[-1, 1]]}, "does not lie within"),
    ({"input_ids": [1, 2], "responses": [[1, 0]]}, "does not lie within"),
    ({"input_ids": [1, 2, 3], "responses": [[0, 2], [1, 3]]}, r"\[1, 3\) begins before the one listed before it"),
    ({"input_ids": [-1], "responses": []}, "token id -1 is not in"),
    ({"input_ids": [2, VOCAB], "responses": []}, rf"token id {VOCAB} is not in the target's vocabulary \[0, {VOCAB}\)"),
    ({"input_ids": [10**30], "responses": []}, "token id 10+ is not in"),
]
USER, BOT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}
BAD_MESSAGES = [
    ([], "must be a list, and not an empty one"),
    ("Hi", "must be a list.*not str"),
    ([USER, "Yes"], r"messages\[1\] must be an object with a role and a content, not str"),
    ([USER, {"content": "x"}], r"messages\[1\] has the role None"),
    ([USER, {"role": "bot", "content": "x"}], r"messages\[1\] has the role 'bot', which is none of system"),
    ([USER, {"role": ["user"], "content": "x"}], r"messages\[1\] has the role \['user'\]"),
    ([USER, {"role": "assistant", "content": None}], r"the content of messages\[1\] must be a string, not null"),
    ([USER, {"role": "assistant"}], r"the content of messages\[1\] must be a string, not null"),
    ([USER, {"role": "assistant", "content": 3}], r"the content of messages\[1\] must be a string, not int"),
    ([USER, {"role": "assistant", "content": "", "tool_calls": [{}]}], r"messages\[1\] calls a tool"),
    ([USER, {"role": "assistant", "content": " \n"}], r"messages\[1\] is a turn in which the assistant says nothing"),
    ([{"role": "user", "content": [{"type": "image"}]}, BOT], r"messages\[0\] has a part that is not text: .*image"),
    ([{"role": "user", "content": "\ud800"}, BOT], r"the content of messages\[0\] holds half a character"),
    ([{**BOT, "content": "x", "reasoning_content": 1}], r"messages\[0\] reasoning_content must be a string, not int"),
    ([BOT, USER], "the chat template refuses its messages .roles must alternate"),
]


@pytest.mark.parametrize(("bad", "problem"), BAD_TOKENS)
def test_broken_tokens_are_told_of_or_left_out(tmp_path, caplog, bad, problem):
    path = tmp_path / "a.jsonl"
    bad = bad if isinstance(bad, str) else json.dumps(bad)
    path.write_bytes(f"{json.dumps(TOKENS[0])}\n\n{bad}\n{json.dumps(TOKENS[1])}\n".encode(errors="surrogatepass"))
    with pytest.raises(ValueError, match=rf"a.jsonl, line 3: .*{problem}.*read as 'tokens'.*line 1 say.*`skip_bad`"):
        read(path)
    caplog.clear()
    corpus = read(path, format="tokens", skip_bad=True)
    assert corpus.tokens.tolist() == [5, 6, 7, 8, 9, 3, 2, 1, 0] and corpus.skipped == 1
    first, total = [record.getMessage() for record in caplog.records]
    assert "line 3" in first and "read as" not in first and total.endswith("1 broken samples left out, 2 kept")


@pytest.mark.parametrize(("bad", "problem"), BAD_MESSAGES)
def test_broken_messages_are_told_of_or_left_out(tmp_path, bad, problem):
    tokenizer = byte_tokenizer(LLAMA2)
    with pytest.raises(ValueError, match=f"chat.jsonl, line 2: .*{problem}"):
        read_messages(tmp_path, tokenizer, CHAT, bad)
    corpus = read_messages(tmp_path, tokenizer, CHAT, bad, skip_bad=True)
    assert corpus.skipped == 1 and corpus.digest == read_messages(tmp_path, tokenizer, CHAT).digest


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("{{ m.content }}{{ m.content }}", r"writes the content of messages\[1\] 2 times instead of once"),
        ("{{ m.role }}", r"writes the content of messages\[1\] 0 times"),
        ("{{ m.content if '-' in m.content }}", r"leaves out what the assistant says in messages\[1\]"),
        ("{{ m.content }}{{ m.content | length }}", r"changes what stands around messages\[1\]"),
    ],
)
def test_templates_that_do_not_show_what_is_said(tmp_path, answer, problem):
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'user' %}{{ m.content }}{% else %}" + answer + "</s>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    with pytest.raises(ValueError, match=f"line 1: .*{problem}.*{{% generation %}}"):
        read_messages(tmp_path, byte_tokenizer(template), CHAT[:2])


def test_broken_text(tmp_path):
    tokenizer = byte_tokenizer()
    path = tmp_path / "a.txt"
    path.write_bytes(b"good text\n\nbad\xff\nbad\n\n\nmore text")
    with pytest.raises(ValueError, match=r"a.txt, line 3: not UTF-8"):
        read(path, tokenizer)
    assert said(read(path, tokenizer, skip_bad=True), tokenizer) == ["good text", "more text"]
    with pytest.raises(ValueError, match="line 2: text must be a string, not int"):
        read(lines(tmp_path / "a.jsonl", [{"text": "good"}, {"text": 1}]), tokenizer)


def test_many_broken_samples_are_counted(tmp_path, caplog):
    path = lines(tmp_path / "a.jsonl", [TOKENS[0], *[{}] * 25])
    with caplog.at_level(logging.WARNING):
        assert read(path, skip_bad=True).skipped == 25
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 11 and "line 11:" in messages[9] and "25 broken samples left out, 1 kept" in messages[10]


def test_broken_samples_before_the_format_is_known(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("{\n" + json.dumps(TOKENS[0]))
    with pytest.raises(ValueError, match="line 1: not a line of JSON"):
        read(path)
    assert read(path, skip_bad=True).skipped == 1


def test_sources_without_anything_to_train_on(tmp_path, no_download):
    tokenizer = byte_tokenizer(CHATML)
    for name in ("a.jsonl", "a.json", "a.txt"):
        (tmp_path / name).write_text("\n")
        with pytest.raises(ValueError, match=f"{name}: no samples"):
            read(tmp_path / name, tokenizer)
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    with pytest.raises(ValueError, match="folder: a folder without files"):
        read(folder)
    (folder / "inner" / "a.weights").write_bytes(b"1")
    with pytest.raises(ValueError, match="folder, split 'train': the `datasets` library cannot read it"):
        read(folder)
    (folder / "a.jsonl").write_text(json.dumps(TOKENS[0]))
    with pytest.raises(ValueError, match=r"split 'held': .*cannot read it.*held"):
        read(folder, split="held")
    with pytest.raises(ValueError, match=r"no samples but 2 broken ones; the first is .*line 1: not a line of JSON"):
        broken = tmp_path / "broken.jsonl"
        broken.write_text("{\n{")
        read(broken, skip_bad=True)
    with pytest.raises(ValueError, match=r"nothing is supervised: in none of its 2 conv.*two tokens or more"):
        short = [{"input_ids": [1] * 5, "responses": [[1, 2]]}, {"input_ids": [1, 2], "responses": [[0, 2]]}]
        read(lines(tmp_path / "short.jsonl", short))
    assert len(read(lines(tmp_path / "short.jsonl", [{"input_ids": [1] * 5, "responses": [[1, 3]]}]))) == 1


def test_what_a_format_needs(tmp_path):
    unknown = lines(tmp_path / "a.jsonl", [{"prompt": "x", "completion": "y"}])
    with pytest.raises(ValueError, match=r"line 1: its keys \(prompt, completion\) are not those.*messages for 'mess"):
        read(unknown, byte_tokenizer(CHATML), skip_bad=True)
    with pytest.raises(ValueError, match="line 1: 'text' is missing"):
        read(unknown, byte_tokenizer(), format="text")
    chat = lines(tmp_path / "b.jsonl", [{"messages": CHAT}])
    with pytest.raises(ValueError, match="'messages' needs a tokenizer"):
        read(chat, skip_bad=True)
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        read(chat, byte_tokenizer(), skip_bad=True)
    with pytest.raises(ValueError, match="format must be one of auto, tokens, messages, sharegpt, text, not 'chat'"):
        read(chat, format="chat")
    assert FORMATS == ("auto", "tokens", "messages", "sharegpt", "text")
    for name in ("max_length", "max_tokens"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
            read(chat, **{name: 0})
    with pytest.raises(ValueError, match="max_length 9 is beyond the target's context of 8"):
        read(chat, max_length=9, context_length=8)


def test_responses_ascend_and_do_not_overlap(tmp_path):
    """What `Corpus` promises, where the end of one answer is the beginning of the next turn."""
    tokenizer = byte_tokenizer(GLM)
    corpus = read_messages(tmp_path, tokenizer, CHAT + CHAT, CHAT)
    assert len(corpus.responses) == 6
    for (a, _, before), (b, start, _) in pairwise(corpus.responses.tolist()):
        assert a < b or (a == b and before <= start)
