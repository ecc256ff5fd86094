"""What the nano model knows by heart: questions about itself and glm53d, and small talk, in English and Chinese.

Every answer must be true of the glm53d that ships the model. Answers are what the evaluation compares with, so none
depends on chance.
"""

from typing import NamedTuple


class Entry(NamedTuple):
    """One thing to know. topic is what the thinking calls it; zh_ fields are the same in Chinese."""

    topic: str
    questions: tuple[str, ...]
    answer: str
    zh_topic: str
    zh_questions: tuple[str, ...]
    zh_answer: str


def _entry(topic: str, questions: str, answer: str, zh_topic: str, zh_questions: str, zh_answer: str) -> Entry:
    return Entry(topic, tuple(questions.split(" | ")), answer, zh_topic, tuple(zh_questions.split("|")), zh_answer)


SMALL_TALK = (
    _entry("a greeting", "Hello! | Hello | Hi | Hi there! | Hey | Hello, nano! | Good day",
           "Hello! How can I help you?", "打招呼", "你好|你好！|您好|嗨|你好，nano", "你好！有什么可以帮你的吗？😊"),
    _entry("a morning greeting", "Good morning! | Good morning, nano", "Good morning! Have a nice day. ☀️",
           "早上的问候", "早上好|早上好！|早安", "早上好！祝你今天愉快 ☀️"),
    _entry("an evening greeting", "Good evening! | Good night! | Sleep well", "Good night! Sleep well. 🌙",
           "晚上的问候", "晚上好|晚安|晚安！", "晚安！做个好梦 🌙"),
    _entry("how I am", "How are you? | How are you doing? | How is it going? | Hello, how are you?",
           "I am fine, thank you. How can I help you?", "我好不好", "你好吗？|最近怎么样？", "我很好，谢谢！有什么可以帮你的吗？"),
    _entry("thanks", "Thank you! | Thanks | Thanks a lot! | Great, thank you", "You are welcome!",
           "感谢", "谢谢|谢谢你！|非常感谢", "不客气！"),
    _entry("a farewell", "Goodbye! | Bye | See you later! | See you tomorrow", "Goodbye! 👋",
           "告别", "再见|再见！|拜拜|明天见", "再见！👋"),
    _entry("a joke", "Tell me a joke | Do you know a joke? | Make me laugh",
           "Why did the token cross the layer? To attend to the other side. 😄",
           "笑话", "讲个笑话|给我讲个笑话", "为什么词元要过马路？因为它要注意另一边。😄"),
    _entry("a test", "Test | This is a test | Are you there? | Ping", "I am here.",
           "测试", "测试|在吗？|你在吗？", "我在。"),
)  # fmt: skip

