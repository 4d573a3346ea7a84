"""Reads answers and formulas into canonical trees (trees.py), by recursive descent over their tokens."""

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache, partial
from itertools import product

from megatron_rft.rewards.equivalence import trees
from megatron_rft.rewards.equivalence.tokens import Token, tokens
from megatron_rft.rewards.equivalence.trees import MINUS, ONE, Numeral, Tree, nodes, plus, power, ratio, rebuilt, times
from megatron_rft.rewards.equivalence.words import LARGE, is_unit, measures, number

BIG = {"int", "iint", "iiint", "oint", "sum", "prod", "lim"}
TRIGONOMETRY = {"sin", "cos", "tan", "cot", "sec", "csc"}
FUNCTIONS = "arcsin arccos arctan arccot sinh cosh tanh log ln lg exp gcd lcm max min det arg Re Im deg dim"
NAMED = TRIGONOMETRY | set(FUNCTIONS.split())
CLOSERS = {"(": ")]", "[": ")]", "{": "}", r"\{": (r"\}", "}"), r"\lfloor": (r"\rfloor",), r"\lceil": (r"\rceil",)}
ORDER = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
EQUAL = {"=": "=", r"\approx": "~", r"\equiv": "="}
RELATIONS = {*ORDER, *EQUAL, r"\ne", r"\in", r"\to"}
WORDS_BETWEEN = ', ; & and or where \\lor "and "or "where "for'
SEPARATORS = {'", and', '", or', '"for all', *WORDS_BETWEEN.split()}
ENDS = SEPARATORS | RELATIONS | {")", "]", "}", r"\}", r"\cup", ""}
NO_FACTOR = ENDS | {r"\pm", r"\mp", r"\right", r"\left", r"\rfloor", r"\rceil", r"\mod", r"\\"}
NO_FACTOR |= {r"\setminus", r"\end", r"\over", r"\choose"}
INTRODUCTION = "the final answer is are value values of so thus therefore hence we get it solution solutions sum about"
SHORT = {"yes", "no", "odd", "one", "two", "six", "ten"}  # words; other runs of two or three letters are products
ARTICLES, LEADING = {"the", "a", "an"}, {"the", "a", "an", "it", "is", "on", "there"}
EMPTY, TO, PRIME = ("s", r"\emptyset"), ("s", r"\infty"), ("s", "'")
FROM = times(MINUS, TO)
REALS = ("u", ("()", "(", ")", FROM, TO))
WORDS = {"all real numbers": REALS, "all reals": REALS, "real numbers": REALS}
NO_SOLUTION = re.compile("no (?:real )?solutions?(?: exists?)?")
WORDS |= dict.fromkeys(("dne", "limit does not exist"), ("text", "does not exist"))
MOST = 1000  # attempts to read some tokens in one way
DIGITS, AFTER = set("0123456789."), Token("", True)


@lru_cache(4096)
def read(text: str) -> Tree | None:
    """Return the tree of an answer; None if it is no formula."""
    found, currency = tokens(text)
    try:
        reader = Reader(found)
        reader.skip_introduction()
        tree = reader.statement()
    except (ArithmeticError, ValueError, RecursionError, IndexError, TypeError):
        return None
    if reader.next:
        return None
    return ("unit", tree, currency) if currency and tree[0] != "unit" else tree


def is_word(token: str) -> bool:
    return token[:1] == '"' or (len(token) > 1 and token.isalpha())


def is_name(tree: Tree) -> bool:
    """Whether an equation can define it: x, f(x), S_n, (x, y)."""
    if tree[0] == "s":
        return tree[1] not in (r"\infty", r"\pi", "e", "i", "°")
    return tree[0] == "()" and all(map(is_name, tree[3:]))


