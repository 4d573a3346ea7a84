"""Counts what a stranger must read: the files and lines that one training step touches, functions that take the recipe,
class names that stand twice, lines and modules of the package.

    python tools/house.py [--list] [--warm]

It makes the quickstart's reinforcement learning (examples/quickstart/pipo.yaml: GRPO with PIPO) small, on one rank with
the hf engine, and traces step 5 in all threads. Every function of the package that is called counts with all its lines.
The window of PIPO is 2, so that the step verifies. --list prints the files with their lines.

The model is random: it answers noise, such as 8*C48!3465, which the grader reads as a formula. --warm starts from a
warm start of half a minute on demonstrations, as the quickstart does: most answers are then plain numbers.
"""

import argparse
import ast
import contextlib
import io
import sys
import tempfile
import threading
import warnings
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the quickstart's model
PACKAGE = ROOT / "megatron_rft"
STEP = 5
OFF = {"data.test": "null", "evaluation": "null", "checkpoint.every": 0}
SMALL = OFF | {
    "run.steps": STEP + 1,
    "model.initialise": "random",
    "data.validation": "null",
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 4,
    "rollout.max_response_tokens": 8,
    "rollout.engine": "hf",
    "pipo.window": 2,
}
WARM = OFF | {"run.epochs": "null", "run.steps": 75, "algorithm.batch_sequences": 32, "optimizer.lr": 3e-3}
Code = tuple[str, int, str]  # file, first line, name of a function


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the files that the step touches")
    parser.add_argument("--warm", action="store_true", help="let the model learn from demonstrations first")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")  # megatron-core's
    called = traced_step(args.warm)
    lines = {path: lines_of(path, functions) for path, functions in called.items()}
    print(f"a step touches        {len(lines)} files, {sum(lines.values()):,} lines of their functions")
    sources = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    inside, outside = take_the_recipe(sources)
    print(f"take the recipe       {outside} functions outside of config and plan, {inside} in them")
    twice = {name: where for name, where in classes(sources).items() if len(where) > 1}
    print(f"class names twice     {len(twice)} (a section and the objective that it configures count as one)")
    for name, where in sorted(twice.items()):
        print(f"    {name}: {', '.join(where)}")
    whole = sum(len(path.read_text().splitlines()) for path in sources)
    print(f"the package           {whole:,} lines in {len(sources)} modules")
    if args.list:
        for path, count in sorted(lines.items(), key=lambda item: -item[1]):
            print(f"{count:6} {path.relative_to(ROOT)}")


def traced_step(warm: bool = False) -> dict[Path, set[int]]:
    """Return by file the first lines of the functions that are called in STEP. `warm`: of a model with a warm start."""
    from examples.quickstart import arithmetic
    from megatron_rft.training.run import TrainingRun

    called: set[Code] = set()
    prefix = str(PACKAGE)

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(prefix):
            called.add((code.co_filename, code.co_firstlineno, code.co_name))

    def follow(function) -> None:
        sys.setprofile(function)
        threading.setprofile(function)

    plain = TrainingRun.steps

    def steps(run):
        for step in plain(run):
            follow(note if step == STEP else None)
            yield step
        follow(None)

    with tempfile.TemporaryDirectory() as folder:
        arithmetic.write_model_folder(f"{folder}/model")
        options = SMALL | {"run.output_dir": f"{folder}/run", "model.path": f"{folder}/model"}
        if warm:
            train("sft", WARM | {"run.output_dir": f"{folder}/sft", "model.path": f"{folder}/model"})
            options |= {"model.path": f"{folder}/sft/export", "rollout.max_response_tokens": 64}
            options["model.initialise"] = "pretrained"
        TrainingRun.steps = steps
        train("pipo", options)
    found: dict[Path, set[int]] = defaultdict(set)
    for file, line, _ in called:
        found[Path(file)].add(line)
    return found


def train(name: str, options: dict[str, object]) -> None:
    """Run a recipe of the quickstart."""
    from megatron_rft import training
    from megatron_rft.config import load

    recipe = load(str(ROOT / f"examples/quickstart/{name}.yaml"), [f"{key}={value}" for key, value in options.items()])
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = training.train(recipe)
    if status:
        sys.exit(f"the run ended with status {status}:\n{output.getvalue()}")


def lines_of(path: Path, first_lines: set[int]) -> int:
    """Return the number of lines of a file's functions that begin at `first_lines`; lambdas and comprehensions are part
    of the function around them."""
    covered: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first in first_lines:
                covered |= set(range(first, node.end_lineno + 1))
    return len(covered)


def take_the_recipe(sources: dict[Path, ast.Module]) -> tuple[int, int]:
    """Return the functions in config and plan, and elsewhere, with an argument `recipe` or one of type Recipe."""
    found = Counter()
    for path, tree in sources.items():
        part = path.relative_to(PACKAGE).parts[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                types = [(a.arg, ast.unparse(a.annotation or ast.Constant(""))) for a in arguments]
                found[part in ("config", "plan")] += any(name == "recipe" or "Recipe" in kind for name, kind in types)
    return found[True], found[False]


def classes(sources: dict[Path, ast.Module]) -> dict[str, list[str]]:
    """Return by name where classes are defined."""
    found: dict[str, list[str]] = defaultdict(list)
    sections = {node.name for path, node in _classes(sources) if path.is_relative_to(PACKAGE / "config")}
    for path, node in _classes(sources):
        its_section = path.is_relative_to(PACKAGE / "objectives") and node.name in sections
        if not its_section:
            found[node.name].append(str(path.relative_to(PACKAGE)))
    return found


def _classes(sources: dict[Path, ast.Module]) -> list[tuple[Path, ast.ClassDef]]:
    return [(path, n) for path, tree in sources.items() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]


if __name__ == "__main__":
    main()
