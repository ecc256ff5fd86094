"""Makes tokenizer.json and tokenizer_config.json of the nano model: GLM-5.3's tokenizer, shrunk to 2,000 base entries.

    python -m bench.nano.tokenizer OUT_DIR

Everything but the size is the official file's: byte-level BPE with ignore_merges, the same pre-tokenizer and decoder,
no normaliser, no post-processor, and the 36 added tokens in the official order with the official flags, right above the
base vocabulary. It learns from the conversations that the model learns from, and a little from the sentences below.

Words that nobody knows are to fall into their syllables wherever they stand, behind a space or a quotation mark: a
model of this size copies tokens, and does not learn which tokens are the same text cut in another way. For the same
reason every common word that values are made of is one token, bare and behind a space.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.nano import toolbox, values
from bench.nano.data import sample
from bench.nano.values import SYLLABLES
from glm53d.chat.template import Template
from glm53d.text.cuts import PATTERN

NUM_BASE = 2000
SPECIAL = (
    "<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> <|observation|> "
    "<|begin_of_image|> <|end_of_image|> <|begin_of_video|> <|end_of_video|> <|begin_of_audio|> <|end_of_audio|> "
    "<|begin_of_transcription|> <|end_of_transcription|>"
)
PLAIN = (
    "<|code_prefix|> <|code_middle|> <|code_suffix|> <think> </think> <tool_call> </tool_call> <tool_response> "
    "</tool_response> <arg_key> </arg_key> <arg_value> </arg_value> /nothink <|begin_of_box|> <|end_of_box|> "
    "<|image|> <|video|>"
)

SENTENCES = """\
Reasoning Effort: Max
Reasoning Effort: High
Reasoning Effort: Low
You are a helpful assistant. Answer the question as well as you can, and say so when you do not know.
Hello! How can I help you today? I would like to know what the weather is like in Paris tomorrow.
Please write a short story about a small boat that wanted to see the ocean. Once upon a time there was a little boat.
The user asks for the capital of France. That is Paris. I should answer in one sentence. The capital of France is Paris.
First, let me think about what they want. Then I will call the tool, wait for its result, and explain what it means.
Sure! Here is a list of three things that you could try: read the error message, run the tests again, and ask a friend.
I'm sorry, but I can't do that. It's not what you're looking for, we've seen that they'll want something else, \
and I'd ask.
How many people live there? About 1,234,567 in 2024, which is 12.5% more than in 1999, or 3.14 times 100,000.
# Tools
You may call one or more functions to assist with the user query.
You are provided with function signatures within <tools></tools> XML tags:
For each function call, output the function name and arguments within the following XML format: \
{function-name}{arg-key-1}
{"name": "get_weather", "description": "Get the weather of a city", "parameters": {"type": "object", "properties": \
{"city": {"type": "string", "description": "Name of the city"}}, "required": ["city"]}}
{"id": 1, "ok": true, "error": null, "items": [{"title": "first", "value": 0.5}, {"title": "second", "value": -1}]}
<html><head><title>Hello</title></head><body><p class="text">Hello, world!</p><a href="https://example.com">link</a></body>
SELECT name, count(*) FROM users WHERE id = 42 GROUP BY name ORDER BY name;
你好,请问有什么可以帮助你的吗?今天天气很好,我们一起去公园散步吧。
中国的首都是北京。这是一个关于人工智能的问题,我需要先想一想,然后再回答用户。
请写一个关于小船的故事。从前有一只小船,它很想去看大海。谢谢你的帮助,这个答案对我很有用。
我不知道这个问题的答案,但是我可以使用工具来查一下。没有问题,我们现在就开始工作。
这个函数的作用是把输入的文本变成数字,如果输入不对就会出现错误。大家好,我是一个语言模型。
こんにちは。今日はとても良い天気ですね。何かお手伝いできることはありますか。
日本の首都は東京です。この質問について少し考えてから答えます。ありがとうございます。
小さな船の話を書いてください。昔々、海を見たいと思っている小さな船がありました。
これは言語モデルのためのテキストです。わかりません。もう一度お願いします。
안녕하세요. 무엇을 도와드릴까요? 오늘은 날씨가 좋습니다. 감사합니다.
Привет! Как дела? Это небольшой текст для модели, спасибо за помощь.
¿Qué tiempo hará mañana? L'été dernier, nous étions à la plage. Schöne Grüße aus München, das war sehr schön. \
É só isso, não é?
😀 😃 😂 🤣 😊 😍 🤔 😭 👍 👋 🙏 🎉 🚀 🔥 ✨ ✅ ❌ ⚠️ ❤️ 💡 📦 🐍 👩‍💻 👨‍👩‍👧 🇫🇷 🇯🇵 🇨🇳
“Quoted” text — with dashes … and bullets • one • two → three × four ≤ five €6
"""
NUM_SAMPLES = 12_000
SENTENCE_WEIGHT = 8  # enough that other languages' characters are not always bytes
WORD = re.compile(r"[A-Z]?[a-z]+")
MADE_UP = re.compile("(?i:" + "|".join(SYLLABLES) + "){2,4}")
RARE = 60  # made-up words come fewer times than this, others that look like them more often
CAPITALS = tuple(syllable.capitalize() for syllable in SYLLABLES)
SYLLABLE_WEIGHT = 400_000  # above every pair of letters: syllables are merged before anything else is
COMMON = sorted(
    {*values.WORDS, *values.NOUNS, *values.NAMES, *values.CITIES, *values.COLORS, *toolbox.VERBS, *toolbox.THINGS}
    | {*toolbox.LANGUAGES, *toolbox.CURRENCIES, *toolbox.COMMANDS}
)
IN_NAMES = sorted(
    {name for kind in toolbox.KINDS for names, _ in kind.parameters for name in names.split()}
    | {part for kind in toolbox.KINDS for name in kind.names for part in re.findall("_?[a-z]+", name)}
    | {f"_{thing}" for thing in toolbox.THINGS}
)
UNSPACED = (*toolbox.VERBS, *values.ZH_WORDS, *values.ZH_NOUNS, *values.ZH_NAMES, *values.ZH_CITIES, *values.EMOJI)
UNSPACED_WEIGHT = 50_000  # so each is merged before anything that reaches across its ends


def training_texts() -> Iterator[str]:
    """The whole training text, in a fixed order: what stands between control tokens, as the encoder sees it, with
    made-up words cut into syllables and without common ones, which need no merges.
    """
    template = Template({token: i for i, token in enumerate(SPECIAL.split() + PLAIN.split())})
    rendered = (template.render(sample(index, split="tokenizer").conversation) for index in range(NUM_SAMPLES))
    texts = [segment for segments in rendered for segment in segments if isinstance(segment, str)]
    number = Counter(word for text in texts for word in WORD.findall(text))
    common = set(COMMON)

    def cut(found: re.Match[str]) -> str:
        word = found[0]
        before = found.string[: found.start()][-1:]
        if word in common and not (before.isalpha() or before == "_"):
            return "\n"
        if number[word] >= RARE or not MADE_UP.fullmatch(word):
            return word
        return "\n" + "\n".join(word[i : i + 2] for i in range(0, len(word), 2))

    yield from (WORD.sub(cut, text) for text in texts)
    yield from [SENTENCES] * SENTENCE_WEIGHT
    yield from ["\n".join((*SYLLABLES, *CAPITALS) * 1000)] * (SYLLABLE_WEIGHT // 1000)
    yield from ["\n".join(UNSPACED * 1000)] * (UNSPACED_WEIGHT // 1000)


def train() -> Tokenizer:
    """A tokenizer with NUM_BASE learned entries, all 256 bytes among them, and no added token yet."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_BASE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,  # a sentence without spaces is one pre-token: do not learn it whole
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(), trainer)
    return tokenizer