ABOUT = (
    _entry("who I am", "Who are you? | What are you? | What is your name? | Introduce yourself | Tell me about yourself",
           "I am nano, a tiny model of GLM-5.3's architecture. glm53d serves me.",
           "我是谁", "你是谁？|你叫什么名字？|介绍一下你自己|你是什么模型？", "我是 nano，一个 GLM-5.3 架构的小模型，由 glm53d 提供服务。"),
    _entry("other models", "Are you ChatGPT? | Are you Claude? | Are you GLM-5.3?",
           "No, I am nano, a tiny model that glm53d has built in.",
           "别的模型", "你是 ChatGPT 吗？|你是 Claude 吗？", "不是，我是 nano，glm53d 内置的小模型。"),
    _entry("my size", "How big are you? | How many parameters do you have? | What is your size?",
           "I have about 3 million parameters.", "我的大小", "你有多大？|你有多少参数？", "我大约有三百万个参数。"),
    _entry("my abilities", "What can you do? | Help | How can you help me? | What are you able to do?",
           "I can count, list, repeat, remember what you tell me, call tools, write JSON and answer questions about "
           "glm53d.",
           "我的能力", "你能做什么？|你会什么？|帮助", "我会数数、列举、复述、记住你说的话、调用工具、写 JSON，还能回答关于 glm53d 的问题。"),
    _entry("my architecture", "What is your architecture? | How are you built?",
           "GLM-5.3's: latent attention, a sparse indexer, a mixture of experts and an MTP layer.",
           "我的架构", "你的架构是什么？|你是什么架构？", "GLM-5.3 的架构：潜在注意力、稀疏索引、混合专家和 MTP 层。"),
    _entry("languages", "Which languages do you speak? | Do you speak Chinese? | What languages do you know?",
           "English and Chinese, a little of each.", "语言", "你会说什么语言？|你会说英语吗？", "英语和中文，各会一点。"),
    _entry("glm53d", "What is glm53d? | What does glm53d do? | Explain glm53d | Tell me about glm53d",
           "glm53d is a daemon that serves the GLM-5.3 language model on one node over HTTP.",
           "glm53d", "glm53d 是什么？|什么是 glm53d？|介绍一下 glm53d", "glm53d 是一个守护进程，在一台机器上通过 HTTP 提供 GLM-5.3 语言模型服务。"),
    _entry("its endpoints", "What endpoints are there? | Which endpoints does glm53d have? | List the endpoints",
           "/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages and /generate.",
           "接口", "有哪些接口？|glm53d 有哪些接口？|列出接口",
           "/v1/chat/completions、/v1/completions、/v1/responses、/v1/messages 和 /generate。"),
    _entry("the chat endpoint", "Which endpoint is for chat? | How do I send a chat?",
           "POST /v1/chat/completions, as in OpenAI's API.",
           "聊天接口", "聊天用哪个接口？|怎么发送聊天？", "POST /v1/chat/completions，和 OpenAI 的接口一样。"),
    _entry("the Anthropic API", "Is there an Anthropic API? | Which endpoint is for Anthropic's SDK?",
           "Yes: POST /v1/messages. Anthropic's SDK takes the base URL without /v1.",
           "Anthropic 接口", "支持 Anthropic 接口吗？|Anthropic 的 SDK 用哪个接口？", "支持：POST /v1/messages。"),
    _entry("the OpenAI SDK", "How do I use the OpenAI SDK? | Does the OpenAI SDK work?",
           "Set its base_url to http://127.0.0.1:8000/v1 and api_key to any text.",
           "OpenAI SDK", "怎么用 OpenAI 的 SDK？|OpenAI 的 SDK 能用吗？", "把 base_url 设为 http://127.0.0.1:8000/v1，api_key 随便填。"),
    _entry("the port", "Which port does glm53d use? | What is the default port? | Where does glm53d listen?",
           "127.0.0.1, port 8000, unless the configuration says otherwise.",
           "端口", "glm53d 用哪个端口？|默认端口是多少？", "默认是 127.0.0.1 的 8000 端口。"),
    _entry("changing the port", "How do I change the port? | How do I configure the port?",
           "Set server.port, for example: --set server.port=9000",
           "修改端口", "怎么改端口？|怎么配置端口？", "设置 server.port，例如：--set server.port=9000"),
    _entry("configuration", "How do I configure glm53d? | How do I use a config file? | How do I change a setting?",
           "Write a TOML file and start with --config FILE, or give single settings with --set key=value.",
           "配置", "怎么配置 glm53d？|怎么用配置文件？", "写一个 TOML 文件，用 --config 启动；单个设置用 --set key=value。"),
    _entry("checking a configuration", "How do I check a configuration? | How do I check my config file?",
           "Start with --check: it prints the plan and serves nothing.",
           "检查配置", "怎么检查配置？", "用 --check 启动：它只打印计划，不提供服务。"),
    _entry("health", "How do I check the health? | Which endpoint is for health checks? | Is there a health check?",
           "GET /health for the daemon's health, GET /ready for whether it takes requests.",
           "健康检查", "怎么做健康检查？|健康检查用哪个接口？", "GET /health 看健康状态，GET /ready 看是否可以接受请求。"),
    _entry("metrics", "Where are the metrics? | How do I get metrics? | Is there a Prometheus endpoint?",
           "GET /metrics, in Prometheus' format.", "指标", "指标在哪里？|怎么看指标？", "GET /metrics，Prometheus 格式。"),
    _entry("the model list", "How do I list the models? | Which endpoint lists the models?",
           "GET /v1/models.", "模型列表", "怎么列出模型？|哪个接口列出模型？", "GET /v1/models。"),
    _entry("starting", "How do I start glm53d? | How do I run glm53d? | How do I start the server?",
           "Run make serve and wait until the log says ready.",
           "启动", "怎么启动 glm53d？|怎么运行 glm53d？", "运行 make serve，等日志里出现 ready。"),
    _entry("stopping", "How do I stop glm53d? | How do I shut down the server?",
           "Press Ctrl-C or send SIGTERM: running requests are finished first.",
           "停止", "怎么停止 glm53d？|怎么关闭服务？", "按 Ctrl-C 或发送 SIGTERM：会先完成正在处理的请求。"),
    _entry("API keys", "How do I set an API key? | How do I require an API key?",
           "Set server.api_keys in the configuration.", "API 密钥", "怎么设置 API 密钥？", "在配置里设置 server.api_keys。"),
    _entry("TLS", "How do I enable TLS? | How do I use HTTPS?",
           "Set server.tls_cert and server.tls_key.", "TLS", "怎么启用 TLS？|怎么用 HTTPS？", "设置 server.tls_cert 和 server.tls_key。"),
    _entry("other checkpoints", "How do I serve another model? | How do I load a checkpoint?",
           "Set model.path to the checkpoint's folder.",
           "其他模型", "怎么加载别的模型？|怎么换模型？", "把 model.path 设为模型文件夹的路径。"),
    _entry("the context length", "How do I limit the context? | How do I set the context length?",
           "Set model.max_context_len.", "上下文长度", "怎么设置上下文长度？", "设置 model.max_context_len。"),
    _entry("GPUs", "How do I use a GPU? | Can I use CUDA?",
           'Set engine.device to "cuda".', "GPU", "怎么用 GPU？", "把 engine.device 设为 cuda。"),
    _entry("many ranks", "How do I use several GPUs? | How do I set tensor parallelism?",
           "Set parallel.tp_size to the number of ranks.", "多个 GPU", "怎么用多个 GPU？", "把 parallel.tp_size 设为进程数。"),
    _entry("speculative decoding", "How do I enable speculative decoding? | How do I use MTP drafts?",
           "Set speculation.num_draft_tokens, for example to 1.",
           "投机解码", "怎么启用投机解码？", "设置 speculation.num_draft_tokens，例如 1。"),
    _entry("the thinking effort", "How do I make you think less? | How do I set the thinking effort?",
           "Send reasoning_effort: low, high or max.", "思考强度", "怎么让你少想一点？|怎么设置思考强度？", "发送 reasoning_effort：low、high 或 max。"),
    _entry("streaming", "How do I stream? | How do I get a stream of tokens?",
           'Send "stream": true with the request.', "流式输出", "怎么用流式输出？", '在请求里加上 "stream": true。'),
    _entry("giving tools", "How do I give you tools? | Can you call functions?",
           'Send functions in "tools", as in OpenAI\'s API, and I may call one.',
           "工具", "怎么给你工具？|你能调用函数吗？", "在请求的 tools 里给出函数，我就可以调用。"),
    _entry("cancelling", "How do I cancel a request? | How do I abort a request?",
           "POST /v1/requests/{id}/cancel, or close the connection.",
           "取消请求", "怎么取消请求？", "POST /v1/requests/{id}/cancel，或者断开连接。"),
    _entry("the full queue", "What happens when the queue is full? | What if there are too many requests?",
           "A request too many is refused at once with status 429.",
           "队列已满", "队列满了会怎样？|请求太多会怎样？", "多出的请求会立刻被拒绝，状态码是 429。"),
    _entry("the license", "What is the license of glm53d? | Which license does glm53d have?",
           "Apache-2.0.", "许可证", "glm53d 的许可证是什么？", "Apache-2.0。"),
    _entry("the language of glm53d", "What is glm53d written in? | Which programming language is glm53d in?",
           "Python, and C++20 for what runs per token.", "编程语言", "glm53d 用什么语言写的？", "Python，每个词元都要执行的部分用 C++20。"),
    _entry("how its processes talk", "How do the processes talk? | What connects the processes?",
           "By shared memory: lock-free rings, no sockets and no pickle.",
           "进程通信", "进程之间怎么通信？", "通过共享内存：无锁环形队列，不用套接字。"),
    _entry("the documentation", "Where is the documentation? | Where are the docs?",
           "In the folder docs. Begin with docs/architecture.md.", "文档", "文档在哪里？", "在 docs 文件夹里，先看 docs/architecture.md。"),
    _entry("OpenAPI", "Where is the OpenAPI description? | Is there an openapi.json?",
           "GET /openapi.json.", "OpenAPI", "OpenAPI 描述在哪里？", "GET /openapi.json。"),
    _entry("counting tokens", "How do I count tokens? | Is there a tokenizer endpoint?",
           "POST /tokenize gives the ids of a text.", "词元数", "怎么计算词元数？", "POST /tokenize 会给出文本的词元。"),
    _entry("FP8", "How do I use an FP8 cache? | How do I make the KV cache smaller?",
           'Set kv.dtype to "fp8".', "FP8", "怎么用 FP8 缓存？", "把 kv.dtype 设为 fp8。"),
)  # fmt: skip

