"""Multiple choice and dialogue: SciKnowEval, Prompt-Collection."""

import re

from megatron_rft.data.fields import Fields, Row, as_row, conversation, system, unusable

LETTERED = re.compile(r"^([A-Z]): (.*?)(?=^[A-Z]: |\Z)", re.MULTILINE | re.DOTALL)
STEP_BY_STEP = "Please reason step by step."
CHOICE_SYSTEM = """Select the right one of the options. Respond in this form:
<reasoning>
...
</reasoning>
<answer>
the letter of the option, and nothing else
</answer>"""


def sciknoweval(fields: Fields) -> Row:
    """As published (question, choices, answerKey), or as SDPO's authors prepare it, options within the prompt."""
    if not fields.has("choices"):
        return _prepared(fields)
    choices = fields.object("choices")
    labels, texts = choices.texts("label"), choices.texts("text")
    if len(labels) != len(texts):
        raise choices.wrong(f"its choices have {len(labels)} labels and {len(texts)} texts: each text needs a label")
    options = dict(zip(labels, texts, strict=True))
    key = str(fields.maybe("answerKey") or "").strip()
    if not options or key not in options:
        return unusable("not a multiple choice")
    listed = "\n".join(f"{letter}: {text}" for letter, text in options.items())
    details = fields.object("details") if fields.has("details") else fields
    return as_row(
        f"{fields.text('question')}\n\n{listed}\n{STEP_BY_STEP}",
        key,
        choices=options,
        subject=fields.maybe("domain"),
        level=details.maybe("level"),
        task=details.maybe("task"),
        history=system(CHOICE_SYSTEM),
    )


def _prepared(fields: Fields) -> Row:
    prompt = fields.text("prompt")
    if fields.maybe("kind") not in (None, "mcq"):
        return unusable("not a multiple choice")
    options = {letter: text.strip() for letter, text in LETTERED.findall(prompt.strip().removesuffix(STEP_BY_STEP))}
    return as_row(
        prompt,
        fields.text("answer").strip(),
        choices=options,
        subject=fields.file.stem.removesuffix("_train").removesuffix("_test"),  # the only place that says it
        id=fields.maybe("idx"),
        history=system(fields.maybe("system") or ""),
    )


def prompt_collection(fields: Fields) -> Row:
    """Dialogues that end with the user's turn; a reward model grades what comes next."""
    if fields.has("context_messages"):
        messages = fields.items("context_messages")
        if messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
            return unusable("its last turn is the assistant's")
        history, question = conversation(messages, fields)
    else:
        history, question = [], fields.text("context")
    return as_row(question, "", history=history, subject=fields.maybe("dataset"), id=fields.maybe("id"))
