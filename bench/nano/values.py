"""Random words and values that prompts contain and answers copy. Made of few syllables, so that copying can be learned
from little data; mixed with names, numbers, Chinese and emoji, so that it is copying and not recognition."""

import re
from random import Random

CITIES = (
    "Paris London Tokyo Beijing Berlin Madrid Rome Cairo Delhi Lima Oslo Seoul Sydney Boston Chicago Denver Dublin Geneva "
    "Hanoi Lisbon Moscow Osaka Prague Vienna"
).split()
ZH_CITIES = "北京 上海 广州 深圳 成都 杭州 武汉 西安 南京 重庆 天津 苏州".split()
NAMES = "Alice Bob Carol David Emma Frank Grace Henry Ivy Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tina Zoe".split()
ZH_NAMES = "小明 小红 小华 小丽 李雷 张伟 王芳 陈静".split()
NOUNS = (
    "apple river stone cloud train paper window garden music bridge coffee forest button candle dragon engine falcon ginger "
    "hammer island jacket kettle ladder magnet needle pencil rocket saddle tunnel velvet book house water light table phone "
    "market letter picture"
).split()
ZH_NOUNS = "苹果 河流 石头 白云 火车 纸张 窗户 花园 音乐 大桥 咖啡 森林 蜡烛 岛屿 铅笔 火箭 雨伞 手机 信件 图片".split()
COLORS = "red green blue yellow purple orange black white".split()
WORDS = (
    "the a this my your it is are do go come see know want like make take give find tell work play read write run walk eat "
    "drink sleep buy open close start stop help need good bad big small new old long short hot cold fast slow happy sad "
    "early late easy hard full one two three four five day week year today tomorrow morning evening night man woman child "
    "friend family school city home room door car road tree flower sun moon sky sea fire bread cake milk tea fish bird cat "
    "dog horse computer file network number word text story question answer meeting project team plan test and or not with "
    "for from to in on at about after before very more here there hello world please"
).split()
ZH_WORDS = (
    "我 你 他 我们 今天 明天 晚上 早上 天气 很好 喜欢 学习 工作 吃饭 喝水 看书 朋友 老师 学生 学校 家里 回家 会议 三点 开始 电影 "
    "中国 世界 时间 问题 红色 蓝色 大 小 快 慢 山 水 火 月亮 太阳 星星 春天 夏天 秋天 冬天 猫 狗 鱼 鸟 花 树 米饭 面条 茶"
).split()
SYLLABLES = tuple(a + b for a in "bdfgklmnprstvz" for b in "aeiou")
LETTERS = "aaabccdeeeefghhiijklmnnooopqrrsstttuuvwwxyyz"
EMOJI = "😀 😊 🚀 🎉 🌟 🐱 🐶 🍎 🌈 🔥 👍 🎵 🌍".split()

WIDE = r"[^ -~]"  # Chinese, its punctuation, emoji
UNSPACED = re.compile(f"(?<={WIDE}) (?={WIDE})")  # the space that Chinese does not have,
TO_SPACE = re.compile(f"(?<={WIDE})(?=[A-Za-z])|(?<=[A-Za-z])(?=[一-龥])")  # and where it has one

PREAMBLES = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer briefly.",
    "Be concise.",
    "Answer in the language of the user.",
    "You are nano, the model that glm53d has built in.",
    "Use the tools when they help.",
    "You are a careful assistant. Do not make things up.",
    "你是一个乐于助人的助手。",
    "请简短回答。",
)
FILLER = (
    "The {a} stands near the {b}.", "{n} went to {c} with a {a}.", "Every {a} needs a {b}.", "In {c} there is a {a} and a {b}.",
    "{n} bought a {b} for {n2}.", "The {b} was lost on the way to {c}.", "A {a} is not a {b}.",
)  # fmt: skip


def word(rng: Random) -> str:
    """A word that nobody knows."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 4)))


def spelled(rng: Random) -> str:
    """A word that is not even made of syllables, as most words of the world are to a small vocabulary."""
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(3, 9)))


def name(rng: Random, zh: bool) -> str:
    """Of a person."""
    if zh:
        return rng.choice(ZH_NAMES)
    return rng.choice(NAMES) if rng.random() < 0.6 else word(rng).capitalize()


def place(rng: Random, zh: bool) -> str:
    """A city, known or not."""
    if zh:
        return rng.choice(ZH_CITIES)
    return rng.choice(CITIES) if rng.random() < 0.7 else word(rng).capitalize()


def code(rng: Random) -> str:
    """An identifier with digits."""
    form = rng.randrange(4)
    if form == 0:
        return f"{rng.choice('ABCDEFGHKMNPRSTXYZ')}{rng.choice('ABCDEFGHKMNPRSTXYZ')}-{rng.randint(10, 9999)}"
    if form == 1:
        return f"{word(rng)}{rng.randint(1, 99)}"
    if form == 2:
        return str(rng.randint(100, 99999))
    return f"{word(rng)}-{word(rng)}"


def value(rng: Random, zh: bool) -> str:
    """One thing of any kind."""
    roll = rng.random()
    if zh and roll < 0.6:
        return rng.choice(ZH_NOUNS if roll < 0.2 else ZH_WORDS if roll < 0.45 else ZH_CITIES)
    if roll < 0.2:
        return rng.choice(NOUNS if roll < 0.1 else WORDS)
    if roll < 0.3:
        return place(rng, False)
    if roll < 0.4:
        return name(rng, False)
    if roll < 0.46:
        return spelled(rng).capitalize() if rng.random() < 0.5 else spelled(rng)
    return word(rng) if roll < 0.75 else code(rng)


def phrase(rng: Random, zh: bool, most: int = 5) -> str:
    """A few things in a row, perhaps with an emoji; or some common words."""
    if rng.random() < 0.3:
        return ("" if zh else " ").join(rng.choice(ZH_WORDS if zh else WORDS) for _ in range(rng.randint(2, most + 2)))
    text = " ".join(value(rng, zh) for _ in range(rng.randint(1, most)))
    if zh:
        text = UNSPACED.sub("", text)
    return f"{text} {rng.choice(EMOJI)}" if rng.random() < 0.15 else text


def typeset(text: str) -> str:
    """Chinese text with a space between it and Latin letters, as good typesetters have it: so a word is one token."""
    return TO_SPACE.sub(" ", text)


def path(rng: Random) -> str:
    """Of a file."""
    folders = "/".join(word(rng) for _ in range(rng.randint(1, 3)))
    start = rng.choice(("/", "./", "", f"{rng.choice(NOUNS)}/"))
    return start + folders + rng.choice((".txt", ".py", ".md", ".json", ".log"))


def email(rng: Random) -> str:
    """An address."""
    return f"{word(rng)}@{rng.choice(('example.com', 'mail.org', word(rng) + '.net'))}"


def filler(rng: Random, sentences: int) -> list[str]:
    """Sentences without meaning to look for something in."""
    return [
        rng.choice(FILLER).format(
            a=rng.choice(NOUNS), b=rng.choice(NOUNS), c=place(rng, False), n=rng.choice(NAMES), n2=rng.choice(NAMES)
        )
        for _ in range(sentences)
    ]
