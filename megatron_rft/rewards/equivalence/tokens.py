r"""Cuts an answer into tokens with one name for each thing: "\dfrac12", "½" and "\frac{1}{2}" begin with \frac.

A token is a number, a letter, a word, a command with its backslash, a sign, or the words of \text{...} after a
quotation mark.
"""

import re
import unicodedata
from functools import lru_cache
from typing import NamedTuple

from megatron_rft.rewards.equivalence.words import MAYBE, is_number, spoken

CHARACTERS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "×": "*", "·": "*", "⋅": "*", "∙": "*", "÷": "/", "⁄": "/", "∕": "/",
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "≡": r"\equiv ",
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "±": r"\pm ", "⟨": r"\langle ", "⟩": r"\rangle ",
    "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "°": r"\degree ", "√": r"\sqrt ", "→": "=", "元": " yuan",
    "‘": "'", "’": "'", "“": '"', "”": '"', 
}  # fmt: skip
GROUPED = r"(?<!\d,)[1-9]\d{0,2}(?:(?:,|(?:\{,\}|,?(?:\\[,!;: ])+)\s*)\d{3})+(?!\d)(?:\.\d+)?"  # 4\,060 and 11,\! 111
SPACED = re.compile(r"-?[1-9]\d{0,2}(?: \d{3})+", re.ASCII)  # 4 060
COINS = {"€": "euro", "eur": "euro", "£": "sterling", "gbp": "sterling", "¥": "¥", "rmb": "yuan", "cny": "yuan"}
COINS |= {"jpy": "yen", "₹": "rupee", "inr": "rupee", "rs": "rupee"}
RAISED = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+")
COIN = re.compile(r"\bUS\$|\bUSD\b|(?P<coin>[€£¥₹]|\b(?:EUR|GBP|RMB|CNY|JPY|INR)\b|\bRs\b\.?)")
MONEY = re.compile(rf"(?:\bUS\s*)?\\\$|{COIN.pattern}|(?:\A|(?<=\s))[$](?=\s*[\d.])")
REWRITTEN = [  # of the text, before it is cut
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\(?:text)?color(?:box)?\s*\{[^{}]*\}|\\bbox\s*\[[^][]*\]", " "),
        (r"\\(?:tag\*?|label|[hv]space\*?|[hv]?phantom)\s*\{[^{}]*\}", " "),
        (r"\^\s*(?:\\circ(?![a-z])|\{\s*\\circ\s*\})", r"\\degree "),
        (r"\{:\}|\\colon(?![a-z])", ":"),
        (
            r"\\left\s*\\\{\s*\\begin\{(?:array|aligned)\}(?:\{[clr| ]*\})?(.*?)\\end\{\w+\}\s*\\right\s*(?:\.|\Z)",
            r"\\begin{cases}\1\\end{cases}",
        ),
        (r"\A((?:\\left\s*)?[\[(][^][()&]*[\])])\s*\^\s*\{?\s*(?:T|\\top|\\mathsf\{T\})\s*\}?\Z", r"\1"),
        (r"\bC\(([^(),]+),([^(),]+)\)", r"\\binom{\1}{\2}"),
        (r"(?:\{\})?[_^]\{?(\w+)\}?\s*C_\{?(\w+)\}?", r"\\binom{\1}{\2}"),
        (
            r"(\d\s*\\(?:text|mathrm)\s*\{[\s~]*)([hs])[\s.]*\}(?!\s*[\^/])",
            lambda found: found[1] + {"h": "hour}", "s": "second}"}[found[2]],
        ),
        (r"(?<!\\)\bmins?\b(?!\}?\s*(?:[({_]|\\left|\\\{))", "minute"),
        (r"\bper\s?cent\b", r"\\%"),
        (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", "*"),
        (r"(\.\d*)\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?", r"\1\\overline{\2\3\4}"),
        (r"(\.\d*)\((\d+)\)", r"\1\\overline{\2}"),
        (r"(\.\d{0,20}?)(?:(\d)\2\2+|(\d{2,12}?)\3+)(?:\\[lc]?dots|\.\.+)", r"\1\\overline{\2\3}"),
    )
]
UNUSUAL = re.compile(
    r"\\(?:right\s*(?:\.|\Z)|(?:text)?color|bbox|tag|label|[hv]|circ|colon|[lc]?dot)|[\])]\s*\^|C[(_]"
    r"|\{[\s~]*[hs:][\s.}]|\d\s*[xX]\s*10|\.\d*[(.]"
)
WORDY = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2}")
TRAILING = re.compile(r"(?:\\[,;:! ]|[.,;:\s]|\\\Z)+\Z")
TEXT = r"\\(?:text(?:bf|rm|it|sf|tt|sl|sc|normal)?|emph|mbox|math(?:rm|sf)|operatorname\*?|hbox)\s*\{(?P<text>[^{}]*)\}"
TOKEN = re.compile(
    rf"(?P<space>\s*)(?:{TEXT}"
    r"|\\[bB]igg?[lrm]?(?![a-z])|\\(?:left|right)(?![a-z])\s*\.?|\\hspace\{[^{}]*\}"
    rf"|(?P<number>(?:{GROUPED}|\d+\.(?=\\(?:overline|bar))|\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{{1,3}}(?![\w.]))?)"
    r"|\\(?P<around>begin|end)\s*\{(?P<name>\w+)\*?\}(?:\s*\{[clr| ]*\})?"
    r"|(?P<token>\\[a-zA-Z]+|\\.|[aApP]\.[mM]\b\.?|[a-zA-Z]+|<=|>=|=>|!=|\*\*|\S))",
    re.ASCII,
)
SAME = {
    r"\frac": r"\dfrac \tfrac \cfrac \nicefrac \sfrac", r"\le": r"\leq \leqslant <=", r"\ge": r"\geq \geqslant >=",
    "<": r"\lt", ">": r"\gt", "*": r"\times \cdot \ast \cdotp", "/": r"\div", "^": "**",
    r"\{": r"\lbrace", r"\}": r"\rbrace",
    r"\ne": r"\neq !=", "|": r"\mid \vert \lvert \rvert \|", r"\approx": r"\simeq \thickapprox \doteq \sim",
    r"\degree": r"degrees degree \circ", "%": r"\% percent", r"\emptyset": r"\varnothing", r"\setminus": r"\backslash",
    r"\mod": r"\pmod \bmod mod", r"\infty": "infinity inf oo", r"\binom": r"\dbinom \tbinom", r"\to": r"\rightarrow",
    "'": r"\prime", "(": r"\langle", ")": r"\rangle", "=": r"=> \Rightarrow \implies",
    "am": "a.m. a.m A.M. A.M", "pm": "p.m. p.m P.M. P.M",
    r"\arctan": "atan", r"\arcsin": "asin", r"\arccos": "acos",
}  # fmt: skip
NAMES = {other: name for name, others in SAME.items() for other in others.split()}
BARE = "pi sqrt lg log ln sin cos tan gcd lcm max min exp det arctan arcsin arccos"  # commands without a backslash
NAMES |= {name: "\\" + name for name in BARE.split()}
NO_TOKENS = (
    r"\, \; \: \! \( \) \[ \] \quad \qquad \thinspace \medspace \hfill \displaystyle \textstyle \limits \nolimits "
    r"\bf \rm \it \large \Large \LARGE \huge \Huge \small \underline \ensuremath \mathord \therefore "
    r"\enspace \blacksquare \square \Box \checkmark \qed "
    r"\mathbf \mathit \mathcal \boldsymbol \bm \vec \overrightarrow \hat \widehat \boxed \fbox"
)
SKIPPED = {"\\ ", *NO_TOKENS.split()}


