"""examples/notebook.ipynb in a kernel, with fewer steps."""

import json
import re

import pytest

from tests.integration.tiny import ROOT

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (tools/setup_env.sh cpu,test)")
pytest.importorskip("ipykernel", reason="ipykernel is not installed (tools/setup_env.sh cpu,test)")


def test_the_notebook_runs(tmp_path, monkeypatch):
    import nbformat

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    text = (ROOT / "examples/notebook.ipynb").read_text()
    assert all(not cell.get("outputs") for cell in json.loads(text)["cells"]), "clear the outputs before a commit"
    for before, after in (
        ("runs/notebook", str(tmp_path)),
        ("warm_steps, steps = 250, 40", "warm_steps, steps = 22, 3"),
        (r"\"prompts_per_step\": 16", r"\"prompts_per_step\": 4"),
        (r"{\"limit\": 100}", r"{\"limit\": 8}"),
    ):
        assert before in text, before
        text = text.replace(before, after)
    notebook = nbformat.reads(text, as_version=4)
    limits = {"timeout": 3600, "startup_timeout": 600, "iopub_timeout": 600}
    nbclient.NotebookClient(notebook, **limits, resources={"metadata": {"path": str(ROOT / "examples")}}).execute()
    shown = ["".join(str(output) for output in cell.get("outputs", ())) for cell in notebook.cells]
    assert "[1.0, 0.1, 0.0]" in shown[5]
    assert "<progress value=3 max=3>" in shown[6] and "image/png" in shown[7] and "step 3, reward" in shown[9]
    assert re.search(r"pass@1 \d\.\d\d ± \d\.\d\d on 8 problems", shown[11])