class Reader:
    """Recursive descent. `attempt` goes back where a way to read fails."""

    def __init__(self, found: list[Token]):
        self.tokens, self.place, self.bars, self.attempts = found + 2 * [AFTER], 0, 0, 0  # `ahead` looks two ahead

    @property
    def next(self) -> str:
        return self.tokens[self.place].text

    def ahead(self, count: int) -> str:
        return self.tokens[self.place + count].text

    def take(self, *wanted: str) -> str:
        if not self.next or (wanted and self.next not in wanted):
            raise ValueError(self.next)
        self.place += 1
        return self.ahead(-1)

    def has(self, *wanted: str) -> bool:
        found = self.next in wanted and self.next != ""
        self.place += found
        return found

    def attempt(self, parse: Callable[[], Tree | None]) -> Tree | None:
        """Return what `parse` reads, or None and stay here."""
        state = self.tokens, self.place, self.bars
        self.attempts += 1
        trees.within_limit()
        if self.attempts > MOST:
            raise RecursionError("too many ways to read it")
        with suppress(ValueError):
            if (found := parse()) is not None:
                return found
        self.tokens, self.place, self.bars = state
        return None

    def cut(self, place: int, pieces: Iterable[str]) -> None:
        """Replace a token by its parts."""
        self.tokens = [*self.tokens[:place], *(Token(each, False) for each in pieces), *self.tokens[place + 1 :]]

    def skip_introduction(self) -> None:
        """Skip "The answer is" and a leading sign of equality."""
        while is_word(self.next) and self.ahead(1) not in ("", *SEPARATORS):
            if not set(self.next.lower().strip('"').split()) <= set(INTRODUCTION.split()):
                break
            self.place += 1
            self.has(":")
        self.has(*EQUAL)

    # Lists, chains and words

    def statement(self) -> Tree:
        """A list of items, one item, or inequalities as a union of intervals."""
        members = self.item()
        while self.has(*SEPARATORS) or (self.next == "(" and self.ahead(2) == r"\in"):
            members += [] if self.next in ENDS else self.item()
        if len(members) == 1:
            return _apart(members[0])
        if all(each[0] == "u" for each in members):
            return ("u", *(part for each in members for part in each[1:]))
        if members[0][0] == "=" and not any(each[0] == "=" for each in members[1:]):
            members[0] = members[0][-1]  # x = 2, 3
        return (",", *members)

    def item(self) -> list[Tree]:
        found = self.attempt(self.words) or self.chain()
        while found[0] == "unit" and (more := self.attempt(partial(self.with_smaller, found))):
            found = more
        several = any(each[:2] == ("f", "pm") for each in nodes(found))
        return [_signed(found, sign) for sign in "+-"] if several else [found]

    def with_smaller(self, large: Tree) -> Tree | None:
        """Add a part of one unit in a smaller unit: 20 minutes to 3 hours, 50 cents to "2 dollars and"."""
        self.has("and")
        small = self.product()
        counts = small[0] == "unit" and large[1][0] == small[1][0] == "n"
        for (what, size), (other, part) in product(measures(large[2]), measures(small[2])) if counts else ():
            if what == other and 0 < (share := small[1][1] * part / size) < 1 and part < size:
                return ("unit", ("n", Numeral(large[1][1] + share)), large[2])
        return None

    def words(self) -> Tree | None:
        """Words up to the end of an item: Friday, Quadrant I, ninety-nine."""
        said, is_long = [], False
        while self.next not in ENDS:
            token = self.take()
            if not (token.isalpha() or is_word(token) or token in "-'." or (said and token.isdecimal())):
                return None
            is_long |= token[:1] == '"' or len(token) > 3 or token.lower() in SHORT
            said += re.findall(r"[a-z\d]+", token.lower())
        if not is_long:
            return None
        while len(said) > 1 and said[0] in LEADING:
            said.pop(0)
        text, value = " ".join(each for each in said if each not in ARTICLES) or said[0], number(said)
        if isinstance(value, Fraction):
            return ("n", Numeral(value))
        return EMPTY if NO_SOLUTION.fullmatch(text) else WORDS.get(text, ("text", value or text))

    def chain(self) -> Tree:
        """a, a = b = c, a < b \\le c; inequalities for one name become intervals."""
        around = self.next == "(" and self.ahead(2) == r"\in" and self.take()
        defined = self.ahead(1) in ("(", "^") and self.attempt(self.defined)
        members, signs = [defined or self.joined()], []
        while self.next in RELATIONS:
            signs.append(self.take())
            members.append(self.joined())
        if self.has(r"\mod") or (self.next == "(" and self.ahead(1) == r"\mod" and self.take() and self.take()):
            members[-1] = ("f", "mod", members[-1], self.argument())
            self.has(")")
        if around:
            self.take(")")
        if not signs:
            return members[0]
        if signs == ["="] and is_name(members[1]) and not is_name(members[0]):
            members.reverse()  # 5 = x
        if set(signs) <= EQUAL.keys():
            return ("=", "".join(EQUAL[each] for each in signs), *members)
        kind = ("in",) if signs == [r"\in"] else ("<", " ".join(signs))
        return _interval(members, signs) or (*kind, *members)

    def defined(self) -> Tree | None:
        """A function that is defined: f(x) = ..., f^{-1}(x) = ..."""
        name = self.take()
        while not name.endswith(")") and len(name) < 20:
            name += self.take()
        plain = re.fullmatch(r"[a-zA-Z](?:\^\{?-1\}?)?\([a-zA-Z,]*\)", name)
        return ("s", re.sub("[{}]", "", name)) if plain and self.next in EQUAL else None

    def joined(self) -> Tree:
        """A formula, a ratio, or a union of intervals."""
        parts = [self.sum()]
        if self.has(":", "to", '"to'):
            last = self.sum()
            return ("unit", ("f", ":", *parts, last[1]), last[2]) if last[0] == "unit" else ("f", ":", *parts, last)
        while self.has(r"\cup"):
            parts.append(self.sum())
        if parts == [REALS] and self.has(r"\setminus"):
            left_out = self.primary()
            return _all_but(left_out[1]) if len(left_out) == 2 else ("f", "without", left_out)
        flat = [each for part in parts for each in (part[1:] if part[0] == "u" else (part,))]
        return ("u", *flat) if len(parts) > 1 else parts[0]

    # Formulas

    def sum(self) -> Tree:
        terms = [self.product()]
        while self.next in ("+", "-", r"\pm", r"\mp"):
            sign, term = self.take(), self.product()
            if term[0] == "unit":
                return ("unit", plus(*terms, _with_sign(sign, term[1])), term[2])
            terms.append(_with_sign(sign, term))
        if self.has(r"\over"):
            return times(plus(*terms), power(self.sum(), MINUS))
        return ("f", "binom", plus(*terms), self.sum()) if self.has(r"\choose") else plus(*terms)

    def product(self, *, chained: bool = True) -> Tree:
        factors = [self.signed() if chained else self.postfixed()]
        while self.next:
            if chained and self.has("*"):
                factors.append(self.signed())
            elif chained and self.has("/"):
                factors.append(power(self.signed(), MINUS))
            elif chained and is_word(self.next) and (unit := self.attempt(self.unit)):
                return ("unit", times(*factors), unit)
            elif self.begins_factor() and (chained or self.next[1:] not in NAMED):
                factors.append(self.postfixed())
            else:
                break
        return times(*factors)

    def begins_factor(self) -> bool:
        token = self.next
        if token[0] in DIGITS:
            return self.tokens[self.place - 1].text[-1] not in DIGITS  # 1 4 4 is no number
        if token == "(":
            return self.ahead(2) != r"\in" and self.ahead(1) != r"\mod"
        if token == "|":
            return not self.bars
        return token not in NO_FACTOR and (token[0] == "\\" or token in "[{" or token.isalpha())

    def unit(self) -> str | None:
        """Read the unit that ends an item: cm, square inches, m/s^2, \\text{apples}."""
        said, first = "", self.tokens[self.place]
        while self.next not in ENDS or (self.next == "}" and said.count("{") > said.count("}")):
            token = self.take()
            if not (is_word(token) or token in "^/{}*-" or (said and re.fullmatch(r"[a-zA-Z]|\d+", token))):
                return None
            if said.endswith(" ") and token[0] in DIGITS:  # 3 hours 20 minutes
                self.place -= 1
                break
            said += token.replace('"', " ") + (" " if is_word(token) else "")
        return said.strip() if is_unit(said.strip(), first.apart, '"' in first.text) else None

    def signed(self) -> Tree:
        if self.next in ("+", "-", r"\pm", r"\mp"):
            return _with_sign(self.take(), self.signed())
        return self.postfixed()

    def postfixed(self) -> Tree:
        found = self.primary()
        while self.next:
            if self.has("'"):
                found = power(found, PRIME)
            elif self.has("^"):
                exponent = self.argument(whole=True)
                found = ("f", "inverse", found) if exponent == MINUS else power(found, exponent)
            elif self.has("_"):
                digits, below = self.tokens[self.place - 2].text, self.argument()
                name = f"{found[1] if found[0] == 's' else found}_{below[1]}"
                found = ("f", "base", ("s", digits), below) if found[0] == "n" else ("s", name)
            elif self.has("!"):
                found = ("f", "!", found)
            elif self.has(r"\degree"):
                scale = self.next in ("C", "F") and self.ahead(1) in ENDS and self.take()
                found = ("unit", found, f"°{scale}") if scale else times(found, ("s", "°"))
            elif self.has("%"):
                value, places = (found[1], found[1].places) if found[0] == "n" else (ratio(found), None)
                share = value is not None and Numeral(value / 100, places=places and places + 2, percent=True)
                found = ("n", share) if share is not False else times(found, ("n", Numeral(1, 100)))
            else:
                break
        return found

    def argument(self, *, whole: bool = False) -> Tree:
        """Read {...}, or one token: of \\frac23 it is 2. `whole`: all of a number, as models write 2^10."""
        if self.has("-"):
            return _with_sign("-", self.argument(whole=whole))
        if len(self.next) > 1 and self.next.isalnum() and not (whole and self.next.isdecimal()):
            self.cut(self.place, self.next)
        return self.primary()

    def group(self) -> Tree:
        """Read (...), [...], {...}, \\{...\\}; (1, 2] is an interval."""
        opening, bars, self.bars = self.take(), self.bars, 0
        if opening in ("{", r"\{") and self.has(*CLOSERS[opening]):
            return EMPTY
        if opening in "([" and "," in self.next:  # (12,102) is a pair
            self.cut(self.place, re.findall(r"\d+|,", self.next))
        if opening == r"\{" and (found := self.attempt(self.builder)):
            return found
        inner = self.statement()
        closing, self.bars = self.take(*CLOSERS[opening]), bars
        members = inner[1:] if inner[0] == "," else (inner,)
        if opening == r"\{":
            return ("{}", *members)
        if opening == "[" and all(each[:3] == ("()", "[", "]") for each in members) and len({*map(len, members)}) == 1:
            return ("matrix", *(("row", *each[3:]) for each in members))
        return inner if opening == "{" or len(members) == 1 else ("()", opening, closing, *members)

    def builder(self) -> Tree:
        """Read \\{x | condition\\} as its condition: x \\ne 5 is two intervals."""
        self.take()
        if self.has(r"\in"):
            self.primary()
        self.take("|", ":", '"such that')
        found = self.statement()
        self.take(r"\}")
        return found if found[0] == "u" else ("f", "set", found)

    def primary(self) -> Tree:
        if self.next in ("(", "[", "{", r"\{"):
            return self.group()
        token = self.take()
        if token == "|":
            self.bars += 1
            inner = self.sum()
            self.bars -= 1
            self.take("|")
            return ("f", "abs", inner)
        if token[0] in DIGITS:
            return self.number(token)
        if token[0] == "\\":
            return self.command(token[1:])
        if token.isalpha() and token not in SEPARATORS:
            self.cut(self.place - 1, token)
            return ("s", token[0])
        if token == "'" or (token[:1] == '"' and self.next not in ENDS):
            return ("s", token)
        raise ValueError(token)

    def number(self, token: str) -> Tree:
        """Read a number, a mixed number, a repeating decimal or one with its multiplier."""
        digits, _, exponent = token.replace(",", "").lower().partition("e")
        value, decimals = Fraction(f"{digits}e{exponent or 0}"), len(digits.partition(".")[2])
        if "." in digits and self.has(r"\overline", r"\bar"):  # 0.1\overline{6} is 1/10 + 6/90
            _, again, _ = self.take("{"), self.take(), self.take("}")
            return ("n", Numeral(value + Fraction(int(again), 10**decimals * (10 ** len(again) - 1))))
        if not decimals and not exponent and (part := self.attempt(self.part)):
            return ("n", Numeral(value + part[1]))
        if self.next.strip('"') in LARGE:
            value *= LARGE[self.take().strip('"')]
        return ("n", Numeral(value, places=decimals or None))

    def part(self) -> Tree | None:
        """Read the fraction of a mixed number: 3\\frac{1}{2}, 3 1/2."""
        if self.has(r"\frac"):
            quotient = ratio(self.command("frac"))
            return None if quotient is None or quotient < 0 or self.next in ("^", "!") else ("n", Numeral(quotient))
        upper, _, lower = self.take(), self.take("/"), self.take()
        return ("n", Numeral(f"{upper}/{lower}")) if upper.isdecimal() and lower.isdecimal() else None

    def command(self, name: str) -> Tree:
        if name == "frac":
            return times(self.argument(), power(self.argument(), MINUS))
        if name == "sqrt":
            root = self.group() if self.next == "[" else ("n", Numeral(2))
            return power(self.argument(), power(root, MINUS))
        if name == "binom":
            return ("f", "binom", self.argument(), self.argument())
        if name in ("lfloor", "lceil"):
            inner, _ = self.sum(), self.take(*CLOSERS["\\" + name])
            return ("f", name, inner)
        if name in BIG:
            return ("f", name, *self.scripts(), self.product())
        if name in NAMED:
            return self.function(name)
        if name in ("overline", "bar", "dot", "tilde", "widetilde"):
            return ("s", f"{name} {self.argument()}")
        if name in ("mathbb", "R", "Z"):
            letter = self.argument()[1] if name == "mathbb" else name
            return REALS if letter == "R" else ("s", "\\" + letter)
        if name.startswith("begin"):
            return self.matrix(name)
        if "\\" + name in NO_FACTOR:
            raise ValueError(name)
        return ("s", "\\" + name)

    def function(self, name: str) -> Tree:
        scripts = self.scripts()
        raised = scripts.pop()[1] if scripts and scripts[-1][0] == "up" else None
        if raised == MINUS and name in TRIGONOMETRY:
            name, raised = f"arc{name}", None
        inner = self.primary() if self.next in ("(", "[", "{") else self.product(chained=False) if self.next else ONE
        if name == "exp" and not scripts:
            return power(("s", "e"), inner if raised is None else times(inner, raised))
        found = ("f", name, *scripts, *(inner[3:] if inner[0] == "()" else inner[1:] if inner[0] == "," else (inner,)))
        return power(found, raised) if raised else found

    def scripts(self) -> list[Tree]:
        found = []
        while self.next in ("_", "^"):
            found.append(("up" if self.take() == "^" else "low", self.argument()))
        return found

    def matrix(self, name: str) -> Tree:
        """Read the rows between \\begin{pmatrix} and \\end{pmatrix}; of cases, if one stands in a row."""
        if not re.search("matrix|array|cases|aligned", name):
            raise ValueError(name)
        rows: list[list[Tree]] = [[]]
        while not self.has(r"\end"):
            if self.has(r"\\"):
                rows.append([])
            elif not self.has("&", ","):
                rows[-1].append(self.chain())
        rows = [cells for cells in rows if cells]
        if "cases" in name or "aligned" in name:
            return self.take("") if max(map(len, rows)) > 1 else (",", *(cells[0] for cells in rows))
        if 1 in (len(rows), max(map(len, rows))):  # a vector
            return ("()", "", "", *(cell for cells in rows for cell in cells))
        found = ("matrix", *(("row", *cells) for cells in rows))
        return ("f", "det", found) if "vmatrix" in name.lower() else found


