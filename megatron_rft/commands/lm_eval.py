"""`megatron-rft harness`: evaluates a model on tasks of lm-evaluation-harness, for benchmarks without an adapter.

The harness loads the model with transformers; a Megatron checkpoint is first converted into a temporary folder.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from megatron_rft.commands.convert import find_source
from megatron_rft.conversion import convert as conversion
from megatron_rft.plan import check_writable, make_folder
from megatron_rft.utils import device
from megatron_rft.utils.errors import FINISHED, DataError, UserError

INSTALL = "pip install 'lm-eval[hf]'"


def run(args: argparse.Namespace) -> int:
    """Run the tasks, write `args.out`/results.json and print the results."""
    device.check_torch_build()
    check_writable(args.out, "--out")
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ImportError as error:
        raise UserError(f"lm-evaluation-harness is not installed ({error.name}): {INSTALL}") from None
    source = find_source(args.model, args.like, "MODEL")
    tasks, out = args.tasks.split(","), args.out
    manager = TaskManager(include_path=args.include)
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise DataError(
            f"--tasks: lm-evaluation-harness has no {', '.join(unknown)}; `lm_eval ls tasks` lists what it has, and "
            "--include names a folder with more"
        )
    make_folder(out, "--out")
    with tempfile.TemporaryDirectory(dir=out, prefix=".model-") as folder:
        path, tokenizer = source.path, {"tokenizer": str(source.companions)} if args.like else {}
        if source.format == "megatron":
            path = Path(folder) / "model"
            conversion.convert(source, path, "hf")
        results = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(path)} | tokenizer,
            device="cuda" if torch.cuda.is_available() else "cpu",
            tasks=tasks,
            task_manager=manager,
            limit=args.limit,
        )
    print(make_table(results))
    kept = {name: results[name] for name in ("results", "versions", "n-shot", "n-samples", "higher_is_better")}
    (out / "results.json").write_text(json.dumps(kept, indent=2, default=str) + "\n")
    print(f"results: {out / 'results.json'}")
    return FINISHED
