"""Draws RUN/refinements.jsonl as one HTML page: what the refiner changed, and each token's cross entropy (figure 6 of
the paper).

The page has no script and loads nothing. docs/metrics.md describes the file's format.
"""

import html
from pathlib import Path

from megatron_rft.utils.files import read_json_lines

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; color: #222; }
section { border-top: 1px solid #ccc; padding: 1rem 0; }
.sides { display: grid; grid-template-columns: 1fr 1fr; gap: 1.5rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; margin: 0.3rem 0; }
.prompt { background: #f4f4f4; padding: 0.5rem; max-height: 14rem; overflow: auto; }
.scale { display: inline-block; width: 12rem; height: 0.8rem; border: 1px solid #ccc;
         background: linear-gradient(to right, rgba(213,94,0,0), rgba(213,94,0,1)); vertical-align: middle; }
"""
DARKEST = 5.0  # nats; tokens above it have the darkest colour
PAGE = "refinements.html"


def write(run: Path, data: Path) -> Path:
    """Draw the examples in `data` into RUN/refinements.html."""
    path = run / PAGE
    path.write_text(render(run.resolve().name, read_json_lines(data)), encoding="utf-8")
    return path


def render(name: str, lines: list[dict]) -> str:
    examples = [_example(line["step"], each) for line in lines for each in line["examples"]]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(name)}: refinements</title>"
        f"<style>{STYLE}</style><h1>{html.escape(name)}: what the refiner changed</h1>"
        f"<p>The darker a token, the less likely it was to the policy, at that step, after the tokens before it: "
        f"0 <span class=scale></span> {DARKEST:g} nats and more. Point at a token for its number.</p>"
        + "".join(examples)
        + "</html>\n"
    )


def _example(step: int, example: dict) -> str:
    sides = "".join(
        f"<div><b>{title}</b>, reward {example[reward]:g}<pre>{_tokens(example, side)}</pre></div>"
        for title, side, reward in (("Response", "response", "reward"), ("Refined", "refined", "refined_reward"))
    )
    return (
        f"<section><h2>Step {step}, problem {example['problem']}</h2>"
        f"<pre class=prompt>{html.escape(example['prompt'])}</pre><div class=sides>{sides}</div></section>"
    )


def _tokens(example: dict, side: str) -> str:
    pairs = zip(example[f"{side}_tokens"], example[f"{side}_cross_entropy"], strict=True)
    return "".join(_token(text, value) for text, value in pairs)


def _token(text: str, value: float) -> str:
    shade = min(max(value / DARKEST, 0.0), 1.0)
    return f'<span style="background:rgba(213,94,0,{shade:.2f})" title="{value:.2f} nats">{html.escape(text)}</span>'
