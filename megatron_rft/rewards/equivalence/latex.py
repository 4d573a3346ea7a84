r"""One spelling of an answer: "\dfrac12", "\frac{1}{2}" and "½" become "\frac{1}{2}". Text only."""

import re
import unicodedata

SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "‑": "-", "×": r"\cdot ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/",
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "°": r"^\circ ",
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "±": r"\pm ", "⟨": r"\langle ", "⟩": r"\rangle ",
    "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
    "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "²": "^{2}", "³": "^{3}", "‘": "'", "’": "'", "“": '"', "”": '"',
    "：": ":", "，": ",", "％": "%", "（": "(", "）": ")",
}  # fmt: skip
ROOT = re.compile(r"√\s*(\d+|[a-z]|\([^()]*\))")
THOUSANDS = re.compile(r"(?<=\d)(?:\\[,!;: ]|~|\{,\}|,\\!|\\,\\!)\s*(?=\d{3}(?!\d))")  # 4\,060 and 11,\! 111
SPACED = re.compile(r"-?[1-9]\d{0,2}(?: \d{3})+")  # 4 060
SPACES = re.compile(
    r"(?<!\\)\\(?:[,;:! ]|quad|qquad|thinspace|medspace|hspace\{[^{}]*\}|hfill|displaystyle|textstyle)|~"
)
DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]")  # \( \) \[ \]
SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?|bigl|bigr|limits|nolimits)(?![a-z])\.?")
WORDS = re.compile(r"\\(?:text|mbox|textbf|textrm|textit|textsf|texttt|mathrm|mathsf|operatorname|hbox)\s*\{([^{}]*)\}")
FONTS = re.compile(
    r"\\(?:mathbf|mathit|mathcal|boldsymbol|bm|vec|overrightarrow|hat|widehat|boxed|fbox)\s*\{([^{}]*)\}"
)
# "3 cm", "3.5 hours": a number and a unit inside one text command; not "1st" or "4:30 PM".
MEASURED = re.compile(r"([-+]?\d[\d,]*(?:\.\d+)?)(?:\s+(?=[a-zA-Z])|(?!st|nd|rd|th)(?=[a-zA-Z]{2}))([a-zA-Z][^\d]*)")
ONE = r"(\d|[a-zA-Z]|\\[a-zA-Z]+)"
MOD = r"(?:\\[pb]?mod|\\text\{\s*mod\s*\}|\bmod\b)\s*\{?(\w+)\}?"
RENAMED = [
    (re.compile(r"\\[dtc]frac(?![a-z])"), r"\\frac"),
    (re.compile(r"\\(?:leq|leqslant|lt)(?![a-z])"), lambda m: "<" if m[0] == r"\lt" else r"\le "),
    (re.compile(r"\\(?:geq|geqslant|gt)(?![a-z])"), lambda m: ">" if m[0] == r"\gt" else r"\ge "),
    (re.compile(r"<="), r"\\le "),
    (re.compile(r">="), r"\\ge "),
    (re.compile(r"\\(?:times|ast|cdotp)(?![a-z])|(?<!\*)\*(?!\*)"), r"\\cdot "),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\\(?:lbrace)(?![a-z])"), r"\\{"),
    (re.compile(r"\\(?:rbrace)(?![a-z])"), r"\\}"),
    (re.compile(r"\\(?:neq)(?![a-z])"), r"\\ne "),
    (re.compile(r"\\(?:mid|vert|lvert|rvert)(?![a-z])"), "|"),
    (re.compile(r"\\(?:simeq|thickapprox|doteq)(?![a-z])|\\sim(?![a-z])"), r"\\approx "),
    (re.compile(r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![a-z])|\\degree(?![a-z])"), "°"),
    (re.compile(r"(?<=\d)\s*\\circ(?![a-z])"), "°"),
    (re.compile(r"(?<=[\d}])\s*degrees?\b|\\text\{degrees?\}"), "°"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\text\{\s*%\s*\}"), "%"),
    (re.compile(r"(?<=[\d}])\s*(?:\\text\{)?per\s?cent\}?(?![a-z])"), "%"),
    (re.compile(r"\\[$€£]|[$€£¥]|\\text\{[$]\}|\\(?:pounds|euro)(?![a-z])"), ""),
    (re.compile(r"\\varnothing|^\\\{\s*\\\}$"), r"\\emptyset "),
    (re.compile(r"^(?:\\text\{\s*)?no (?:real )?solutions?\s*\}?$", re.IGNORECASE), r"\\emptyset "),
    (
        re.compile(r"^(?:\\text\{\s*)?(?:DNE|(?:the )?(?:limit )?does(?: not|n't) exist)\s*\}?$", re.IGNORECASE),
        r"\\text{does not exist}",
    ),
    (
        re.compile(rf"\\text\{{\s*\(?mod (\w+)\)?\s*\}}|\(\s*{MOD}\s*\)|{MOD}"),
        lambda m: rf" \text{{mod}} {m[1] or m[2] or m[3]}",
    ),
    (re.compile(r"(?<![a-zA-Z\\])(?:infinity|inf|oo)(?![a-zA-Z])"), r"\\infty "),
    (re.compile(r"\b([aApP])\.\s?([mM])\b\.?"), r"\1\2"),
]
FRACTION = re.compile(rf"\\frac\s*(?:\{{([^{{}}]*)\}}|{ONE})\s*(?:\{{([^{{}}]*)\}}|{ONE})")
RADICAL = re.compile(rf"\\sqrt\s*{ONE}")


def one_spelling(text: str) -> str:
    """Remove delimiters, sizes and meaningless spaces from an answer, and use one name for each command."""
    text = _plain_characters(text).strip()
    text = DELIMITERS.sub("", text)
    text = SIZES.sub("", THOUSANDS.sub("", text))
    text = SPACES.sub(" ", text).replace("{,}", ",")
    for _ in range(3):  # they nest
        text = FONTS.sub(r"{\1}" if "_{" in text else r" \1 ", WORDS.sub(_words, text))
    for pattern, name in RENAMED:
        text = pattern.sub(name, text)
    text = RADICAL.sub(lambda m: rf"\sqrt{{{m[1]}}}", FRACTION.sub(_fraction, text))
    text = re.sub(r"\s+", " ", text).strip().rstrip(".,;:").strip()
    return text.replace(" ", "") if SPACED.fullmatch(text) else text


def squeeze(text: str) -> str:
    """For comparing texts: spaces are left only where they part two digits or two words; a/b is a fraction."""
    text = re.sub(r"(?<![\w}])(-?)(\d+)\s*/\s*(\d+)(?![\w{(^])", r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"(?<=\d)\s*\\cdot\s*(?=[a-z\\(])", "", text)
    text = re.sub(r"\s*([^\w\s])\s*", r"\1", text)
    text = re.sub(r"(?<=\d) (?=[a-zA-Z])|(?<=[a-zA-Z]) (?=\d)", "", text)
    return re.sub(r"([_^])\{(\w)\}", r"\1\2", text)


def split(text: str, separators: str) -> list[str]:
    """Split at separators (a regular expression) outside of all brackets. Returns the parts with the separators
    between."""
    pattern, parts, depth, start, place = re.compile(separators), [], 0, 0, 0
    while place < len(text):
        if depth == 0 and (match := pattern.match(text, place)) and match.end() > place:
            parts += [text[start:place].strip(), match[0].strip()]
            start = place = match.end()
            continue
        if text[place] == "\\" and text.startswith(("\\begin", "\\end"), place):
            depth += 1 if text.startswith("\\begin", place) else -1
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[place], 0)
        depth += {"\\langle": 1, "\\rangle": -1}.get(text[place : place + 7], 0)
        place += 1
    return [*parts, text[start:].strip()]


def _plain_characters(text: str) -> str:
    """Convert to ASCII where possible. Digits of another script are converted if all digits of the text belong to
    it."""
    scripts = {unicodedata.name(letter).rpartition("DIGIT")[0] for letter in text if letter.isdecimal()}
    if len(scripts) == 1:
        text = "".join(str(unicodedata.decimal(letter)) if letter.isdecimal() else letter for letter in text)
    text = ROOT.sub(lambda m: rf"\sqrt{{{m[1].strip('()')}}}", text)
    return "".join(SYMBOLS.get(letter, " " if letter.isspace() else letter) for letter in text)


def _words(match: re.Match) -> str:
    """Rewrite a text command: one letter is a name, as in \\mathrm{i}; others are words, or a number and its unit."""
    content = match[1].strip()
    if not re.search(r"[a-zA-Z]", content):
        return f" {content} "
    if measured := MEASURED.fullmatch(content):
        return rf" {measured[1]} \text{{{measured[2]}}} "
    if match[0].startswith(r"\operatorname") or len(content) == 1:
        return f"\\{content} " if len(content) > 1 else f" {content} "
    return f"\\text{{{content}}}"


def _fraction(match: re.Match) -> str:
    upper, lower = match[1] or match[2] or "", match[3] or match[4] or ""
    return rf"\frac{{{upper.strip()}}}{{{lower.strip()}}}"