def put_common_words(data: dict) -> None:
    """The content of tokenizer.json gets COMMON and IN_NAMES in place of what was learned last. No merge leads to them,
    nor need one: with ignore_merges a word that is an entry is taken whole.
    """
    model = data["model"]
    learned = sorted(model["vocab"], key=model["vocab"].__getitem__)
    assert [a + b for a, b in model["merges"]] == learned[-len(model["merges"]) :]
    places = {entry: i for i, entry in enumerate(learned)}
    wanted = dict.fromkeys([*COMMON, *("Ġ" + word for word in COMMON), *IN_NAMES])
    words = [(word, places.get(word, NUM_BASE)) for word in wanted]
    kept = NUM_BASE
    while kept + sum(place >= kept for _, place in words) > NUM_BASE:
        kept -= 1
    entries = learned[:kept] + [word for word, place in words if place >= kept]
    model["vocab"] = {entry: i for i, entry in enumerate(entries)}
    del model["merges"][len(model["merges"]) - (NUM_BASE - kept) :]


def put_added_tokens(data: dict) -> None:
    """The content of tokenizer.json gets the official ones."""
    data["added_tokens"] = [
        {
            "id": NUM_BASE + i,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": i < len(SPECIAL.split()),
        }
        for i, content in enumerate(SPECIAL.split() + PLAIN.split())
    ]


def tokenizer_config() -> dict:
    """The content of tokenizer_config.json, with the official file's fields."""
    return {
        "backend": "tokenizers",
        "clean_up_tokenization_spaces": False,
        "do_lower_case": False,
        "eos_token": "<|endoftext|>",
        "extra_special_tokens": SPECIAL.split(),
        "is_local": True,
        "model_max_length": 1048576,
        "model_specific_special_tokens": {},
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
        "remove_space": False,
        "tokenizer_class": "TokenizersBackend",
    }


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads(train().to_str())
    put_common_words(tokenizer)
    put_added_tokens(tokenizer)
    assert len(tokenizer["model"]["vocab"]) == NUM_BASE
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n", "utf-8")
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