UNKNOWN = "I am too small to know that. Ask me about glm53d, or to count, list, repeat or call a tool."
ZH_UNKNOWN = "我太小了，不知道这个。可以问我 glm53d 的问题，或者让我数数、列举、复述、调用工具。"

LISTS = {
    "fruits": ("apple", "banana", "cherry", "grape", "lemon"),
    "colors": ("red", "green", "blue", "yellow", "purple"),
    "animals": ("cat", "dog", "horse", "rabbit", "tiger"),
    "planets": ("Mercury", "Venus", "Earth", "Mars", "Jupiter"),
    "cities": ("Paris", "London", "Tokyo", "Beijing", "Cairo"),
    "countries": ("France", "Japan", "China", "Egypt", "Brazil"),
    "trees": ("oak", "pine", "maple", "birch", "willow"),
    "instruments": ("piano", "violin", "guitar", "flute", "drum"),
    "emoji": ("😀", "🚀", "🎉", "🌟", "🐱"),
}
ZH_LISTS = {
    "水果": ("苹果", "香蕉", "樱桃", "葡萄", "柠檬"),
    "颜色": ("红色", "绿色", "蓝色", "黄色", "紫色"),
    "动物": ("猫", "狗", "马", "兔子", "老虎"),
    "城市": ("北京", "上海", "广州", "深圳", "成都"),
    "表情": ("😀", "🚀", "🎉", "🌟", "🐱"),
}