def _apart(tree: Tree) -> Tree:
    """(x, y) = (1, 2) is x = 1, y = 2."""
    if tree[0] != "=" or not tree[2][0] == tree[-1][0] == "()" or not len(tree[2]) == len(tree[-1]) > 3:
        return tree
    return (",", *(("=", "=", *pair) for pair in zip(tree[2][3:], tree[-1][3:], strict=True)))


def _with_sign(sign: str, term: Tree) -> Tree:
    if term[0] == "unit":
        return ("unit", _with_sign(sign, term[1]), term[2])
    return term if sign == "+" else times(MINUS, term) if sign == "-" else ("f", "pm", sign == r"\pm", term)


def _signed(tree: Tree, sign: str) -> Tree:
    """Replace a \\pm by plus or minus."""
    if tree[:2] == ("f", "pm"):
        return _with_sign("+" if (sign == "+") == tree[2] else "-", _signed(tree[3], sign))
    return rebuilt(tree, lambda each: _signed(each, sign))


def _interval(members: list[Tree], signs: list[str]) -> Tree | None:
    """x < 2, -2 < x \\le 1, x \\ne 5 and x \\in S as unions of intervals; None for other relations."""
    if signs[0] in (">", r"\ge"):
        members, signs = members[::-1], [ORDER.get(each, each) for each in signs[::-1]]
    name = next((each for each in (*members[1:2], members[0]) if is_name(each)), None)
    if signs == [r"\in"] and is_name(members[0]):
        return members[1] if members[1][0] in ("u", "{}") else ("u", members[1]) if members[1][0] == "()" else None
    if signs == [r"\ne"] and is_name(members[0]):
        return _all_but(members[1])
    if name is None or not set(signs) <= {"<", r"\le"} or len(signs) > 2 or (len(signs) == 2 and name != members[1]):
        return None
    if len(signs) == 1:
        below = name == members[0]  # x < 2
        members, signs = ([FROM, *members], ["<", *signs]) if below else ([*members, TO], [*signs, "<"])
    return ("u", ("()", "(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]", members[0], members[2]))


def _all_but(value: Tree) -> Tree:
    return ("u", ("()", "(", ")", FROM, value), ("()", "(", ")", value, TO))
