"""What output must look like, as one grammar in llguidance's Lark dialect. [R35]"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grammar:
    """A form that the output has, always. It was made by us or checked: text is a grammar of llguidance's Lark dialect.

    Special tokens stand in it as ids, <[154829]>, so what it allows as text can never spell one.
    """

    text: str
    after_thinking: bool  # holds from the token behind </think> on; else from the first token on
    param: str = ""  # path of the request's field that asks for it: what an error names
