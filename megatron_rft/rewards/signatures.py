"""How a user's function is called: with (prompt, text), with lists (prompts, texts), or as TRL or verl call theirs.

TRL (`trl`, and `trl_chat` where completions are lists of messages): function(prompts, completions, **columns), lists of
which the function gets those that it takes. verl: function(data_source, solution_str, ground_truth, extra_info), which
returns a number or a dict with its "score".
"""

import inspect
from collections.abc import Callable, Sized
from typing import Any

from megatron_rft.responses import Prompt, Score
from megatron_rft.utils.errors import CodeError, ConfigError
from megatron_rft.utils.user_code import broken, defined, name_of

OPTION = "reward.function"
LISTS = ("lists", "trl", "trl_chat")  # take all responses to a problem; the others take one
OF_OTHERS = {"completions": ("TRL", "trl"), "solution_str": ("verl", "verl")}  # by an argument's name
OF_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
ARGUMENTS = {None: "prompt, text", "verl": ", ".join(OF_VERL)}


def check(function: Any, named: str | None, code: str) -> str:
    """The signature of a function. `named`: the recipe's; None: "one" or "lists".

    Raises:
        ConfigError: the function cannot be called in this way.
    """
    try:
        signature = inspect.signature(function)
        names = list(signature.parameters)
        for library, other in (OF_OTHERS[name] for name in names if named is None and name in OF_OTHERS):
            raise ConfigError(
                f"{OPTION}: {code} has the signature of {library}: write "
                f"reward: {{kind: own, function: {code}, signature: {other}}}"
            )
        if named in LISTS:
            signature.bind_partial(completions=[])
        elif named == "verl":
            signature.bind(**dict.fromkeys(OF_VERL))
        else:
            signature.bind(None, "")
    except TypeError as error:
        given = ARGUMENTS.get(named, "prompts, completions, and the row's columns")
        raise ConfigError(f"{OPTION}: {code} cannot be called with ({given}): {error}") from None
    return named or ("lists" if names[0] == "prompts" else "one")


def call(signature: str, function: Callable[..., Any], prompts: list[Prompt], texts: list[str]) -> Any:
    match signature:
        case "one":
            return function(prompts[0], texts[0])
        case "lists":
            return function(prompts, texts)
        case "verl":
            fields, answer = prompts[0].fields, prompts[0].answer
            truth = (fields.get("reward_model") or {}).get("ground_truth", answer)
            given = fields.get("data_source", ""), texts[0], truth, fields.get("extra_info", fields)
            return function(**dict(zip(OF_VERL, given, strict=True)))
    return function(**_of_trl(function, prompts, texts, signature == "trl_chat"))


def results(signature: str, function: Callable[..., Any], result: Any, count: int) -> Any:
    """The numbers and Scores of what a function returned for `count` responses."""
    if signature in LISTS:
        if isinstance(result, Sized) and len(result) == count:
            return result
        raise broken(function, result, f"return a list of {count} numbers or Scores, one for each response")
    if not isinstance(result, dict):
        return [result]
    if signature == "verl" and "score" in result:
        return [Score(result["score"], correct=result.get("acc"), details=result)]
    fix = 'return Score(result["score"], details=result). A function with verl\'s arguments has signature: verl'
    raise broken(function, result, 'a dict needs a "score"' if signature == "verl" else fix)


def _of_trl(function: Callable[..., Any], prompts: list[Prompt], texts: list[str], chat: bool) -> dict[str, Any]:
    given: dict[str, Any] = {name: [prompt.fields.get(name) for prompt in prompts] for name in prompts[0].fields}
    given |= {"prompts": [prompt.question or prompt.text for prompt in prompts], "completions": texts}
    for name, role in (("prompts", "user"), ("completions", "assistant")) if chat else ():
        given[name] = [[{"role": role, "content": text}] for text in given[name]]
    signature = inspect.signature(function)
    if not any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values()):
        given = {name: values for name, values in given.items() if name in signature.parameters}
    try:
        signature.bind(**given)
    except TypeError as error:
        columns = ", ".join(prompts[0].fields)
        raise CodeError(f"{name_of(function)} ({defined(function)}): {error}; the rows have {columns}") from None
    return given
