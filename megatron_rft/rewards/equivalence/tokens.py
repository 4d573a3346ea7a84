r"""Cuts an answer into tokens with one name for each thing: "\dfrac12", "½" and "\frac{1}{2}" begin with \frac.

A token is a number, a letter, a word, a command with its backslash, a sign, or the words of \text{...} after a
quotation mark.
"""

import re
import unicodedata
from typing import NamedTuple

CHARACTERS = {
    "−": "-", "–": "-", "—": "-", "‑": "-", "×": "*", "·": "*", "⋅": "*", "∙": "*", "÷": "/", "π": r"\pi ",
    "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "≡": r"\equiv ", "°": r"\degree ",
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "±": r"\pm ", "⟨": r"\langle ", "⟩": r"\rangle ",
    "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "½": r"\frac12 ", "⅓": r"\frac13 ", "⅔": r"\frac23 ", "→": "=",
    "¼": r"\frac14 ", "¾": r"\frac34 ", "²": "^2 ", "³": "^3 ", "‘": "'", "’": "'", "“": '"', "”": '"', "√": r"\sqrt ",
    "：": ":", "，": ",", "％": "%", "（": "(", "）": ")", "$": "", "£": "", "€": "", "¥": "", "~": " ",
}  # fmt: skip
GROUPED = r"(?<!\d,)[1-9]\d{0,2}(?:(?:,|(?:\{,\}|,?(?:\\[,!;: ])+)\s*)\d{3})+(?!\d)(?:\.\d+)?"  # 4\,060 and 11,\! 111
SPACED = re.compile(r"-?[1-9]\d{0,2}(?: \d{3})+", re.ASCII)  # 4 060
MONEY = re.compile(r"\\\$|(?:\A|(?<=\s))[$](?=\s*[\d.])|([£€¥])")
COINS = {"£": "pound", "€": "euro", "¥": "yen"}
DEGREE = re.compile(r"\^\s*(?:\\circ(?![a-z])|\{\s*\\circ\s*\})")
TEXT = r"\\(?:text(?:bf|rm|it|sf|tt)?|mbox|math(?:rm|sf)|operatorname\*?|hbox)\s*\{(?P<text>[^{}]*)\}"
TOKEN = re.compile(
    rf"(?P<space>\s*)(?:{TEXT}"
    r"|\\[bB]igg?[lrm]?(?![a-z])|\\(?:left|right)(?![a-z])\s*\.?|\\hspace\{[^{}]*\}"
    rf"|(?P<number>(?:{GROUPED}|\d+\.(?=\\(?:overline|bar))|\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{{1,3}}(?![\w.]))?)"
    r"|\\(?P<around>begin|end)\s*\{(?P<name>\w+)\*?\}(?:\s*\{[clr| ]*\})?"
    r"|(?P<token>\\[a-zA-Z]+|\\.|[aApP]\.[mM]\b\.?|[a-zA-Z]+|<=|>=|=>|!=|\*\*|\S))",
    re.ASCII,
)
SAME = {
    r"\frac": r"\dfrac \tfrac \cfrac", r"\le": r"\leq \leqslant <=", r"\ge": r"\geq \geqslant >=", "<": r"\lt",
    ">": r"\gt", "*": r"\times \cdot \ast \cdotp", "/": r"\div", "^": "**", r"\{": r"\lbrace", r"\}": r"\rbrace",
    r"\ne": r"\neq !=", "|": r"\mid \vert \lvert \rvert \|", r"\approx": r"\simeq \thickapprox \doteq \sim",
    r"\degree": r"degrees degree \circ", "%": r"\% percent", r"\emptyset": r"\varnothing", r"\setminus": r"\backslash",
    r"\mod": r"\pmod \bmod mod", r"\infty": "infinity inf oo", r"\binom": r"\dbinom \tbinom", r"\to": r"\rightarrow",
    "'": r"\prime", "(": r"\langle", ")": r"\rangle", "=": "=>", "am": "a.m. a.m A.M. A.M", "pm": "p.m. p.m P.M. P.M",
    r"\arctan": "atan", r"\arcsin": "asin", r"\arccos": "acos",
}  # fmt: skip
NAMES = {other: name for name, others in SAME.items() for other in others.split()}
BARE = "pi sqrt lg log ln sin cos tan gcd lcm max min exp det arctan arcsin arccos"  # commands without a backslash
NAMES |= {name: "\\" + name for name in BARE.split()}
NO_TOKENS = (
    r"\, \; \: \! \( \) \[ \] \quad \qquad \thinspace \medspace \hfill \displaystyle \textstyle \limits \nolimits "
    r"\mathbf \mathit \mathcal \boldsymbol \bm \vec \overrightarrow \hat \widehat \boxed \fbox"
)
SKIPPED = {"\\ ", *NO_TOKENS.split()}


class Token(NamedTuple):
    text: str
    apart: bool  # from the token before


def tokens(text: str) -> tuple[list[Token], str]:
    """Return the tokens of an answer, and the name of its currency or ""."""
    money = MONEY.search(text) if text.count("$") % 2 or "\\$" in text or not text.isascii() else None
    text = _plain(DEGREE.sub(r"\\degree ", text.replace("\\$", ""))).strip().rstrip(".,;:").strip()
    text = text.replace(" ", "") if SPACED.fullmatch(text) else text
    return _cut(text), COINS.get(money[1] or "", "dollar") if money else ""


def _cut(text: str) -> list[Token]:
    found: list[Token] = []
    for match in TOKEN.finditer(text):
        apart = bool(match["space"]) or not found
        if match["text"] is not None:
            found += _words(match["text"].strip(), match[0])
        elif match["around"]:
            found.append(Token(rf"\begin {match['name']}" if match["around"] == "begin" else r"\end", apart))
        elif token := match["number"] or match["token"]:
            token = NAMES.get(token, token.translate(UNGROUPED) if {"\\", "{"} & set(match["number"] or "") else token)
            found += [] if token in SKIPPED else [Token(token, apart)]
    return found


def _words(content: str, command: str) -> list[Token]:
    """Cut a text command: words stay together, and anything else is read as if it stood outside."""
    if "operatorname" in command:
        return [Token("\\" + content, True)]
    if re.search(r"[^a-zA-Z\s'.,-]", content) or len(content.strip("., ")) < 2:
        return _cut(content)
    return [Token(NAMES.get(content, f'"{content}'), True)]


def _plain(text: str) -> str:
    """Convert to ASCII where possible. Digits of another script are converted if all digits of the text belong to
    it."""
    if text.isascii():
        return text.translate(TABLE)
    scripts = {unicodedata.name(letter).rpartition("DIGIT")[0] for letter in text if letter.isdecimal()}
    if len(scripts) == 1:
        text = "".join(str(unicodedata.decimal(letter)) if letter.isdecimal() else letter for letter in text)
    return "".join(" " if letter.isspace() else letter for letter in text).translate(TABLE)


TABLE, UNGROUPED = str.maketrans(CHARACTERS), str.maketrans("", "", r"\,!;: {}")
