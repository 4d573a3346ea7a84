"""The bridge to lm-evaluation-harness, with a custom task and an untrained model."""

import json
import sys

import pytest

from megatron_rft.commands import main
from megatron_rft.data import arithmetic
from megatron_rft.utils import device

TASK = """task: additions
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/rows.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}\\n"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 8}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def test_the_package_that_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # import then says ImportError
    assert main.main(["harness", str(tmp_path), "--tasks", "gsm8k"]) == 2
    assert "lm-evaluation-harness is not installed (lm_eval): pip install 'lm-eval[hf]'" in capsys.readouterr().err


def test_a_cpu_build_does_not_leave_a_gpu_unused(tmp_path, capsys, monkeypatch):
    for name in ("torch_is_cpu_build", "has_cuda_device"):
        monkeypatch.setattr(device, name, lambda: True)
    assert main.main(["harness", str(tmp_path), "--tasks", "gsm8k"]) == 2
    assert "is a CPU build, and this machine has an NVIDIA GPU" in capsys.readouterr().err


def test_a_task_on_a_megatron_checkpoint(tmp_path, capsys):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    from transformers import AutoConfig, AutoModelForCausalLM

    model = arithmetic.write_model_folder(tmp_path / "hf", num_hidden_layers=1)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    assert main.main(["convert", str(model), str(tmp_path / "megatron")]) == 0
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n' * 3)
    (tmp_path / "additions.yaml").write_text(TASK.replace("FOLDER", str(tmp_path)))
    command = ["harness", str(tmp_path / "megatron"), "--include", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main.main([*command, "--tasks", "additionz"]) == 2
    assert "lm-evaluation-harness has no additionz" in capsys.readouterr().err
    assert main.main([*command, "--tasks", "additions", "--limit", "2"]) == 0
    found = json.loads((tmp_path / "out/results.json").read_text())
    assert found["n-samples"]["additions"]["effective"] == 2 and found["results"]["additions"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["results.json"]
