"""A calculator as a tool: the template shows its types and docstring to the policy."""


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b
