"""How a user's function is called: with (prompt, text), with lists (prompts, texts), or as TRL or verl call theirs.

TRL (`trl`, and `trl_chat` where completions are lists of messages): function(prompts, completions, **columns), lists of
as many values, of which the function gets those that it takes. verl: function(data_source, solution_str, ground_truth,
extra_info), which returns a number or a dict with its "score".
"""

import inspect
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any

from megatron_rft.responses import Prompt, Score
from megatron_rft.utils.errors import CodeError, ConfigError
from megatron_rft.utils.user_code import broken, defined

OPTION = "reward.function"
Function = Callable[..., Any]
OF_OTHERS = {"completions": ("TRL", "trl"), "solution_str": ("verl", "verl")}  # by an argument's name


@dataclass(frozen=True)
class Signature:
    """`call(function, prompts, texts)`, and `results(function, result, count)`. `lists`: it takes all responses to a
    problem; else one."""

    call: Callable[[Function, list[Prompt], list[str]], Any]
    results: Callable[[Function, Any, int], Any]
    lists: bool = True


def one_result(function: Function, result: Any, count: int) -> list[Any]:
    if isinstance(result, dict) and "score" in result:
        fix = 'return Score(result["score"], details=result). A function with verl\'s arguments has signature: verl'
        raise broken(function, result, fix)
    return [result]


def several_results(function: Function, result: Any, count: int) -> Any:
    if not isinstance(result, Sized) or len(result) != count:
        raise broken(function, result, f"return a list of {count} numbers or Scores, one for each response")
    return result


def trl(function: Function, prompts: list[Prompt], texts: list[str], chat: bool = False) -> Any:
    questions = [prompt.question or prompt.text for prompt in prompts]
    given: dict[str, Any] = {name: [prompt.fields.get(name) for prompt in prompts] for name in prompts[0].fields}
    given["prompts"] = [[message("user", each)] for each in questions] if chat else questions
    given["completions"] = [[message("assistant", each)] for each in texts] if chat else texts
    signature = inspect.signature(function)
    if not any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values()):
        given = {name: values for name, values in given.items() if name in signature.parameters}
    try:
        signature.bind(**given)
    except TypeError as error:
        columns = ", ".join(prompts[0].fields)
        raise CodeError(f"{function.__name__} ({defined(function)}): {error}; the rows have {columns}") from None
    return function(**given)


def message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def verl(function: Function, prompts: list[Prompt], texts: list[str]) -> Any:
    (prompt,), (text,), fields = prompts, texts, prompts[0].fields
    truth = fields.get("reward_model") or {"ground_truth": prompt.answer}
    return function(
        data_source=fields.get("data_source", ""),
        solution_str=text,
        ground_truth=truth.get("ground_truth", prompt.answer),
        extra_info=fields.get("extra_info", fields),
    )


def verl_result(function: Function, result: Any, count: int) -> list[Any]:
    if not isinstance(result, dict):
        return [result]
    if "score" not in result:
        raise broken(function, result, 'return a number or a dict with a "score"')
    return [Score(result["score"], correct=result.get("acc"), details=result)]


SIGNATURES = {
    "one": Signature(lambda function, prompts, texts: function(prompts[0], texts[0]), one_result, lists=False),
    "lists": Signature(lambda function, prompts, texts: function(prompts, texts), several_results),
    "trl": Signature(trl, several_results),
    "trl_chat": Signature(lambda *given: trl(*given, chat=True), several_results),
    "verl": Signature(verl, verl_result, lists=False),
}


def check(function: Any, named: str | None, code: str) -> str:
    """The name in SIGNATURES of a function's signature. `named`: the recipe's.

    Raises:
        ConfigError: the function cannot be called in this way.
    """
    try:
        signature = inspect.signature(function)
        names = list(signature.parameters)
        for name, (library, other) in OF_OTHERS.items() if named is None else ():
            if name in names:
                raise ConfigError(
                    f"{OPTION}: {code} has the signature of {library}: write "
                    f"reward: {{kind: own, function: {code}, signature: {other}}}"
                )
        if named == "verl":
            signature.bind(data_source="", solution_str="", ground_truth="", extra_info={})
        elif named is not None:
            signature.bind_partial(completions=[])
        else:
            signature.bind(None, "")
    except TypeError as error:
        called = {None: "prompt, text", "verl": "data_source, solution_str, ground_truth, extra_info"}
        given = called.get(named, "prompts, completions, and the row's columns")
        raise ConfigError(f"{OPTION}: {code} cannot be called with ({given}): {error}") from None
    return named or ("lists" if names[0] == "prompts" else "one")