class Token(NamedTuple):
    text: str
    apart: bool  # from the token before


@lru_cache(4096)
def tokens(text: str) -> tuple[list[Token], str]:
    """Return the tokens of an answer, and the name of its currency or ""."""
    text = _plain(text.strip())
    wordy = WORDY.search(text)
    for pattern, new in REWRITTEN if wordy or UNUSUAL.search(text) else ():
        text = pattern.sub(new, text)
    text = TRAILING.sub("", text) if text[-1:] in set(" .,;:!\\") else text
    signed = text.count("$") % 2 or "\\$" in text or not text.isascii() or (wordy and COIN.search(text))
    money = MONEY.search(text) if signed else None
    text = MONEY.sub("", text) if money else text
    text = (spoken(text) if wordy and MAYBE.search(text) else text).replace("$", "")
    text = text.replace(" ", "") if SPACED.fullmatch(text) else text
    return _cut(text), COINS.get((money["coin"] or "").lower().rstrip("."), "dollar") if money else ""


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
    """Cut a text command at commas and "and". Anything else than words is read as if it stood outside."""
    if "operatorname" in command:
        return [Token("\\" + content, True)]
    if re.search(r"[^a-zA-Z\s'.,-]", content) or len(content.strip("., ")) < 2:
        return _cut(content)
    parts = [content] if is_number(content) else re.split(r"(,|\band\b)", content)
    words = [each.strip() for each in parts if each.strip()]
    return [Token(each if each in (",", "and") else NAMES.get(each, f'"{each}'), True) for each in words]


def _plain(text: str) -> str:
    """Convert to ASCII where possible. Digits of another script are converted if all digits of the text belong to
    it."""
    if text.isascii():
        return text.replace("~", " ")
    text = RAISED.sub(lambda found: f"^{{{found[0]}}}", text)
    text = "".join(_character(letter) for letter in text)
    scripts = {unicodedata.name(letter).rpartition("DIGIT")[0] for letter in text if letter.isdecimal()}
    if len(scripts) == 1:
        text = "".join(str(unicodedata.decimal(letter)) if letter.isdecimal() else letter for letter in text)
    return text


def _character(letter: str) -> str:
    """½ is \\frac{1}{2}; what has no width goes; full-width forms of a letter are the letter, but ① is no 1."""
    if unicodedata.decomposition(letter).startswith("<circle>"):
        return letter
    if letter.isascii() or unicodedata.category(letter) == "Cf":
        return letter if letter.isascii() else ""
    plain = unicodedata.normalize("NFKC", letter)
    upper, slash, lower = plain.partition("⁄")
    if slash and lower:
        return rf"\frac{{{upper}}}{{{lower}}} "
    return " " if letter.isspace() else plain.translate(TABLE)


TABLE, UNGROUPED = str.maketrans(CHARACTERS), str.maketrans("", "", r"\,!;: {}")
