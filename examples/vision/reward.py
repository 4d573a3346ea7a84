"""The reward: 1 for the right word alone."""


def exact(prompt, text: str) -> float:
    return float(text.strip() == prompt.answer)
